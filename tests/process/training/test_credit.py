"""What a run chooses by itself: how turns are judged, how prompts are run and which activations are kept; and what it says of that."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import BRIEF, OneByOne, make_trainer

from mcp_grpo import MCPGRPOTrainer, Trajectory
from mcp_grpo.learning.checkpointing import DeviceMemory
from mcp_grpo.monitor import RUN_FILE


SHORT: dict[str, Any] = {"num_generations": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "max_steps": 1}
SHORT |= BRIEF


def paid_steps(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
    """More for each turn before the last of a later attempt, and less for its last."""
    return [[0.1 * place] * (t.num_turns - 1) + [1 - 0.3 * (place % 2)] for place, t in enumerate(trajectory)]


def by_place(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    return [sum(turns) for turns in paid_steps(trajectory)]


def penalties(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
    return [[-turn for turn in turns[:-1]] + turns[-1:] for turns in paid_steps(trajectory)]


class PaidAtFirst:
    """Pays turns of its first batch alone."""

    __name__ = "paid_at_first"

    def __init__(self, num_paid: int = 1) -> None:
        self.num_paid = num_paid

    def __call__(self, trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
        self.num_paid -= 1
        return (penalties if self.num_paid < 0 else paid_steps)(trajectory)


def trained(folder: Path, model: str, reward: Any, checkpoint: Path | None = None, **changes: Any) -> MCPGRPOTrainer:
    with make_trainer(folder, model, OneByOne, reward, **{**SHORT, **changes}) as trainer:
        trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer


def weights(trainer: MCPGRPOTrainer) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in trainer.model.parameters()]


def are_equal(one: MCPGRPOTrainer, other: MCPGRPOTrainer) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


@pytest.mark.parametrize("reward", [by_place, full(penalties)], ids=["rewards of trajectories", "penalties of turns"])
def test_where_no_turn_is_paid_a_run_is_that_of_the_group_to_the_bit(
    tmp_path: Path, adding_model: str, reward: Any
) -> None:
    chosen = trained(tmp_path / "chosen", adding_model, reward)
    assert chosen.args.advantage_mode == "auto"
    assert are_equal(chosen, trained(tmp_path / "asked", adding_model, reward, advantage_mode="group"))


def test_where_turns_are_paid_each_is_judged_by_itself_to_the_bit(tmp_path: Path, adding_model: str) -> None:
    chosen = trained(tmp_path / "chosen", adding_model, paid_steps)
    asked = trained(tmp_path / "asked", adding_model, paid_steps, advantage_mode="group_turn", gamma=0.5, max_steps=1)
    assert are_equal(chosen, asked)
    added_up = trained(tmp_path / "added", adding_model, paid_steps, advantage_mode="group")
    assert not are_equal(chosen, added_up)


@pytest.mark.full
def test_a_run_that_goes_on_keeps_what_was_chosen_though_no_turn_is_paid_any_more(
    tmp_path: Path, adding_model: str
) -> None:
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    whole = trained(tmp_path / "whole", adding_model, PaidAtFirst(), **saving)
    again = trained(tmp_path / "again", adding_model, PaidAtFirst(0), tmp_path / "whole" / "checkpoint-1", **saving)
    assert (again.state.global_step, again._credit.mode, again._credit.gamma) == (2, "group_turn", 0.5)
    assert are_equal(whole, again)
    assert "pays single turns" in json.loads((tmp_path / "again" / RUN_FILE).read_text())["chosen"]["advantages"]


@pytest.mark.parametrize("level", [logging.WARNING, full(logging.INFO)], ids=["default", "info"])
def test_it_says_in_one_line_once_what_was_chosen_and_why(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, level: int
) -> None:
    with caplog.at_level(level, "mcp_grpo"):
        trained(tmp_path, adding_model, paid_steps, gradient_checkpointing=True, max_steps=2)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Step 1: " in line]
    assert "(`group_turn`, `gamma=0.5`), as 'paid_steps' pays single turns" in line
    assert "Prompts are run once for all attempts in a pass that share them" in line
    assert "Gradient checkpointing is left on: this device does not tell how much memory is free." in line
    logged = [message for message in caplog.messages if "single turns" in message or "Prompts are" in message]
    assert logged == ([] if level == logging.WARNING else [line[line.index("Step 1: ") :]])
    chosen = json.loads((tmp_path / RUN_FILE).read_text())["chosen"]
    assert [*chosen] == ["advantages", "prompts", "activations"]
    assert all(sentence in line for sentence in chosen.values())


@pytest.mark.full
def test_it_says_which_passes_keep_their_activations_where_memory_is_known(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class Plenty(DeviceMemory):
        def free(self, device: torch.device) -> int:
            return 2**40

    changes: dict[str, Any] = {"gradient_checkpointing": True, "max_steps": 2}
    changes["constants"] = {"mcp_grpo.learning.checkpointing.DeviceMemory": Plenty}
    trained(tmp_path, adding_model, by_place, **changes)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Step " in line]
    assert "A pass goes without gradient checkpointing, for it fits: activations of" in line
    assert "of 1024.0 GiB that are free." in line
    assert "activations kept" in json.loads((tmp_path / RUN_FILE).read_text())["chosen"]


@pytest.mark.full
def test_a_choice_that_comes_later_is_said_by_itself(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    class PaidLater(PaidAtFirst):
        def __call__(self, trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
            self.num_paid -= 1
            return (penalties if self.num_paid >= 0 else paid_steps)(trajectory)

    trainer = trained(tmp_path, adding_model, PaidLater(), max_steps=2)
    first, second = [line for line in capsys.readouterr().err.splitlines() if "Step " in line]
    assert "Step 1: Rewards of turns are added up (`group`): 'paid_at_first' has paid no turn" in first
    assert second.endswith(f"Step 2: {trainer._credit.sentence}")


@pytest.mark.full
def test_replacing_groups_compares_a_batch_in_one_way_and_learns_by_turns(tmp_path: Path, adding_model: str) -> None:
    changes = {"dynamic_sampling": 1}
    chosen = trained(tmp_path / "chosen", adding_model, paid_steps, **changes)
    asked = trained(tmp_path / "asked", adding_model, paid_steps, advantage_mode="group_turn", gamma=0.5, **changes)
    assert are_equal(chosen, asked)
