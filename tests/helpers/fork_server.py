"""
Programs in processes that begin with the trainer imported, since its import takes longer than what most of them do.

For tests whose point is what a program does, not that it starts from nothing: variables that libraries read as they are
imported are those of the tests.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Started:
    """A program that was started, in a session of its own, and the folder that its output goes to."""

    pid: int
    folder: Path

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return (self.folder / "out").read_text()

    @property
    def err(self) -> str:
        """The same of its errors."""
        return (self.folder / "err").read_text()

    def wait(self, timeout: float = 240) -> int:
        """Return its exit status, as `subprocess` has it; kill it if it takes longer."""
        file, deadline = self.folder / "status", time.monotonic() + timeout
        while not file.exists():
            if time.monotonic() > deadline:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)
                raise TimeoutError(f"It ran for more than {timeout} s: {self.out}{self.err}")
            time.sleep(0.02)
        return int(file.read_text())


class ForkServer:
    """
    A process that has imported the trainer and forks for each program; what they print is kept in a folder.

    Args:
        folder (`Path`):
            Where its socket is, and what programs print.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the process. It ends when its standard input does."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # with a pool of threads it could not fork
        return subprocess.Popen([sys.executable, __file__, str(self._socket)], stdin=subprocess.PIPE, env=environment)

    def start(self, *command: str | Path, cwd: Path, env: Mapping[str, str]) -> Started:
        """Start `script.py ...` or `-c code ...` with these variables, and no others."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        request = {"command": [str(word) for word in command], "cwd": str(cwd), "env": dict(env), "to": str(folder)}
        deadline = time.monotonic() + 120  # of its imports
        while not self._socket.exists():
            assert time.monotonic() < deadline, "The fork server did not start."
            time.sleep(0.02)
        with socket.socket(socket.AF_UNIX) as connection, connection.makefile("rw") as stream:
            connection.settimeout(60)
            connection.connect(str(self._socket))
            stream.write(json.dumps(request) + "\n")
            stream.flush()
            return Started(int(stream.readline()), folder)

    @property
    def _socket(self) -> Path:
        return self._folder / "socket"


def _serve(address: str) -> dict[str, Any] | None:
    """Fork for each request and return it in the new process; return nothing when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for the programs
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{address}.new")
        listener.listen(64)
        os.rename(f"{address}.new", address)  # where it is, it listens
        while listener in select.select([listener, sys.stdin], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                if os.fork():
                    continue
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                with connection.makefile("rw") as stream:
                    request = json.loads(stream.readline())
                    if pid := os.fork():
                        stream.write(f"{pid}\n")
            if not pid:
                return request
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            file = Path(request["to"], "status")
            file.with_suffix(".new").write_text(str(status))
            file.with_suffix(".new").rename(file)
            os._exit(0)
    return None


def _become(command: list[str], cwd: str, env: dict[str, str], to: str) -> None:
    """Make this process look as if it had just been started."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    new = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    for stream, source in enumerate(
        (os.open(os.devnull, os.O_RDONLY), *(os.open(Path(to, n), new) for n in ("out", "err")))
    ):
        os.dup2(source, stream)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    first = "" if command[0] == "-c" else str(Path(command[0]).absolute().parent)
    sys.path[:1] = [first, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["-c", *command[2:]] if command[0] == "-c" else command


if __name__ == "__main__":
    gc.disable()  # nothing that is imported is garbage

    import datasets  # noqa: F401
    import peft  # noqa: F401

    import mcp_grpo.trainer  # noqa: F401

    gc.freeze()  # what was imported is garbage to no program; to look through it would take each seconds at its end
    gc.enable()

    if (request := _serve(sys.argv[1])) is not None:
        _become(**request)
        if sys.argv[0] == "-c":
            exec(request["command"][1], {"__name__": "__main__"})
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
