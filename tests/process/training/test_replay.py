"""Scripted solutions in the place of attempts, where no attempt succeeds."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import Attempting, make_trainer
from helpers.sums import ROWS
from transformers import AutoModelForCausalLM, TrainerCallback

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.rewards import is_done
from mcp_grpo.rollout.replay import limits_sentence
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import Task, Trajectory


SOLUTION = {"steps": [{"calls": [{"name": "add", "arguments": {"a": 2, "b": 5}}]}], "final": "7"}
HARD = [{**row, "answer": "7", "solution": SOLUTION} for row in ROWS]  # the policy adds 2 and 3
EASY = [{**row, "solution": SOLUTION | {"final": "5"}} for row in ROWS]


class Watching(TrainerCallback):
    """Keeps the trajectories of every batch, and what was logged."""

    def __init__(self) -> None:
        self.batches: list[list[Trajectory]] = []
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(logs)


def run(folder: Path, model: str, rows: Any = HARD, **changes: Any) -> tuple[Any, Watching]:
    watching = Watching()
    with make_trainer(
        folder, model, rows=rows, callbacks=[watching], **{"replay_solutions": True, "max_steps": 1} | changes
    ) as trainer:
        trainer.watch_batches(lambda batch: watching.batches.append(list(batch.trajectories)))
        trainer.train()
    return trainer, watching


def test_scripts_are_followed_within_the_limits_and_it_is_said_what_these_do_not_allow(
    tmp_path: Path, adding_model: str
) -> None:
    tasks = tasks_from_rows(HARD[:2])
    with make_trainer(tmp_path / "whole", adding_model, rows=HARD) as trainer:
        found = trainer.follow_scripts(tasks)
        assert trainer.follow_scripts([]) == []
        written = replace(tasks[0], metadata={"solution": "Add them."})
        with pytest.raises(TaskFormatError, match=r"Task '.*' has no `solution` to run"):
            trainer.follow_scripts([written])
    with make_trainer(tmp_path / "cut", adding_model, rows=HARD, max_turns=1) as trainer:
        cut = trainer.follow_scripts(tasks)
    assert [(t.task.task_id, t.answer, t.is_scripted) for t in found] == [(t.task_id, "7", True) for t in tasks]
    assert limits_sentence(found, is_done) is None
    assert str(limits_sentence([*found, *cut], is_done)).startswith(
        "2 of 4 tasks to judge by cannot be done as their solutions do within the limits of this run: 2 because it has more "
        "turns than `max_turns`."
    )
    kinds = [replace(t, task=replace(t.task, difficulty=kind)) for t, kind in zip(cut, ("hard", "easy"), strict=True)]
    assert "2 because it has more turns than `max_turns` (`easy`, `hard`)." in str(limits_sentence(kinds, is_done))


def test_one_attempt_of_a_lost_group_gives_way_to_the_solution(tmp_path: Path, adding_model: str) -> None:
    _, watching = run(tmp_path, adding_model, per_device_train_batch_size=16, num_generations=8)
    (batch,) = watching.batches
    assert [t.is_scripted for t in batch] == [False] * 7 + [True] + [False] * 7 + [True]
    scripted = batch[-1]
    assert scripted.answer == "7"
    assert [(e.call.arguments, e.result.text) for e in scripted.exchanges] == [({"a": 2, "b": 5}, "7")]
    # Each token is one that the policy could have written there, and is recorded like those that it did write.
    assert scripted.turn_ids[0] == 0
    assert scripted.prompt_ids == batch[0].prompt_ids
    log = watching.logs[0]
    assert log["solutions/replayed_fraction"] == pytest.approx(2 / 16)
    assert log["solutions/lost_groups"] == 1
    assert log["solutions/solved_fraction"] == 0
    assert log["solutions/unfit_fraction"] == 0
    assert log["reward"] == pytest.approx(2 / 16)
    assert log["stop/answered"] <= 1  # of the other fourteen


@pytest.mark.parametrize(("rows", "is_lost"), [(HARD, True), (EASY, False)])
def test_a_batch_for_two_updates_is_scored_for_the_sake_of_solutions(
    tmp_path: Path, adding_model: str, scorings: list[Any], rows: Any, is_lost: bool
) -> None:
    _, watching = run(tmp_path, adding_model, rows, num_iterations=2)
    assert any(trajectory.is_scripted for trajectory in watching.batches[0]) == is_lost
    assert len(scorings) == is_lost


@pytest.mark.full
def test_a_solution_goes_on_where_the_user_does(tmp_path: Path, adding_model: str) -> None:
    rounds = {"rounds": [SOLUTION | {"final": "5"}, {"steps": [], "final": "7"}]}
    rows = [{**row, "user_turns": ["Sure?"], "solution": rounds} for row in HARD]
    _, watching = run(tmp_path, adding_model, rows, schema_mask="syntax")
    scripted = [t for t in watching.batches[0] if t.is_scripted]
    assert scripted
    assert [(r.question, r.answer) for r in scripted[0].rounds][1:] == [("Sure?", "7")]
    assert scripted[0].roles is not None
    assert watching.logs[0]["turns/user"] > 0
    with pytest.raises(
        TaskFormatError, match=r"needs one of its `rounds` for the prompt and each of the `user_turns`"
    ):
        run(tmp_path / "short", adding_model, [{**row, "user_turns": ["Sure?", "Really?"]} for row in rows])


def test_where_an_attempt_succeeds_nothing_is_replayed(tmp_path: Path, adding_model: str) -> None:
    _, watching = run(tmp_path, adding_model, EASY)
    assert not any(t.is_scripted for t in watching.batches[0])
    assert watching.logs[0]["solutions/lost_groups"] == 0


@pytest.mark.full
def test_what_counts_as_solved_is_what_the_trainer_was_told(tmp_path: Path, adding_model: str) -> None:
    watching = Watching()
    kind: Any = partial(MCPGRPOTrainer, is_success=lambda trajectory: True)
    with make_trainer(
        tmp_path, adding_model, kind=kind, rows=HARD, callbacks=[watching], replay_solutions=True, max_steps=1
    ) as trainer:
        trainer.train()
    assert watching.logs[0]["solutions/lost_groups"] == 0
    assert watching.logs[0]["reward"] == 0


@pytest.mark.full
def test_it_is_off_unless_asked_for(tmp_path: Path, adding_model: str) -> None:
    _, watching = run(tmp_path, adding_model, replay_solutions=False)
    assert not any(t.is_scripted for t in watching.batches[0])
    assert not any(name.startswith("solutions/") for name in watching.logs[0])


@pytest.mark.full
@pytest.mark.parametrize(
    ("solution", "limits", "problem"),
    [
        (SOLUTION | {"final": "8"}, {}, "1 because it does not solve its task"),
        (SOLUTION | {"final": "7 " * 400}, {}, "1 because it is longer than `max_completion_length`"),
        (SOLUTION, {"max_turns": 1}, "1 because it has more turns than `max_turns`"),
        (
            {"steps": [{"calls": [{"name": "add", "arguments": {"a": "x", "b": "y"}}]}], "final": "7"},
            {"max_result_tokens": 32},
            "1 because a tool result is longer than `max_result_tokens`",
        ),
    ],
)
def test_a_solution_that_cannot_be_learnt_from_is_left_out_and_told_of(
    tmp_path: Path,
    adding_model: str,
    caplog: pytest.LogCaptureFixture,
    solution: dict[str, Any],
    limits: dict[str, Any],
    problem: str,
) -> None:
    _, watching = run(tmp_path, adding_model, [{**row, "solution": solution} for row in HARD], max_steps=2, **limits)
    assert not any(t.is_scripted for t in watching.batches[0])
    assert watching.logs[0]["solutions/replayed_fraction"] == 0
    assert watching.logs[0]["solutions/unfit_fraction"] == 1
    assert caplog.text.count("scripted solutions of a batch could not be replayed") == 1
    assert problem in caplog.text


class Failing(Attempting):
    """Attempts of which each has the same wrong answer, so that only the solution teaches."""

    def attempt(self, tasks: Any, **how: Any) -> list[Trajectory]:
        found = super().attempt(tasks, **how)
        return [found[0]] * len(found)


class Gradients(TrainerCallback):
    """Keeps the gradient of every update."""

    def __init__(self) -> None:
        self.found: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.parametrize(
    ("old_logps", "num_iterations"),
    [("sampler", 1), ("trainer", 1), full("sampler", 2), full("trainer", 2)],
)
@pytest.mark.full
def test_the_gradient_is_the_advantage_times_that_of_the_log_probability(
    tmp_path: Path, adding_model: str, old_logps: str, num_iterations: int
) -> None:
    """However its tokens came about: every ratio of the first pass is 1, also where the update is done twice."""
    watching, gradients, batches = Watching(), Gradients(), []
    with make_trainer(
        tmp_path,
        adding_model,
        kind=Failing,
        rows=HARD,
        callbacks=[watching, gradients],
        replay_solutions=True,
        max_steps=num_iterations,
        old_logps=old_logps,
        num_iterations=num_iterations,
        loss_type="grpo",
        scale_rewards="none",
        max_grad_norm=0.0,
    ) as trainer:
        trainer.watch_batches(lambda batch: batches.append(batch.trajectories))
        trainer.train()
    model = AutoModelForCausalLM.from_pretrained(adding_model)
    for attempt in batches[0]:
        ids = torch.tensor([[*attempt.prompt_ids, *attempt.completion_ids]])
        logps = (
            model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[-len(attempt.completion_ids) :, 0]
        )
        advantage, mask = 7 / 8 if attempt.is_scripted else -1 / 8, torch.tensor(attempt.loss_mask)
        (-advantage * (logps * mask).sum() / mask.sum() / 8).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients.found[0][name], parameter.grad, rtol=1e-3, atol=1e-5)
    assert watching.logs[0]["ratio/gated_fraction"] == 0  # a log-probability of 0, as a script has, would be gated
    assert watching.logs[0]["ratio/mean"] == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("schema_mask", ["off", "syntax"])
def test_no_token_of_a_solution_is_masked(tmp_path: Path, adding_model: str, schema_mask: str) -> None:
    _, watching = run(tmp_path, adding_model, schema_mask=schema_mask, schema_mask_min_prob=0.0)
    scripted = watching.batches[0][-1]
    assert scripted.loss_mask == scripted.sampled_mask


@pytest.mark.full
def test_a_policy_learns_what_it_never_finds_by_itself(tmp_path: Path, adding_model: str) -> None:
    trainer, _ = run(tmp_path, adding_model, max_steps=25, learning_rate=3e-3)
    solved = [line["solutions/solved_fraction"] for line in trainer.state.log_history if "reward" in line]
    assert solved[0] == 0
    assert sum(solved[-5:]) / 5 > 0.2  # how much differs from machine to machine


def test_tasks_without_a_solution_to_replay_are_refused_before_the_first_step(
    tmp_path: Path, adding_model: str
) -> None:
    with pytest.raises(SettingsError, match="no task has a `solution`"):
        run(tmp_path, adding_model, ROWS)
    with pytest.raises(TaskFormatError, match="cannot be run"):
        run(tmp_path, adding_model, [{**row, "solution": {"steps": "none", "final": "5"}} for row in ROWS])


@pytest.mark.full
def test_a_task_alone_may_lack_one(tmp_path: Path, adding_model: str) -> None:
    rows = [HARD[0], *({**row, "solution": None} for row in HARD[1:])]
    _, watching = run(tmp_path, adding_model, rows, per_device_train_batch_size=32, num_generations=8)
    scripted = [t.task for t in watching.batches[0] if t.is_scripted]
    assert [task.task_id for task in scripted] == ["sum-0"]
    assert all(isinstance(task, Task) for task in scripted)
