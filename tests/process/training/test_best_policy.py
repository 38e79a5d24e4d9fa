"""The policy that was evaluated as the best is the one that is kept, and the run knows what it learnt."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.runs import BRIEF, settings
from helpers.sums import ROWS
from peft import LoraConfig
from safetensors.torch import load_file
from servers.sums import server
from transformers import EarlyStoppingCallback

from mcp_grpo import MCPGRPOTrainer, Trajectory
from mcp_grpo.cli import main
from mcp_grpo.errors import HealthError
from mcp_grpo.evaluation.comparison import success_change
from mcp_grpo.monitor import learning_sentence
from mcp_grpo.rewards import is_done


pytestmark = pytest.mark.usefixtures("undrawn")

EVALUATED: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "eval_on_start": True,
    "num_generations_eval": 2,
}
EVALUATED |= {"per_device_eval_batch_size": 8, "save_strategy": "steps", "save_steps": 100, "max_steps": 3}
PAIR = {"num_generations": 2, "per_device_train_batch_size": 2}  # enough, where rewards are given
HELD_OUT = [
    {**row, "family": family, "difficulty": "level 2"}
    for row, family in zip(ROWS, ("[red]", "a", "a", None), strict=True)
]
GRADES = {0: 0.1, 1: 0.9, 2: 0.5, 3: 0.2, 4: 0.2, 5: 0.2}


class Graded:
    """A reward that spreads while training, and in an evaluation says what the policy of that step is worth."""

    __name__ = "graded"
    trainer: Any = None

    def __call__(self, trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        if self.trainer is not None and not self.trainer.model.training:
            noise = {task: 0.01 * i for i, task in enumerate(sorted({t.task.task_id for t in trajectory}))}
            return [GRADES[self.trainer.state.global_step] + noise[t.task.task_id] for t in trajectory]
        return [i / 10 for i in range(len(trajectory))]


def make_trainer(
    folder: Path, model: str, *, patience: int | None = None, by_success: bool = False, **changes: Any
) -> MCPGRPOTrainer:
    reward = Graded()

    def is_success(trajectory: Trajectory) -> bool:
        return GRADES[reward.trainer.state.global_step] > 0.6

    trainer = MCPGRPOTrainer(
        model,
        reward,
        settings(folder, **{**EVALUATED, **PAIR, **BRIEF, "learning_rate": 1e-2, **changes}),
        Dataset.from_list(ROWS),
        eval_dataset=Dataset.from_list(HELD_OUT),
        servers={"sums": server},
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        is_success=is_success if by_success else None,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )
    reward.trainer = trainer
    return trainer


def test_the_best_policy_that_was_evaluated_is_kept_and_saved(
    tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_trainer(tmp_path, adding_model) as trainer:
        trainer.train()
        assert trainer.kept_step == 1
        trainer.save_model()
        assert [each.step for each in trainer.evaluations] == [0, 1, 2, 3]
    best = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    last = load_file(tmp_path / "checkpoint-3" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], best[name]) for name in best)
    assert not all(torch.equal(saved[name], last[name]) for name in last)
    lines = [json.loads(line) for line in (tmp_path / "evaluations.jsonl").read_text().splitlines()]
    assert [round(line["rewards"]["sum-0"][0], 3) for line in lines] == [0.1, 0.9, 0.5, 0.2]
    assert len(lines[0]["rewards"]["sum-0"]) == 2
    kinds = {"sum-0": "[red]", "sum-1": "a", "sum-2": "a", "sum-3": "level 2"}
    assert [line["kinds"] for line in lines] == [kinds] * 4
    assert main(["report", str(tmp_path), "--text"]) == 0
    shown = capsys.readouterr().out
    assert "step 1, kept" in shown
    assert " +0.800 " in shown  # since before
    cell = r"(, \d cut)? +│ +"
    assert re.search(r"│ +\[red\] +│ +" + cell.join(("0.100", "0.900", "0.500", "0.200")), shown)
    falls = [record.message for record in caplog.records if "does worse on the tasks" in record.message]
    assert len(falls) == 1
    assert "reward 0.915 at step 1, 0.515 now" in falls[0]
    assert "The policy of step 1 is kept." in falls[0]
    card = (tmp_path / "README.md").read_text()
    assert "at step 0 and at step 1" in card


@pytest.mark.full
def test_the_last_policy_is_kept_where_that_is_asked_for(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, keep_best=False, max_steps=2) as trainer:
        trainer.train()
        assert trainer.kept_step == 2
        trainer.save_model()
    assert not (tmp_path / "checkpoint-1").exists()
    last = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert all(torch.equal(saved[name], last[name]) for name in last)


@pytest.mark.full
def test_a_run_that_is_resumed_knows_its_earlier_evaluations_and_its_best(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, max_steps=2) as trainer:
        trainer.train()
    with make_trainer(tmp_path, adding_model) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert [each.step for each in trainer.evaluations] == [0, 1, 2, 3]
        assert trainer.kept_step == 1


@pytest.mark.full
def test_a_run_that_is_stopped_ends_with_its_best_policy_and_a_sentence(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, on_unhealthy="strict") as trainer:
        with pytest.raises(HealthError, match=r"does worse .* The run was stopped at step 2, with checkpoint-2"):
            trainer.train()
        assert trainer.kept_step == 1
    best = load_file(tmp_path / "checkpoint-1" / "adapter_model.safetensors")
    own = {name: value for name, value in trainer.model.state_dict().items() if "lora_" in name}
    assert all(torch.equal(own[name.replace(".weight", ".default.weight")], best[name]) for name in best)


@pytest.mark.full
@pytest.mark.parametrize("metric", ["eval_reward", "eval_success"])
def test_a_policy_that_gets_worse_is_stopped_early_and_the_best_is_saved(
    tmp_path: Path, adding_model: str, metric: str
) -> None:
    changes: dict[str, Any] = {"metric_for_best_model": metric, "by_success": metric == "eval_success"}
    with make_trainer(tmp_path, adding_model, patience=1, max_steps=5, **changes) as trainer:
        trainer.train()
        assert trainer.state.global_step == 2
        assert trainer.kept_step == 1
        trainer.save_model()
    best, saved = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path / "checkpoint-1", tmp_path))
    assert all(torch.equal(saved[name], best[name]) for name in best)


@pytest.mark.full
@pytest.mark.parametrize("remembers", [True, False])
def test_a_run_that_is_resumed_may_go_on_with_the_patience_that_was_left(
    tmp_path: Path, adding_model: str, remembers: bool
) -> None:
    changes: dict[str, Any] = {"patience": 2, "save_steps": 1}
    with make_trainer(tmp_path, adding_model, max_steps=2, **changes) as trainer:
        trainer.train()
    changes |= {
        "restore_callback_states_from_checkpoint": remembers,
        "eval_on_start": False,
    }  # it would count once more
    with make_trainer(tmp_path, adding_model, max_steps=5, **changes) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert trainer.state.global_step == (3 if remembers else 4)
        assert trainer.kept_step == 1


@pytest.mark.full
def test_a_run_that_is_rewarded_by_lot_says_that_nothing_is_shown(tmp_path: Path, adding_model: str) -> None:
    lots = random.Random(3)

    def by_lot(completions: list[Any], **kwargs: Any) -> list[float]:
        return [float(lots.random() < 0.5) for _ in completions]

    rows = [{**ROWS[0], "task_id": f"sum-{i}"} for i in range(16)]
    with MCPGRPOTrainer(
        adding_model,
        by_lot,
        settings(tmp_path, **{**EVALUATED, "eval_steps": 4, "max_steps": 4, "keep_best": False}),
        Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        servers={"sums": server},
        peft_config=LoraConfig(r=4, target_modules="all-linear"),
        is_success=is_done,
    ) as trainer:
        trainer.train()
        before, after = trainer.evaluations
    assert (
        after.reward.mean > before.reward.mean
    )  # by chance, which a sentence without an interval would call learning
    assert learning_sentence([before, after], 4).startswith("Nothing is shown")
    gain = success_change(before, after)
    assert gain is not None
    assert gain.low <= 0
