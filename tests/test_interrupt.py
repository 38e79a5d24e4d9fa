"""However a run is ended, it ends soon, and no server outlives it."""

import os
import signal
import subprocess
import sys
import time
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


def started(mark: Path) -> list[psutil.Process]:
    """Processes that were given this folder as an argument."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(mark) in argument for argument in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest):
    """A run in the middle of a rollout: waiting for a tool, or generating."""
    called = tmp_path / "called"
    if request.param == "tool":
        model, ready = request.getfixturevalue("adding_model"), called
    else:
        model, ready = save_tiny_model(tmp_path / "model"), tmp_path / "started"
    command = [sys.executable, str(SCRIPT), model, str(tmp_path), str(SERVER), "--hang", str(called)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
    try:
        wait_for(lambda: ready.exists() or process.poll() is not None, 120)
        assert ready.exists(), (tmp_path / "log").read_text()
        time.sleep(0.5 if request.param == "generation" else 0)  # the step has begun; let it get into generation
        assert len(started(tmp_path)) >= 2  # the run and its server
        yield process, tmp_path
    finally:
        for left in started(tmp_path):
            left.kill()
        process.wait(10)


@pytest.mark.parametrize("run", ["tool", "generation"], indirect=True)
def test_ctrl_c_ends_a_rollout_soon_and_leaves_no_child(run: tuple[subprocess.Popen, Path]) -> None:
    process, folder = run
    process.send_signal(signal.SIGINT)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not started(folder), 20), f"left: {started(folder)}\n{(folder / 'log').read_text()}"
    assert process.wait(1) != 0
    assert "KeyboardInterrupt" in (folder / "log").read_text()


@pytest.mark.parametrize("run", ["tool"], indirect=True)
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=["SIGTERM", "SIGKILL"])
def test_servers_do_not_outlive_a_run_that_is_killed(run: tuple[subprocess.Popen, Path], signum: int) -> None:
    process, folder = run
    process.send_signal(signum)
    process.wait(5)
    # To end the interpreter alone takes seconds, with all that TRL imports.
    assert wait_for(lambda: not started(folder), 20), f"left: {started(folder)}"
