"""vLLM's engine in a process of its own: it samples from the policy that is trained, and ends with the run, however that ends."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers.runs import make_trainer
from peft import LoraConfig

from mcp_grpo.sampling.vllm_backend import APART


LORA = LoraConfig(r=8, target_modules="all-linear")
ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 64 << 20}
SETTINGS: dict[str, Any] = {
    "use_vllm": True,
    "vllm_max_model_length": 2048,
    "vllm_engine_kwargs": ENGINE,
    "weight_sync": "adapter",
    "max_steps": 3,
    "learning_rate": 5e-3,
}
END_TIME = 60.0  # seconds for an engine to notice that it is alone
# Without `if __name__ == "__main__"`, so that a new process must not run it again.
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from helpers.runs import make_trainer
from with_vllm.test_vllm_apart import LORA, SETTINGS
print("begun", flush=True)
with make_trainer(Path({folder!r}), {model!r}, peft_config=LORA, **SETTINGS) as trainer:
    trainer.train()
    print("trained", flush=True)
    if {waits!r}:
        sys.stdin.read()
print("ended", flush=True)
"""


def program(folder: Path, model: str, *, waits: bool) -> subprocess.Popen[str]:
    path = folder / "program.py"
    tests = str(Path(__file__).parents[1])
    path.write_text(PROGRAM.format(tests=tests, folder=str(folder / "run"), model=model, waits=waits))
    return subprocess.Popen(
        [sys.executable, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )


def read_until(process: subprocess.Popen[str], line: str) -> list[str]:
    assert process.stdout is not None
    found: list[str] = []
    for each in process.stdout:
        found.append(each.strip())
        if found[-1] == line:
            break
    return found


def started(before: set[psutil.Process]) -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True)) - before


@pytest.mark.vllm
def test_an_engine_in_another_process_samples_from_the_policy_and_ends(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(APART, "1")
    before, program_of_tests = set(psutil.Process().children(recursive=True)), sys.modules["__main__"].__spec__
    with make_trainer(tmp_path, wide_adding_model, peft_config=LORA, **SETTINGS) as trainer:
        engine = trainer.vllm_generation.llm.llm_engine
        assert not hasattr(engine, "model_executor")
        assert sys.modules["__main__"].__spec__ is program_of_tests
        trainer.train()
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logs) == 3
        assert all(entry["align/logp_mae"] < 1e-5 for entry in logs)
        assert all(entry["sampler/weight_mismatch"] < 1e-4 for entry in logs)
        engines = [each for each in started(before) if "VLLM" in each.name() or "VLLM" in "".join(each.cmdline())]
        assert engines
    _, alive = psutil.wait_procs(engines, timeout=END_TIME)
    assert not alive


@pytest.mark.vllm
@pytest.mark.full
def test_a_program_without_a_guard_is_not_run_again(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(APART, "1")
    with program(tmp_path, wide_adding_model, waits=False) as process:
        said = read_until(process, "ended")
        assert process.wait(END_TIME) == 0
    assert [line for line in said if line in ("begun", "trained", "ended")] == ["begun", "trained", "ended"]


@pytest.mark.vllm
@pytest.mark.full
def test_an_engine_does_not_outlive_a_run_that_was_killed(
    tmp_path: Path, wide_adding_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(APART, "1")
    with program(tmp_path, wide_adding_model, waits=True) as process:
        read_until(process, "trained")
        children = psutil.Process(process.pid).children(recursive=True)
        engines = [each for each in children if "VLLM" in "".join(each.cmdline())]
        assert engines
        for each in engines:
            each.suspend()  # so that it cannot end by itself
        process.kill()
    deadline = time.monotonic() + END_TIME
    while any(each.is_running() for each in children) and time.monotonic() < deadline:
        time.sleep(0.5)
    left = [each for each in children if each.is_running()]
    for each in left:
        each.kill()
    assert not left
