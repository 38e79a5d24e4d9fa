"""A model on a CPU computes with as many threads as suit it and the machine, unless somebody has chosen."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mcp_grpo.sampling import threads
from mcp_grpo.sampling.threads import choose_threads, free_cores


SMALL, LARGE = 500_000, 600_000_000


@pytest.fixture(autouse=True)
def torch_as_it_comes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As many threads as torch takes by itself on a machine of four cores, of which three are free."""
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(threads, "_num_allowed", lambda: 4)
    monkeypatch.setattr(threads.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(threads, "free_cores", lambda: 3)
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


def test_a_small_model_computes_on_one_thread_and_a_larger_one_on_the_free_cores() -> None:
    assert choose_threads(LARGE) == torch.get_num_threads() == 3
    torch.set_num_threads(4)
    assert choose_threads(SMALL) == torch.get_num_threads() == 1


def test_processes_of_one_machine_share_the_free_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_threads(LARGE) == 1


def test_a_number_that_somebody_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(2)
    assert choose_threads(SMALL) == torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert choose_threads(SMALL) == torch.get_num_threads() == 2


def test_a_thread_that_starts_later_computes_with_the_same_number() -> None:
    choose_threads(SMALL)
    seen: list[int] = []

    def compute() -> None:
        torch.ones(512, 512) @ torch.ones(512, 512)
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert seen == [1]


def test_free_cores_are_those_that_quota_and_load_leave_and_one_at_least(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = tmp_path / "cpu.max"
    monkeypatch.setattr(threads, "_CPU_MAX", quota)
    monkeypatch.setattr(threads, "_num_allowed", lambda: 8)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)

    def at(load: float) -> int:
        monkeypatch.setattr(threads.psutil, "getloadavg", lambda: (load, 0.0, 0.0))
        return free_cores()

    assert [at(load) for load in (0, 8, 40)] == [8, 4, 1]
    quota.write_text("max 100000\n")
    assert at(0) == 8
    quota.write_text("200000 100000\n")
    assert [at(load) for load in (0, 8)] == [2, 1]


@pytest.mark.parametrize(
    ("options", "variables", "expected"),
    [
        (["--cpu"], {}, 1),
        ([], {"OMP_NUM_THREADS": "3"}, 3),
        (["--num_cpu_threads_per_process", "3"], {}, 3),
    ],
)
@pytest.mark.full
def test_a_number_that_only_the_launcher_made_up_does_not_stay(
    tmp_path: Path, options: list[str], variables: dict[str, str], expected: int
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from mcp_grpo.sampling import threads\nimport os, torch\n"
        "torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))\n"  # which torch has done, up to the cores there are
        f"print('threads:', threads.choose_threads({SMALL}))"
    )
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    accelerate = Path(sys.executable).parent / "accelerate"
    done = subprocess.run(
        [accelerate, "launch", "--num_processes", "1", *options, script],
        env=environment | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"threads: {expected}\n" in done.stdout
