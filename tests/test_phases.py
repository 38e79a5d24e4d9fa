"""The first phase of sampling, and the phases of a step: ratios stay 1, and where memory runs out is said."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.runs import make_trainer
from helpers.sums import ROWS
from peft import LoraConfig

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, StopReason
from mcp_grpo.errors import OutOfMemoryError, SettingsError
from mcp_grpo.monitor import Phases, TrajectoryLog, profile_table
from mcp_grpo.monitor.profile import PHASES, remedies


LORA = LoraConfig(r=4, target_modules="all-linear")
TWO_PHASES: dict[str, Any] = {
    "temperature": 0.7,
    "first_phase_steps": 2,
    "first_phase_temperature": 1.3,
    "max_steps": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 4,
}


class Recording(MCPGRPOTrainer):
    """Keeps the temperature of every rollout and every loss."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.rolled_out: list[tuple[float, int | None]] = []
        self.learnt: list[float] = []
        super().__init__(*args, **kwargs)

    def _rollout(self, *args: Any, **kwargs: Any) -> Any:
        rollout = super()._rollout(*args, **kwargs)
        self.rolled_out.append((rollout.keywords["temperature"], rollout.keywords["limits"].max_turn_tokens))
        return rollout

    def _compute_loss(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super()._compute_loss(*args, **kwargs)
        if self.model.training:
            self.learnt.append(self.temperature)
        return loss


@pytest.mark.parametrize("changes", [{}, {"advantage_mode": "hybrid", "beta": 0.05, "ref_sync": "ema"}])
@pytest.mark.parametrize("peft_config", [LORA, None], ids=["adapter", "full"])
def test_ratios_are_1_on_both_sides_of_the_end_of_the_first_phase(
    tmp_path: Path, adding_model: str, peft_config: Any, changes: dict[str, Any]
) -> None:
    settings = TWO_PHASES | {"first_phase_turn_tokens": 200, "max_turn_tokens": 300} | changes
    with make_trainer(tmp_path, adding_model, Recording, peft_config=peft_config, **settings) as trainer:
        trainer.train()
    assert trainer.rolled_out == [(1.3, 200)] * 2 + [(0.7, 300)] * 2
    assert trainer.learnt == [1.3, 1.3, 0.7, 0.7]
    history = [entry for entry in trainer.state.log_history if "ratio/p50" in entry]
    assert len(history) == 4
    for entry in history:
        assert entry["align/logp_mae"] < 1e-4


def test_a_batch_that_outlives_the_first_phase_is_learnt_from_at_its_own_temperature(
    tmp_path: Path, adding_model: str
) -> None:
    class Evaluating(Recording):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, eval_dataset=Dataset.from_list(ROWS), **kwargs)

    settings = TWO_PHASES | {"num_iterations": 2, "first_phase_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    settings |= {"learning_rate": 0.0, "per_device_eval_batch_size": 4}
    with make_trainer(tmp_path, adding_model, Evaluating, peft_config=LORA, **settings) as trainer:
        trainer.train()
    assert trainer.learnt == [1.3, 1.3, 0.7, 0.7]
    assert [temperature for temperature, _ in trainer.rolled_out].count(
        1.3
    ) == 1  # evaluation is never of the first phase
    history = [entry for entry in trainer.state.log_history if "ratio/p50" in entry]
    for entry in history:  # the weights do not move: any other temperature would show
        assert entry["ratio/p50"] == pytest.approx(1, abs=1e-3)
        assert entry["ratio/p90"] == pytest.approx(1, abs=1e-3)


def test_a_turn_is_as_long_as_it_may_be(tmp_path: Path, adding_model: str) -> None:
    settings = TWO_PHASES | {"first_phase_turn_tokens": 5, "first_phase_steps": 1, "max_steps": 2}
    with make_trainer(tmp_path, adding_model, peft_config=LORA, max_turn_tokens=9, **settings) as trainer:
        trainer.train()
        [evaluated] = trainer.roll_out(trainer.train_dataset.select([0]))
    first, second = (e for e in trainer.state.log_history if "completions/max_length" in e)
    assert [e["completions/max_length"] for e in (first, second)] == [5, 9]
    assert [e["stop/max_tokens"] for e in (first, second)] == [1, 1]
    assert (len(evaluated.completion_ids), evaluated.stop_reason) == (9, StopReason.MAX_TOKENS)


def test_a_first_phase_of_another_temperature_keeps_the_limit_of_turns(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, Recording, **TWO_PHASES, max_turn_tokens=9) as trainer:
        trainer.train()
    assert trainer.rolled_out == [(1.3, 9)] * 2 + [(0.7, 9)] * 2


@pytest.mark.parametrize(
    "changes", [{"first_phase_steps": 3}, {"first_phase_temperature": 1.2}, {"first_phase_turn_tokens": 3}]
)
def test_half_a_first_phase_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingsError, match="first_phase"):
        MCPGRPOConfig("out", use_cpu=True, **changes)


@pytest.mark.parametrize(
    ("phase", "method"),
    [
        ("rollout", "_attempt"),
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
            monkeypatch.setattr(trainer, method, run_out)
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
        rollout_ahead=0,
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


def test_decisions_and_phases_of_a_run_are_written(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(
        tmp_path, adding_model, peft_config=LORA, schema_mask="syntax", schema_mask_min_prob=0.0
    ) as trainer:
        trainer.measure_phases()
        TrajectoryLog(tmp_path / "debug").watch(trainer)
        trainer.train()
    logged = trainer.state.log_history[1]
    spent = sum(logged[f"profile/{name}_seconds"] for name in PHASES if f"profile/{name}_seconds" in logged)
    assert spent == pytest.approx(logged["profile/step_seconds"])
    assert logged["profile/rollout_seconds"] > 0
    text = (tmp_path / "debug" / "step-1.txt").read_text()
    trajectory = trainer._trajectories[0]
    assert trainer._tokenizer.decode(trajectory.prompt_ids) in text
    for exchange in trajectory.exchanges:
        assert f"call of {exchange.call.name!r}" in text
    assert text.count("  yes  ") == sum(trajectory.loss_mask)
    assert f"reward exact_answer: {float(trainer._rewards[0])}" in text
    assert (tmp_path / "debug" / "step-1.html").stat().st_size > 0
