"""However a run is ended, it ends soon, and no server outlives it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from helpers.policies import save_tiny_model
from helpers.sums import SERVER


SCRIPT = Path(__file__).parent / "servers" / "train.py"


def wait_for(condition, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@dataclass
class Run:
    """A run of `servers/train.py`."""

    program: subprocess.Popen[str]
    pid: int
    folder: Path
    status: int | None = None

    def processes(self) -> list[psutil.Process]:
        """The run and its children, and servers: processes that were given its folder as an argument."""
        found = []
        for process in psutil.process_iter():
            try:
                is_server = any(str(self.folder) in argument for argument in process.cmdline())
                if is_server or os.getsid(process.pid) == self.pid:
                    found.append(process)
            except (psutil.Error, ProcessLookupError):
                continue
        return found

    def wait(self) -> int:
        """How it ended."""
        if self.status is None:
            assert self.program.stdout
            self.status = int(self.program.stdout.readline())
        return self.status


@pytest.fixture(scope="module")
def program() -> Iterator[subprocess.Popen[str]]:
    """What starts runs at once, once it has imported all that they need."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env) as program:
        yield program


@pytest.fixture
def run(tmp_path: Path, program: subprocess.Popen[str], request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run in the middle of a rollout: waiting for a tool, or generating."""
    called = tmp_path / "called"
    if request.param == "tool":
        model, ready = request.getfixturevalue("adding_model"), called
    else:
        model, ready = save_tiny_model(tmp_path / "model"), tmp_path / "started"
    assert program.stdin
    assert program.stdout
    program.stdin.write(json.dumps([model, str(tmp_path), str(SERVER), "--hang", str(called)]) + "\n")
    program.stdin.flush()
    run = Run(program, int(program.stdout.readline()), tmp_path)
    try:
        wait_for(lambda: ready.exists() or not psutil.pid_exists(run.pid), 120)
        assert ready.exists(), (tmp_path / "log").read_text()
        time.sleep(0.5 if request.param == "generation" else 0)  # the step has begun; let it get into generation
        assert len(run.processes()) >= 2  # the run and its server
        yield run
    finally:
        for left in run.processes():
            left.kill()
        run.wait()  # the next answer is that of the next run


@pytest.mark.parametrize("run", ["tool", "generation"], indirect=True)
def test_ctrl_c_ends_a_rollout_soon_and_leaves_no_child(run: Run) -> None:
    os.kill(run.pid, signal.SIGINT)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not run.processes(), 20), f"left: {run.processes()}\n{(run.folder / 'log').read_text()}"
    assert run.wait() != 0
    assert "KeyboardInterrupt" in (run.folder / "log").read_text()


@pytest.mark.parametrize("run", ["tool"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_servers_do_not_outlive_a_run_that_is_killed(run: Run, signum: int) -> None:
    os.kill(run.pid, signum)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not run.processes(), 20), f"left: {run.processes()}"
    assert run.wait() != 0
