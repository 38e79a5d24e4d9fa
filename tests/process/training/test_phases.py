"""The phases of a step, and how long a turn may be: where memory runs out is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.runs import make_trainer
from peft import LoraConfig

from mcp_grpo import StopReason
from mcp_grpo.errors import OutOfMemoryError
from mcp_grpo.monitor import Phases, TrajectoryLog, profile_table
from mcp_grpo.monitor.phases import PHASES, remedies


LORA = LoraConfig(r=4, target_modules="all-linear")


@pytest.mark.full
def test_a_turn_is_as_long_as_it_may_be(tmp_path: Path, adding_model: str) -> None:
    settings = {"max_steps": 1, "num_generations": 4, "per_device_train_batch_size": 4}
    with make_trainer(tmp_path, adding_model, peft_config=LORA, max_turn_tokens=9, **settings) as trainer:
        trainer.train()
        [judged] = trainer.roll_out(trainer.train_dataset.select([0]))
    entry = next(e for e in trainer.state.log_history if "completions/max_length" in e)
    assert (entry["completions/max_length"], entry["stop/max_tokens"]) == (9, 1)
    assert (len(judged.completion_ids), judged.stop_reason) == (9, StopReason.MAX_TOKENS)


@pytest.mark.full
@pytest.mark.parametrize(
    ("phase", "method"),
    [
        ("rollout", "attempt"),
        ("scoring", "_calculate_rewards"),
        ("loss", "_compute_loss"),
        ("optimizer", "_clip_grad_norm"),
    ],
)
def test_running_out_of_memory_says_in_which_phase_and_what_would_help(
    tmp_path: Path, adding_model: str, phase: str, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_out(*args: Any, **kwargs: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    with make_trainer(tmp_path, adding_model, peft_config=LORA, max_steps=1) as trainer:
        if phase == "optimizer":
            trainer.create_optimizer()
            monkeypatch.setattr(trainer.optimizer, "step", run_out)
        else:
            monkeypatch.setattr(trainer._collector if phase == "rollout" else trainer, method, run_out)
        with pytest.raises(OutOfMemoryError) as caught:
            trainer.train()
    message = str(caught.value)
    assert f"in the phase '{phase}'" in message
    first, second = remedies(phase, trainer.args)[:2]
    assert first in message
    assert second in message
    assert "Tried to allocate 2.00 GiB" in message
    assert isinstance(caught.value, RuntimeError)


def test_what_is_used_already_is_not_advised() -> None:
    settings: Any = SimpleNamespace(
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
        vllm_gpu_memory_utilization=0.3,
        gradient_checkpointing=True,
        per_device_train_batch_size=1,
        max_completion_length=2048,
        weight_sync="adapter",
        max_concurrent_trajectories=None,
        max_staleness=0,
        beta=0.0,
        optim="paged_adamw_8bit",
    )
    for phase in PHASES:
        found = remedies(phase, settings)
        assert len(found) >= 2
        assert not any("sleep" in each or "checkpointing" in each or "batch_size" in each for each in found)
    assert "0.21" in remedies("loss", settings)[0]


def test_a_phase_within_another_is_taken_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(100))
    phases = Phases(SimpleNamespace())
    monkeypatch.setattr("time.perf_counter", lambda: float(next(now)))
    phases.measure()
    with phases("loss"), phases("scoring"):
        pass
    figures = phases.end_step()
    assert figures["profile/scoring_seconds"] == 1
    assert figures["profile/loss_seconds"] == 2
    assert figures["profile/step_seconds"] == 5
    assert figures["profile/other_seconds"] == 2
    table = profile_table([{**figures}])
    assert "| scoring | 1.000 | 20% | - |" in table


def test_an_engine_that_sleeps_takes_no_memory_of_a_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    gib = 2**30
    device = SimpleNamespace(used=70, peak=70)  # of 100; tensors have 75 all the while, 64 of them the engine's

    def turn(used: int, peak: int) -> None:
        device.used, device.peak = used, peak

    for name, answer in {
        "is_available": lambda: True,
        "synchronize": lambda: None,
        "reset_peak_memory_stats": lambda: None,
        "memory_reserved": lambda: 75 * gib,
        "mem_get_info": lambda: ((100 - device.used) * gib, 100 * gib),
        "max_memory_allocated": lambda: device.peak * gib,
    }.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    phases = Phases(None)
    turn(used=11, peak=70)
    phases.measure()  # asleep: 64
    phases.begin("sync")
    turn(used=75, peak=73)
    phases.end()  # awake
    phases.begin("rollout")
    turn(used=11, peak=74)
    phases.end()  # asleep again
    phases.begin("loss")
    turn(used=11, peak=75)
    phases.end()
    figures = phases.end_step()
    peaks = {name: figures[f"profile/{name}_peak_gib"] for name in ("sync", "rollout", "loss")}
    assert peaks == {"sync": 73, "rollout": 74, "loss": 11}


@pytest.mark.full
def test_decisions_and_phases_of_a_run_are_written(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(
        tmp_path, adding_model, peft_config=LORA, schema_mask="syntax", schema_mask_min_prob=0.0
    ) as trainer:
        trainer.measure_phases()
        trainer.watch_batches(TrajectoryLog(tmp_path / "debug"))
        trainer.train()
    logged = trainer.state.log_history[1]
    spent = sum(logged[f"profile/{name}_seconds"] for name in PHASES if f"profile/{name}_seconds" in logged)
    assert spent == pytest.approx(logged["profile/step_seconds"])
    assert logged["profile/rollout_seconds"] > 0
    text = (tmp_path / "debug" / "step-1.txt").read_text()
    trajectory = trainer._batch.trajectories[0]
    assert trainer._tokenizer.decode(trajectory.prompt_ids) in text
    for exchange in trajectory.exchanges:
        assert f"call of {exchange.call.name!r}" in text
    assert text.count("  yes  ") == sum(trajectory.loss_mask)
    assert f"reward exact_answer: {float(trainer._rewards[0])}" in text
    assert (tmp_path / "debug" / "step-1.html").stat().st_size > 0
