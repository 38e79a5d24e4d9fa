"""The evaluations of a run: which count, what is kept, and when a fall is more than chance."""

from pathlib import Path

import torch

from mcp_grpo.evaluation import EvaluationHistory


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


def test_a_resumed_run_goes_on_from_the_evaluations_before_its_checkpoint(tmp_path: Path) -> None:
    history = EvaluationHistory(tmp_path)
    for step in (0, 5, 10):
        evaluate(history, step, [0.0, 1.0])
    resumed = EvaluationHistory(tmp_path)
    resumed.load(up_to=5)
    assert [judged.step for judged in resumed.all] == [0, 5]
    assert EvaluationHistory(tmp_path / "other").all == []
