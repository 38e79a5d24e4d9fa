"""Rewards for the final answer, and penalties for faulty calls."""

from typing import Any

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Trajectory


def exact_answer(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 if the final message is the task's `answer`, ignoring case and outer spaces, and 0 otherwise.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_answered(attempt)) for attempt in trajectory]


def is_answered(trajectory: Trajectory) -> bool:
    """Tell whether the final message is the task's `answer`, ignoring case and outer spaces."""
    if trajectory.task.answer is None:
        raise TaskFormatError(
            f"Task {trajectory.task.task_id!r} has no `answer` to compare with. Give every task one, or use a reward "
            "function that does not need it."
        )
    answer = trajectory.answer
    return answer is not None and answer.strip().casefold() == str(trajectory.task.answer).strip().casefold()


def fault_penalty(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Charge 0.1 for every call that could not be made (unreadable, unknown tool, invalid arguments), at most 0.3.

    The limit keeps it below an outcome of 1, so that no failed trajectory beats a solved one. An error that a tool answers
    with costs nothing: the outcome decides whether it was a mistake. A trajectory without a final answer
    ([`Trajectory.answer`]) is charged the limit, so that rambling on does not avoid penalties.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    faults = [sum(exchange.result.kind.is_policy_fault for exchange in attempt.exchanges) for attempt in trajectory]
    return [
        -0.1 * (3 if attempt.answer is None else min(count, 3))
        for attempt, count in zip(trajectory, faults, strict=True)
    ]
