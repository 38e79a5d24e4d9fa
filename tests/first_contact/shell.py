"""Runs commands as somebody would who has only the environment and a terminal."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


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
    """

    folder: Path
    home: Path

    def run(self, *command: str | Path, timeout: float = 240, **variables: str) -> Said:
        """Run a command of the environment (`python`, `accelerate`, `mcp-grpo`), with variables exported before it."""
        environment = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "HF_HUB_OFFLINE": "1",  # nothing is reached from here
            **variables,
        }
        program, *arguments = map(str, command)
        done = subprocess.run(
            [str(BIN / program) if (BIN / program).exists() else program, *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        return Said(status=done.returncode, out=done.stdout, err=done.stderr)
