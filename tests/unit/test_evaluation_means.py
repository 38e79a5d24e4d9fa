"""Means over the attempts of an evaluation whose batches have not as many each."""

import math

import pytest

from mcp_grpo.metrics import weigh_batches


def weighed(values: list[float], sizes: list[int]) -> list[float]:
    metrics = {"reward": list(values)}
    weigh_batches(metrics, sizes)
    return metrics["reward"]


@pytest.mark.parametrize(
    ("values", "sizes", "expected"),
    [
        ([0.5, 0.5, 1.0], [4, 4, 2], [0.6]),
        ([0.5, math.nan, 1.0], [4, 4, 2], [4 / 6]),
        ([0.5, 1.0], [4, 4], [0.5, 1.0]),  # left to TRL, which takes their mean
        ([0.5], [4], [0.5]),
        ([0.5], [], [0.5]),
        ([7.0], [4, 2], [7.0]),  # of the whole evaluation
    ],
)
def test_each_attempt_counts_once(values: list[float], sizes: list[int], expected: list[float]) -> None:
    assert weighed(values, sizes) == pytest.approx(expected)


def test_what_no_batch_knows_stays_unknown() -> None:
    assert all(map(math.isnan, weighed([math.nan, math.nan], [4, 2])))
