"""Estimators equal what enumeration gives, and intervals cover the truth."""

import random
from itertools import combinations
from statistics import fmean

import pytest
from helpers.marks import full

from mcp_grpo.evaluation import mean_difference, mean_of_tasks, pass_all, pass_at
from mcp_grpo.evaluation.statistics import ks_of, t_quantile


@pytest.mark.parametrize("num_attempts", range(1, 8))
def test_pass_estimators_equal_the_enumeration_of_all_choices(num_attempts: int) -> None:
    for num_solved in range(num_attempts + 1):
        outcomes = [True] * num_solved + [False] * (num_attempts - num_solved)
        for k in range(1, num_attempts + 1):
            chosen = list(combinations(outcomes, k))
            assert pass_at(num_attempts, num_solved, k) == pytest.approx(fmean(map(any, chosen)))
            assert pass_all(num_attempts, num_solved, k) == pytest.approx(fmean(map(all, chosen)))


def test_pass_estimators_have_no_bias() -> None:
    rng, k, skill = random.Random(0), 3, 0.3
    counts = [sum(rng.random() < skill for _ in range(5)) for _ in range(20_000)]
    assert fmean(pass_at(5, c, k) for c in counts) == pytest.approx(1 - (1 - skill) ** k, abs=0.01)
    assert fmean(pass_all(5, c, k) for c in counts) == pytest.approx(skill**k, abs=0.01)


def test_more_attempts_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="from 1 to the 4 attempts"):
        pass_at(4, 2, 5)
    assert ks_of([6, 8]) == [1, 2, 4, 6]
    assert ks_of([]) == []


@pytest.mark.parametrize(
    "freedom", [(1, 12.706), (2, 4.303), (3, 3.182), (5, 2.571), (10, 2.228), (30, 2.042), (1000, 1.962)]
)
def test_quantiles_of_students_t(freedom: tuple[int, float]) -> None:
    assert t_quantile(freedom[0]) == pytest.approx(freedom[1], rel=0.02)


@pytest.mark.parametrize(("num_tasks", "num_attempts"), [(12, 4), full(40, 2), full(100, 8)])
def test_intervals_cover_the_truth_though_attempts_at_a_task_are_alike(num_tasks: int, num_attempts: int) -> None:
    rng, num_covered, num_paired = random.Random(1), 0, 0
    rounds = 600
    for _ in range(rounds):
        skills = [rng.betavariate(1, 1) for _ in range(num_tasks)]  # mean 0.5; most tasks are easy or hard
        first = {str(i): [float(rng.random() < s) for _ in range(num_attempts)] for i, s in enumerate(skills)}
        second = {str(i): [float(rng.random() < s / 2) for _ in range(num_attempts)] for i, s in enumerate(skills)}
        found = mean_of_tasks({task: fmean(rewards) for task, rewards in first.items()})
        num_covered += found.low <= 0.5 <= found.high
        gain = mean_difference(first, second)
        assert gain
        num_paired += gain.low <= -0.25 <= gain.high
    assert 0.92 <= num_covered / rounds <= 0.98
    assert 0.92 <= num_paired / rounds <= 0.98


def test_intervals_that_took_attempts_for_independent_would_be_too_narrow() -> None:
    rng, rounds, num_covered = random.Random(2), 400, 0
    for _ in range(rounds):
        skills = [rng.choice((0.05, 0.95)) for _ in range(20)]
        attempts = {f"{i}-{j}": float(rng.random() < s) for i, s in enumerate(skills) for j in range(8)}
        wrong = mean_of_tasks(attempts)  # each attempt as if it were a task
        num_covered += wrong.low <= 0.5 <= wrong.high
    assert num_covered / rounds < 0.75
