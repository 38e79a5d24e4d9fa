"""Runs commands as somebody would who has only the environment and a terminal."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from helpers.fork_server import ForkServer


ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


@dataclass(frozen=True, kw_only=True)
class Said:
    """What a command left in the terminal, and its exit status."""

    status: int
    out: str
    err: str

    @property
    def terminal(self) -> str:
        """All that was printed, folded to single spaces, so that a line break does not hide a sentence."""
        return " ".join(f"{self.out}\n{self.err}".split())


@dataclass(frozen=True)
class Shell:
    """
    A shell whose environment is active, and that has none of the variables this repository's tests set.

    Args:
        folder (`Path`):
            Where commands run.
        home (`Path`):
            The home folder, which is empty.
        fork_server (`ForkServer`, *optional*):
            What `run_forked` runs scripts in.
    """

    folder: Path
    home: Path
    fork_server: ForkServer | None = None

    def run(self, *command: str | Path, timeout: float = 240, **variables: str) -> Said:
        """Run a command of the environment (`python`, `accelerate`, `mcp-grpo`), with variables exported before it."""
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(BIN / program) if (BIN / program).exists() else program, *arguments],
            cwd=self.folder,
            env=self._environment(variables),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Said(status=done.returncode, out=done.stdout, err=done.stderr)

    def run_forked(self, *command: str | Path, timeout: float = 240, **variables: str) -> Said:
        """Run a script, or `mcp-grpo`, in a process that begins with the trainer imported, and so starts at once."""
        assert self.fork_server
        if command[0] == "mcp-grpo":
            command = ("-c", "import sys; from mcp_grpo.cli import main; sys.exit(main())", *command[1:])
        done = self.fork_server.start(*command, cwd=self.folder, env=self._environment(variables))
        status = done.wait(timeout)
        return Said(status=status, out=done.out, err=done.err)

    def _environment(self, variables: dict[str, str]) -> dict[str, str]:
        return {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",  # nothing is reached from here
            **variables,
        }
