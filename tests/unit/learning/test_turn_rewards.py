"""Rewards for single turns."""

from typing import Any

from mcp_grpo.learning import TurnRewards


def by_turn(**kwargs: Any) -> list[Any]:
    return [[1.0, -0.5], 2.0]


def whole(**kwargs: Any) -> list[float]:
    return [1.0, 2.0]


def test_what_turns_were_given_is_kept_and_added_up() -> None:
    rewards = TurnRewards([whole, by_turn], ["whole", "by_turn"])
    assert [function() for function in rewards.functions] == [[1.0, 2.0], [0.5, 2.0]]
    assert rewards.given == {0: [None, None], 1: [[1.0, -0.5], None]}
