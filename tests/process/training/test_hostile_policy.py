"""A policy that writes anything does not end a run, and a reward that fails for it ends one with a checkpoint."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers.runs import Attempting, make_trainer

from mcp_grpo.errors import RewardError
from mcp_grpo.types import Trajectory


ARGUMENTS: list[Any] = [{}, {"a": 1}, {"a": "x"}, {"a": [1, "x"]}, {"a": 10**400}, {"": {"b": {}}}, {"a": None}, [1]]


class Hostile(Attempting):
    """Every attempt calls with arguments of other types, and ends with more digits than a number has."""

    def attempt(self, tasks: Any, **how: Any) -> list[Trajectory]:
        return [self._changed(*each) for each in enumerate(super().attempt(tasks, **how))]

    @staticmethod
    def _changed(index: int, made: Trajectory) -> Trajectory:
        call = {"type": "function", "function": {"name": "add", "arguments": ARGUMENTS[index]}}
        messages = (
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "[/bold]\x1b[31m"},
            {"role": "assistant", "content": "1" * 400},
        )
        return replace(made, messages=messages)


def test_any_call_can_be_logged_and_a_reward_that_raises_stops_the_run_with_a_checkpoint(
    tmp_path: Path, adding_model: str
) -> None:
    seen: list[int] = []

    def reward(trajectory: list[Trajectory], trainer_state: Any, **kwargs: Any) -> list[float]:
        if trainer_state.global_step and any(attempt.task.task_id for attempt in trajectory):
            seen.append(len(trajectory))
            float(int(trajectory[-1].messages[-1]["content"]))  # as somebody may write it
        return [float(index % 2) for index in range(len(trajectory))]

    changes = {"log_completions": True, "save_strategy": "steps", "save_steps": 100, "max_steps": 3}
    with (
        make_trainer(tmp_path, adding_model, Hostile, reward=reward, **changes) as trainer,
        pytest.raises(
            RewardError, match=r"`reward` raised OverflowError: .* of task 'sum-\d'.*'1111.*checkpoint-1 in"
        ) as caught,
    ):
        trainer.train()
    assert isinstance(caught.value.__cause__, OverflowError)
    assert (tmp_path / "checkpoint-1" / "trainer_state.json").exists()
    assert seen == [8, *[1] * 8]  # then one by one, to name the trajectory
    (file,) = (tmp_path / "completions").glob("*.parquet")
    told = [row[0]["tool_calls"][0]["function"]["arguments"] for row in pd.read_parquet(file)["completion"]]
    assert [json.loads(text) for text in told] == [*ARGUMENTS[:-1], {"arguments": [1]}]


def test_a_reward_of_this_library_that_raises_leaves_the_trajectory_out_and_names_it(
    tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        if any(attempt.messages[-1]["content"] == "bad" for attempt in trajectory):
            raise OverflowError("cannot convert float infinity to integer")
        return [float(index % 2) for index in range(len(trajectory))]

    broken.__module__ = "mcp_grpo.rewards.broken"

    class Once(Attempting):
        def attempt(self, tasks: Any, **how: Any) -> list[Trajectory]:
            first, *others = super().attempt(tasks, **how)
            return [replace(first, messages=({"role": "assistant", "content": "bad"},)), *others]

    # The trainer tries functions of this library on an idle attempt first, which this one rewards.
    with (
        caplog.at_level(logging.ERROR, "mcp_grpo"),
        make_trainer(tmp_path, adding_model, Once, reward=broken, max_steps=1) as trainer,
    ):
        trainer.train()
    assert trainer.state.global_step == 1
    assert [reward != reward for reward in trainer._rewards[:, 0].tolist()] == [True] + [False] * 7
    (record,) = [r for r in caplog.records if "raised OverflowError" in r.getMessage()]
    assert "task 'sum-" in record.getMessage()
    assert "'bad'" in record.getMessage()
    assert "bug in mcp_grpo" in record.getMessage()
