"""The evaluations of a run: which count, what is kept, and when a fall is more than chance."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mcp_grpo.evaluation import EvaluationHistory, Judged, read_judged
from mcp_grpo.types import Task


ONE = torch.ones(1)


def evaluate(history: EvaluationHistory, step: int, rewards: list[float]) -> str | None:
    history.begin()
    history.add([f"task-{i}" for i in range(len(rewards))], torch.tensor(rewards).unsqueeze(1), ONE)
    judged = history.end(step, {"reward": sum(rewards) / len(rewards)})
    assert judged
    sentence = history.fall(judged, is_best_kept=True)
    history.keep(judged, is_main=True)
    return sentence


def test_a_fall_that_is_more_than_chance_is_told_with_the_best_step(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    assert evaluate(history, 0, [0.0, 1.0] * 10) is None
    assert evaluate(history, 5, [1.0] * 20) is None
    assert evaluate(history, 10, [1.0] * 19 + [0.0]) is None  # one task of twenty may be chance
    sentence = evaluate(history, 15, [0.0] * 10 + [1.0] * 10)
    assert sentence
    assert "reward 1.000 at step 5, 0.500 now" in sentence
    assert "The policy of step 5 is kept." in sentence


def test_rewards_that_nobody_gave_do_not_count_and_a_step_counts_once(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    history.add(["a", "b", "a"], torch.tensor([[1.0], [torch.nan], [0.0]]), ONE)
    judged = history.end(3, {})
    assert judged
    assert judged.rewards == {"a": [1.0, 0.0]}
    history.keep(judged, is_main=True)
    history.add(["c"], torch.tensor([[1.0]]), ONE)
    assert history.end(3, {}) is None  # of several datasets, the first
    assert history.end(4, {}) is None  # nothing was added since


def test_kinds_are_kept_with_the_tasks_that_count(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    history.add(["c"], torch.tensor([[1.0]]), ONE, kinds=["forgotten"])
    history.begin()
    history.add(["a", "b", "c"], torch.tensor([[1.0], [torch.nan], [0.0]]), ONE, [True] * 3, ["lookup", "code", None])
    history.add(["d"], torch.tensor([[1.0]]), ONE, [True], ["code"])
    judged = history.end(3, {})
    assert judged
    assert judged.kinds == {"a": "lookup", "d": "code"}
    history.keep(judged, is_main=True)
    assert [each.kinds for each in read_judged(tmp_path / "evaluations.jsonl", up_to=3)] == [judged.kinds]


def test_attempts_that_were_cut_are_counted_by_task(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    history.add(["b"], torch.tensor([[1.0]]), ONE, cut=[True])
    history.begin()
    history.add(["a", "a", "b"], torch.tensor([[0.0], [0.0], [1.0]]), ONE, cut=[True, True, False])
    history.add(["a", "c"], torch.tensor([[0.0], [torch.nan]]), ONE, cut=[True, True])  # one of them is left out
    judged = history.end(3, {})
    assert judged
    assert judged.cut == {"a": 3, "c": 1}
    history.keep(judged, is_main=True)
    assert [each.cut for each in read_judged(tmp_path / "evaluations.jsonl", up_to=3)] == [{"a": 3, "c": 1}]
    history.add(["a"], torch.tensor([[0.0]]), ONE)
    later = history.end(4, {})
    assert later
    assert later.cut == {}


def test_how_many_attempts_each_batch_had_is_known_until_the_evaluation_ends(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    history.add(["a"], torch.tensor([[1.0]]), ONE)
    history.begin()
    history.add(["a", "b"], torch.tensor([[1.0], [torch.nan]]), ONE)
    history.add(["c"], torch.tensor([[1.0]]), ONE)
    assert history.batch_sizes == [2, 1]
    history.end(3, {})
    assert history.batch_sizes == []


def test_a_file_of_before_there_were_kinds_is_read(tmp_path: Path) -> None:
    line = {"step": 0, "rewards": {"a": [1.0]}, "metrics": {}, "solved": {}}
    (tmp_path / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    history = EvaluationHistory(tmp_path)
    history.load(up_to=0)
    assert history.all == [Judged(step=0, rewards={"a": [1.0]})]


def test_evaluations_that_cannot_be_written_leave_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, file = EvaluationHistory(tmp_path), tmp_path / "evaluations.jsonl"
    evaluate(history, 0, [0.0, 1.0])
    whole = file.read_text()

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mcp_grpo.evaluation.comparison.os.replace", stop)
    with pytest.raises(KeyboardInterrupt):
        evaluate(history, 5, [0.0, 1.0])
    assert file.read_text() == whole


@pytest.mark.parametrize(
    ("metadata", "difficulty", "kind"),
    [
        ({"family": "lookup"}, "hard", "lookup"),
        ({"family": None}, "hard", "hard"),
        ({"family": ""}, "hard", "hard"),
        ({"family": 3}, None, "3"),
        ({}, None, None),
    ],
)
def test_a_task_is_of_its_family_or_else_of_its_difficulty(
    metadata: dict[str, Any], difficulty: str | None, kind: str | None
) -> None:
    assert Task(task_id="t", prompt=(), difficulty=difficulty, metadata=metadata).kind == kind


def test_a_resumed_run_goes_on_from_the_evaluations_before_its_checkpoint(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    for step in (0, 5, 10):
        evaluate(history, step, [0.0, 1.0])
    resumed = EvaluationHistory(tmp_path)
    resumed.load(up_to=5)
    assert [judged.step for judged in resumed.all] == [0, 5]
    assert EvaluationHistory(tmp_path / "other").all == []
