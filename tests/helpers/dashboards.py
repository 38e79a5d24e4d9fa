"""A dashboard in a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Self


PROGRAM = [sys.executable, "-c", "import sys; from mcp_grpo.cli import main; sys.exit(main())", "dashboard"]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Dashboard:
    """`mcp-grpo dashboard` at a free port: its address, and what it has said."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        command = [*PROGRAM, str(folder), "--port", "0", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.said: list[str] = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said.append(line.strip())
            if line.startswith("http://"):
                break
        else:
            raise AssertionError(f"The dashboard did not start: {self.said}")
        self.url = self.said[-1]

    def rest(self) -> str:
        """Return what it said after its address, once it has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
