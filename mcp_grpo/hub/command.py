"""The command that a run was started with, fit to be shown."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from mcp_grpo.tools.secrets import without_secrets


def run_command(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """
    The command that started this process.

    Args:
        argv (`Sequence[str]`, *optional*):
            The script and its arguments; those of this process if not given.
        environ (`Mapping[str, str]`, *optional*):
            The environment, which says whether `accelerate launch` started it; that of this process if not given.

    Returns:
        `str` or `None`: The command, with `***` for what a flag calls a secret, and with only the last part of a path
        that is absolute or leads out of the working directory. `None` in a notebook or a prompt, where there is none.
    """
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    script = argv[0] if argv else ""
    if script in ("", "-c", "-m") or "ipykernel" in script or PurePath(script).name == "ipython":
        return None
    words = [_without_folder(word) for word in without_secrets(argv)]
    if not script.endswith(".py"):
        return shlex.join(words)
    num_processes = environ.get("WORLD_SIZE", "1")
    if num_processes != "1":
        return shlex.join(["accelerate", "launch", "--num_processes", num_processes, *words])
    is_launched = any(name.startswith("ACCELERATE_") for name in environ)
    return shlex.join([*(("accelerate", "launch") if is_launched else ("python",)), *words])


def _without_folder(word: str) -> str:
    flag, is_assigned, value = word.partition("=")
    if is_assigned and flag.startswith("-"):
        return f"{flag}={_without_folder(value)}"
    is_elsewhere = word.startswith(("/", "~", "..")) or os.path.isabs(word)
    return (PurePath(word).name or word) if is_elsewhere else word
