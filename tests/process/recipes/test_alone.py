"""One process of several does something by itself: it takes itself for the only one, and nobody waits for it forever."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from recipe_parts.alone import call_alone

from mcp_grpo.errors import SettingsError


pytestmark = pytest.mark.full
RECIPES = Path(__file__).parents[3] / "recipes"

PROGRAM = """
import os, time
from recipe_parts.alone import call_alone
if __name__ == "__main__":
    print("begun", flush=True)
    call_alone(time.sleep, 600, seconds=600)
"""


def test_what_is_called_alone_knows_of_no_other_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    found = [
        call_alone(os.getenv, name, seconds=120) for name in ("WORLD_SIZE", "ACCELERATE_USE_FSDP", "OMP_NUM_THREADS")
    ]
    assert found == [None, None, "1"]
    assert os.environ["WORLD_SIZE"] == "2"


def test_what_fails_hangs_or_dies_is_told() -> None:
    with pytest.raises(SettingsError, match=r"^ValueError: invalid literal"):
        call_alone(int, "x", seconds=120)
    with pytest.raises(SettingsError, match="It took more than 1 seconds"):
        call_alone(time.sleep, 600, seconds=1)
    with pytest.raises(SettingsError, match="Its process ended with status 7"):
        call_alone(os._exit, 7, seconds=120)
    assert not psutil.Process().children()[1:]  # but for what looks after semaphores


def test_it_ends_with_the_process_that_called_it(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py")]
    environment = {**os.environ, "PYTHONPATH": str(RECIPES)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        assert program.stdout.readline() == "begun\n"
        deadline = time.monotonic() + 60
        while len(started := psutil.Process(program.pid).children()) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(5)  # for it to watch
        program.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs(started, timeout=60)
    assert not alive
