"""Rewards for how a trajectory got there: the form of its final message, its calls, and what went wrong on the way."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal

from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.rewards.answers import has_answer_line
from mcp_grpo.types import ResultKind, Task, Trajectory


RewardFunction = Callable[..., list[Any]]


def format_reward(
    pattern: str | None = None, *, answer_line: bool = True, max_length: int | None = None
) -> RewardFunction:
    """
    Makes a reward of 1 for a final message in the required form, and 0 otherwise.

    By itself it pays for form without content: let a [`Rubric`] pay it only where the outcome is right.

    Args:
        pattern (`str`, *optional*):
            Regular expression that the message must hold.
        answer_line (`bool`, *optional*, defaults to `True`):
            Whether a line must begin with `Answer:`.
        max_length (`int`, *optional*):
            Characters that the message may have.

    Returns:
        `Callable`: The reward function.
    """
    regex = _compiled(pattern)
    if max_length is not None and max_length < 1:
        raise SettingsError(f"`max_length` must be at least 1, got {max_length!r}.")

    def is_formed(message: str | None) -> bool:
        if message is None or (max_length is not None and len(message) > max_length):
            return False
        return (regex is None or regex.search(message) is not None) and (not answer_line or has_answer_line(message))

    def form(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
        return [float(is_formed(attempt.answer)) for attempt in trajectory]

    return form


def efficiency(
    outcome: RewardFunction,
    *,
    budget: int | None = None,
    column: str = "reference_calls",
    unit: Literal["calls", "turns"] = "calls",
) -> RewardFunction:
    """
    Makes a reward for needing no more calls than necessary: 1 up to the budget, then the budget's share of what was used.

    It is paid only where the outcome is right, and less than the budget is worth no more than the budget: neither giving
    up early nor guessing pays.

    Args:
        outcome (`Callable`):
            Reward function of the outcome. Right is 1 or more.
        budget (`int`, *optional*):
            What is enough. By default it is the task's own.
        column (`str`, *optional*, defaults to `"reference_calls"`):
            Column of the dataset with the budget of each task.
        unit (`str`, *optional*, defaults to `"calls"`):
            What is counted: `"calls"` or `"turns"`.

    Returns:
        `Callable`: The reward function.
    """
    if budget is not None and budget < 1:
        raise SettingsError(f"`budget` must be at least 1, got {budget!r}.")
    if unit not in ("calls", "turns"):
        raise SettingsError(f"`unit` must be 'calls' or 'turns', got {unit!r}.")

    def share(attempt: Trajectory, reward: Any) -> float | None:
        if reward is None:
            return None
        enough = max(1, _budget(attempt.task, column) if budget is None else budget)
        if total(reward) < 1:
            return 0.0
        used = len(attempt.exchanges) if unit == "calls" else attempt.num_turns
        return enough / max(enough, used)

    def efficiency_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[float | None]:
        rewards = outcome(trajectory=trajectory, **_silent(kwargs))
        return [share(attempt, reward) for attempt, reward in zip(trajectory, rewards, strict=True)]

    efficiency_reward.__name__ = "efficiency"
    efficiency_reward.__dict__["outcome"] = outcome  # for `checks`, which calls no function of others
    return efficiency_reward


def call_penalty(*, fault: float = 0.1, tool_error: float = 0.0, cap: float = 0.3) -> RewardFunction:
    """
    Makes a penalty for calls that went wrong, given to the turns that made them.

    The cap keeps it below an outcome of 1, so that no failed trajectory beats a solved one. It never pays anything, so
    that there is nothing to collect by making calls. A trajectory that did not come to an answer ([`Trajectory.answer`])
    costs the cap, and its last turn pays what is left of it: writing until there is no more room is no way around faults.

    Args:
        fault (`float`, *optional*, defaults to `0.1`):
            What a call costs that could not be made: unreadable, of no tool there is, with invalid arguments.
        tool_error (`float`, *optional*, defaults to `0.0`):
            What a call costs that the tool answered with an error. Whether that was a mistake, the outcome decides.
        cap (`float`, *optional*, defaults to `0.3`):
            What all of them may cost in one trajectory.

    Returns:
        `Callable`: The reward function. It returns a list for each trajectory, with one penalty for each turn.
    """
    for name, value in (("fault", fault), ("tool_error", tool_error), ("cap", cap)):
        if not 0 <= value < 1:
            raise SettingsError(f"`{name}` must be in [0, 1), got {value!r}: an outcome is worth 1.")

    def cost(kind: ResultKind) -> float:
        return fault if kind.is_policy_fault else tool_error if kind is ResultKind.TOOL_ERROR else 0.0

    def penalties(attempt: Trajectory) -> list[float]:
        turns, left = [0.0] * max(1, attempt.num_turns), cap
        for exchange in attempt.exchanges:
            paid = min(left, cost(exchange.result.kind))
            turns[exchange.turn] -= paid
            left -= paid
        if attempt.answer is None:
            turns[-1] -= left
        return turns

    def call_penalty_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
        return [penalties(attempt) for attempt in trajectory]

    call_penalty_reward.__name__ = "call_penalty"
    return call_penalty_reward


def total(reward: Any) -> float:
    """What a reward comes to: a number, or the sum of those of its turns."""
    return math.fsum(reward) if isinstance(reward, list | tuple) else float(reward)


def _silent(kwargs: dict[str, Any]) -> dict[str, Any]:
    """What to pass on to a function that is asked once more: what it logs has been logged."""
    return {key: value for key, value in kwargs.items() if key not in ("log_metric", "log_extra")}


def _compiled(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except re.error as error:
        raise SettingsError(f"`pattern` must be a regular expression, got {pattern!r}: {error}.") from error


def _budget(task: Task, column: str) -> int:
    budget = task.metadata.get(column)
    if isinstance(budget, bool) or not isinstance(budget, int) or budget < 0:
        raise TaskFormatError(
            f"`{column}` of task {task.task_id!r} must be a whole number, got {budget!r}. Give every task one, or pass "
            "`budget`."
        )
    return budget
