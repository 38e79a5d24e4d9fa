"""What is said of a run at its end: with what certainty, and whether anything was learnt."""

import io
import logging
import os
import random
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from mcp_grpo.evaluation import Judged, best_of, change, mean_of_tasks, read_judged, write_judged
from mcp_grpo.monitor import (
    GPUWatch,
    HealthNote,
    health_lines,
    learning_sentence,
    learning_table,
    project_of_trackers,
    speak_in_terminal,
    training_sentence,
)


def judged(step: int, share: float, num_tasks: int = 100, seed: int = 0) -> Judged:
    """An evaluation with two attempts at each task, each task as hard as it is in all evaluations."""
    rng = random.Random(f"{step}-{seed}")
    hard = random.Random(seed)
    rewards = {}
    for task in range(num_tasks):
        skill = min(1.0, max(0.0, share + hard.uniform(-0.2, 0.2)))
        rewards[str(task)] = [float(rng.random() < skill) for _ in range(2)]
    return Judged(step=step, rewards=rewards, metrics={"stop/answered": 1 - share, "tools/call_frequency": 2.0})


def test_intervals_hold_what_they_promise() -> None:
    held, held_change = 0, 0
    for seed in range(400):
        before, after = judged(0, 0.3, seed=seed), judged(50, 0.5, seed=seed)
        held += before.reward.low <= 0.3 <= before.reward.high
        gained = change(before, after)
        assert gained
        held_change += gained.low <= 0.2 <= gained.high
    assert 0.92 <= held / 400 <= 0.99
    assert 0.92 <= held_change / 400 <= 0.99


def test_nothing_solved_is_not_nothing_with_certainty() -> None:
    nothing = mean_of_tasks({str(i): 0.0 for i in range(20)})
    assert nothing.mean == 0
    assert nothing.low == pytest.approx(0)
    assert nothing.high == pytest.approx(0.161, abs=0.001)  # Wilson's, for 0 of 20
    half = mean_of_tasks({str(i): float(i % 2) for i in range(20)})
    assert (half.low, half.high) == (pytest.approx(0.295, abs=0.003), pytest.approx(0.705, abs=0.003))
    paid = mean_of_tasks({"a": -0.1, "b": 1.0, "c": 0.4})
    assert paid.low < 0 < paid.high


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_an_interval_holds_its_mean_whatever_is_rounded(share: float) -> None:
    for number in range(1, 200):
        found = mean_of_tasks({str(task): share for task in range(number)})
        assert found.low <= found.mean <= found.high


def test_evaluations_are_read_back_up_to_a_step(tmp_path: Path) -> None:
    evaluations = [judged(0, 0.2), judged(10, 0.4), judged(20, 0.3)]
    write_judged(evaluations, tmp_path / "run" / "evaluations.jsonl")
    assert read_judged(tmp_path / "run" / "evaluations.jsonl", up_to=10) == evaluations[:2]
    assert read_judged(tmp_path / "nothing.jsonl", up_to=10) == []
    assert best_of(evaluations).step == 10


@pytest.mark.parametrize(
    ("shares", "kept", "words"),
    [
        ({0: 0.2, 50: 0.6}, 50, ["It learnt", "to step 50, the reward changed by +0."]),
        ({0: 0.3, 50: 0.3}, 50, ["Nothing is shown", "may be chance"]),
        ({0: 0.6, 50: 0.2}, 50, ["It got worse", "before training is the better one"]),
        ({0: 0.2, 50: 0.6, 100: 0.2}, 50, ["It learnt", "It fell after step 50: by -0.", "until step 100"]),
        ({0: 0.2, 20: 0.3, 40: 0.6, 60: 0.5}, 40, ["chosen among 3 evaluations", "flatters"]),
        ({50: 0.6}, 50, ["not evaluated both before and after", "eval_on_start"]),
    ],
)
def test_a_sentence_says_whether_the_policy_learnt(shares: dict[int, float], kept: int, words: list[str]) -> None:
    sentence = learning_sentence([judged(step, share) for step, share in shares.items()], kept)
    assert all(word in sentence for word in words), sentence


def test_a_policy_that_gave_its_tools_up_has_not_learnt_to_use_them() -> None:
    before, after = judged(0, 0.2), judged(50, 0.6)
    after = Judged(step=50, rewards=after.rewards, metrics={**after.metrics, "tools/call_frequency": 0.1})
    sentence = learning_sentence([before, after], 50)
    assert sentence.startswith("It learnt to leave its tools alone, not to use them: from before training to step 50")
    assert "sft_warmup.py" in sentence


@pytest.mark.parametrize(
    ("solved", "words"),
    [
        ((0.2, 0.6), "It learnt: from before"),
        ((0.2, 0.22), "It learnt to earn more: from before training to step 50"),
        ((0.6, 0.2), "It learnt to earn more without doing more tasks: from before training to step 50"),
    ],
)
def test_a_reward_that_rises_without_success_is_not_called_learning(solved: tuple[float, float], words: str) -> None:
    assert learning_sentence(evaluated((0.2, 0.6), solved), 50).startswith(words)


@pytest.mark.parametrize(("solved", "is_told"), [((0.6, 0.2), True), ((0.3, 0.3), False)])
def test_success_that_falls_is_told_where_the_reward_does_not_see_it(
    solved: tuple[float, float], is_told: bool
) -> None:
    sentence = learning_sentence(evaluated((0.3, 0.3), solved), 50)
    assert sentence.startswith("Nothing is shown")
    assert ("Success got worse all the same, by -0." in sentence) == is_told


def evaluated(rewards: tuple[float, float], solved: tuple[float, float]) -> list[Judged]:
    """Evaluations before and after training, with shares of rewards and of successes."""
    return [
        replace(
            judged(step, reward),
            solved={
                task: [bool(one) for one in found] for task, found in judged(step, success, seed=7).rewards.items()
            },
        )
        for step, reward, success in zip((0, 50), rewards, solved, strict=True)
    ]


def test_a_policy_that_did_all_tasks_before_is_not_blamed() -> None:
    evaluations = [
        replace(judged(step, reward), solved={"a": [True], "b": [True]}) for step, reward in ((0, 0.2), (50, 0.6))
    ]
    assert "It does all tasks, as it did before." in learning_sentence(evaluations, 50)


def test_a_policy_that_is_what_it_was_has_learnt_nothing() -> None:
    before = judged(0, 0.0)
    after = Judged(step=10, rewards=before.rewards)
    assert learning_sentence([before, after], 10).startswith(
        "Nothing was learnt: at step 10, the reward of every task"
    )


def test_the_table_has_before_kept_and_last_once_each() -> None:
    def text(*steps: int, kept: int) -> str:
        console = Console(width=160, record=True, file=io.StringIO())
        console.print(learning_table([judged(step, 0.2) for step in steps], kept))
        return console.export_text()

    three = text(0, 50, 100, 150, kept=50)
    assert "before" in three
    assert "step 50, kept" in three
    assert "step 150" in three
    assert "step 100" not in three
    assert "100 tasks to judge by, 2 attempts each" in three
    assert "calls per attempt" in three
    assert text(0, 50, kept=50).count("step 50") == 1


def test_a_run_without_evaluations_is_judged_by_its_training_with_a_caveat() -> None:
    history = [{"reward": step / 100} for step in range(40)]
    assert "0.015 at the start, 0.375 at the end (of 4 logged steps each)" in training_sentence(history)
    assert "too short" in training_sentence(history[:1])


def test_health_is_listed_with_its_steps() -> None:
    note = HealthNote(step=7, name="no_calls", sentence="No tool was called.", is_fatal=False)
    assert health_lines([note]) == ["Health, step 7: No tool was called."]
    assert health_lines([]) == ["Health: nothing was found wrong."]


def test_warnings_reach_the_terminal_once_whatever_the_root_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, root = "mcp_grpo_terminal_test", logging.getLogger()
    speak_in_terminal(name, name)
    logger, handlers = logging.getLogger(name), root.handlers[:]
    assert len(logger.handlers) == 1
    try:
        root.handlers[:] = [file := logging.FileHandler(tmp_path / "log")]
        logger.warning("to a file")
        file.close()
        assert capsys.readouterr().err == "WARNING: to a file\n"
        assert (tmp_path / "log").read_text() == "to a file\n"
        root.handlers[:] = [logging.StreamHandler(sys.stderr)]
        logger.warning("to a terminal")
        assert capsys.readouterr().err == "to a terminal\n"
        logger.info("not worth a line")
        assert capsys.readouterr().err == ""
    finally:
        root.handlers[:] = handlers


def test_a_project_is_named_to_trackers_unless_the_environment_names_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("COMET_PROJECT_NAME", "mine")
    with project_of_trackers("run"):
        assert os.environ["WANDB_PROJECT"] == "run"
        assert os.environ["COMET_PROJECT_NAME"] == "mine"
    assert "WANDB_PROJECT" not in os.environ
    assert os.environ["COMET_PROJECT_NAME"] == "mine"


def test_a_gpu_is_watched_between_steps_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_grpo.monitor.gpu.SAMPLE_SECONDS", 0.01)
    seen = iter([(0.5, 10.0), (None, 30.0), (1.0, 20.0)])
    done: list[bool] = []

    def sample() -> tuple[float | None, float]:
        try:
            return next(seen)
        except StopIteration:
            done.append(True)
            raise RuntimeError("the device is gone") from None

    watch = GPUWatch(sample)
    assert watch.metrics() == {}
    with watch:
        assert watch._thread
        watch._thread.join(timeout=10)
        assert done
        assert watch.metrics() == {"gpu/memory_gib": 30.0, "gpu/utilization": 0.75}
        assert watch.metrics() == {}
    seen = iter([(0.25, 5.0)])
    with watch:  # another run
        watch._thread.join(timeout=10)
    assert watch.metrics() == {"gpu/memory_gib": 5.0, "gpu/utilization": 0.25}
    assert not any(thread.name == "gpu-watch" for thread in threading.enumerate())
