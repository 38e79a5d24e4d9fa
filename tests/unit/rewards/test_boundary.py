"""A reward function that raises: what is told of it, on which ranks, and what is done before."""

import asyncio
from typing import Any

import pytest
from helpers.attempts import attempt

from mcp_grpo.errors import RewardError, TaskFormatError
from mcp_grpo.rewards import exact_answer
from mcp_grpo.rewards.boundary import RewardBoundary
from mcp_grpo.types import Trajectory


GROUP = [attempt("5", task_id="good"), attempt("1" * 400, task_id="bad")]


def as_float(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    return [float(int(one.messages[-1]["content"])) for one in trajectory]


async def as_float_later(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    return as_float(trajectory)


@pytest.mark.parametrize("function", [as_float, as_float_later])
def test_a_function_that_raises_is_told_with_its_trajectory_on_every_rank_and_after_a_checkpoint(
    function: Any,
) -> None:
    boundary, saved = RewardBoundary(), list[str]()
    bounded = boundary.around(function, "mine")
    assert bounded.__name__ == function.__name__
    rewards = bounded(trajectory=GROUP, log_metric=pytest.fail)
    assert (asyncio.run(rewards) if asyncio.iscoroutine(rewards) else rewards) == [None, None]

    def save() -> str:
        saved.append("here")
        return "Go on from here."

    told = r"`mine` raised OverflowError: .* of task 'bad' \(answered, 1 turns, 0 calls\), which ends with '1{150} \.\.\. 1{150}'. Go on"
    other = RewardBoundary()  # of a rank whose rewards were fine
    found: list[Any] = []
    with pytest.raises(RewardError, match=told) as caught:
        boundary.check(lambda own: found.extend(own) or own, save)
    assert isinstance(caught.value.__cause__, OverflowError)
    with pytest.raises(RewardError, match=told):
        other.check(lambda own: [*found, *own], save)
    assert saved == ["here", "here"]
    boundary.check(list, save)  # told once
    assert len(saved) == 2


def test_a_function_that_fails_only_for_all_together_is_told_without_one() -> None:
    def together(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        raise ValueError("too many") if len(trajectory) > 1 else KeyError

    boundary = RewardBoundary()
    assert boundary.around(together, "mine")(trajectory=GROUP) == [None, None]
    with pytest.raises(RewardError, match=r"^The reward function `mine` raised ValueError: too many\. Here\.$"):
        boundary.check(list, lambda: "Here.")


def test_a_task_that_cannot_be_rewarded_is_still_the_task_s_fault() -> None:
    boundary = RewardBoundary()
    assert boundary.around(exact_answer, "exact_answer")(trajectory=GROUP) == [None, None]
    with pytest.raises(TaskFormatError, match="has no `answer`"):
        boundary.check(list, str)


def test_what_does_not_raise_is_passed_on() -> None:
    boundary = RewardBoundary()
    assert boundary.around(as_float, "mine")(trajectory=GROUP[:1]) == [5.0]
    boundary.check(list, lambda: pytest.fail("nothing was wrong"))
