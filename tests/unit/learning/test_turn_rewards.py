"""Rewards for single turns."""

import logging
from typing import Any

import pytest

from mcp_grpo.learning import TurnRewards


def by_turn(**kwargs: Any) -> list[Any]:
    return [[1.0, -0.5], 2.0]


def whole(**kwargs: Any) -> list[float]:
    return [1.0, 2.0]


def test_rewards_that_are_only_added_up_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    rewards = TurnRewards([whole, by_turn], ["whole", "by_turn"], are_added_up=True)
    with caplog.at_level(logging.WARNING):
        assert rewards.functions[0]() == [1.0, 2.0]
        assert not caplog.records
        assert [rewards.functions[1]() for _ in range(2)] == [[0.5, 2.0]] * 2
    (record,) = caplog.records
    assert "'by_turn' rewards single turns" in record.getMessage()
    assert "advantage_mode='group_turn'" in record.getMessage()


def test_rewards_that_each_turn_is_judged_by_need_no_word(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        TurnRewards([by_turn], ["by_turn"]).functions[0]()
    assert not caplog.records
