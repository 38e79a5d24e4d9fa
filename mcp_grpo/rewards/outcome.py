"""Rewards that look at how a trajectory ended, and at what the policy did wrong on the way."""

from typing import Any

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Trajectory


def exact_answer(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    1 if the final message is the task's `answer`, 0 otherwise; letter case and spaces around it do not matter.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            What else the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_answered(attempt)) for attempt in trajectory]


def is_answered(trajectory: Trajectory) -> bool:
    """
    Whether the final message is the task's `answer`, up to letter case and spaces around it.

    Args:
        trajectory (`Trajectory`):
            A finished trajectory.

    Returns:
        `bool`: Whether it is.
    """
    if trajectory.task.answer is None:
        raise TaskFormatError(
            f"Task {trajectory.task.task_id!r} has no `answer` to compare with. Give every task one, or use a reward "
            "function that does not need it."
        )
    answer = trajectory.answer
    return answer is not None and answer.strip().casefold() == str(trajectory.task.answer).strip().casefold()


def fault_penalty(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    -0.1 for every call that could not be made (unreadable, of no tool there is, with invalid arguments), at most -0.3.

    The limit keeps it below an outcome of 1, so that no failed trajectory beats a solved one. A tool that answers with
    an error costs nothing: whether that was a mistake, the outcome decides. A trajectory that did not come to an answer
    ([`Trajectory.answer`]) costs the limit: writing until there is no more room is no way around faults.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            What else the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    faults = [sum(exchange.result.kind.is_policy_fault for exchange in attempt.exchanges) for attempt in trajectory]
    return [
        -0.1 * (3 if attempt.answer is None else min(count, 3))
        for attempt, count in zip(trajectory, faults, strict=True)
    ]
