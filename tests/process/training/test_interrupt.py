"""However a run is ended, it ends soon, and no server outlives it."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from helpers.fork_server import ForkServer, Started
from helpers.marks import full
from helpers.policies import save_tiny_model
from helpers.sums import SERVER


SCRIPT = Path(__file__).parents[2] / "servers" / "train.py"


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

    started: Started
    folder: Path

    @property
    def pid(self) -> int:
        return self.started.pid

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


@pytest.fixture
def run(tmp_path: Path, fork_server: ForkServer, request: pytest.FixtureRequest) -> Iterator[Run]:
    """A run in the middle of a rollout: waiting for a tool, or generating."""
    called = tmp_path / "called"
    if request.param == "tool":
        model, ready = request.getfixturevalue("adding_model"), called
    else:
        model, ready = save_tiny_model(tmp_path / "model"), tmp_path / "started"
    command = (SCRIPT, model, tmp_path, SERVER, "--hang", called)
    run = Run(fork_server.start(*command, cwd=tmp_path, env={**os.environ}), tmp_path)
    try:
        wait_for(lambda: ready.exists() or not psutil.pid_exists(run.pid), 120)
        assert ready.exists(), run.started.err
        time.sleep(0.5 if request.param == "generation" else 0)  # the step has begun; let it get into generation
        assert len(run.processes()) >= 2  # the run and its server
        yield run
    finally:
        for left in run.processes():
            left.kill()
        run.started.wait()


@pytest.mark.parametrize("run", ["tool", full("generation")], indirect=True)
def test_ctrl_c_ends_a_rollout_soon_and_leaves_no_child(run: Run) -> None:
    os.kill(run.pid, signal.SIGINT)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not run.processes(), 20), f"left: {run.processes()}\n{run.started.err}"
    assert run.started.wait() != 0
    assert "KeyboardInterrupt" in run.started.err


@pytest.mark.parametrize("run", ["tool"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_servers_do_not_outlive_a_run_that_is_killed(run: Run, signum: int) -> None:
    os.kill(run.pid, signum)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not run.processes(), 20), f"left: {run.processes()}"
    assert run.started.wait() != 0
