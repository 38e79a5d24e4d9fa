"""Rewards for form and economy: the final message's format, the number of calls, and failed calls."""

import math
import re
from collections.abc import Callable
from typing import Any, Literal

from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.rewards.answers import has_answer_line
from mcp_grpo.types import ResultKind, Task, Trajectory


RewardFunction = Callable[..., list[Any]]

MAX_CALL_PENALTY = 0.3  # below an outcome of 1


def format_reward(
    pattern: str | None = None, *, answer_line: bool = True, max_length: int | None = None
) -> RewardFunction:
    """
    Make a reward of 1 for a final message in the required form, and 0 otherwise.

    On its own it pays for form without content: gate it by the outcome in a [`Rubric`].

    Args:
        pattern (`str`, *optional*):
            Regular expression that must match somewhere in the message.
        answer_line (`bool`, *optional*, defaults to `True`):
            Whether a line must begin with `Answer:`.
        max_length (`int`, *optional*):
            Maximum length of the message in characters.

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
    Make a reward for few calls: 1 up to the budget, then the budget divided by what was used.

    It is paid only where the outcome is right, and using less than the budget is not paid more: neither giving up early nor
    guessing pays.

    Args:
        outcome (`Callable`):
            Reward function of the outcome. Right is 1 or more.
        budget (`int`, *optional*):
            Sufficient number. By default the task's own.
        column (`str`, *optional*, defaults to `"reference_calls"`):
            Column of the dataset with the budget of each task.
        unit (`str`, *optional*, defaults to `"calls"`):
            `"calls"` or `"turns"`.

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
        rewards = outcome(trajectory=trajectory, **without_logging(kwargs))
        return [share(attempt, reward) for attempt, reward in zip(trajectory, rewards, strict=True)]

    efficiency_reward.__name__ = "efficiency"
    efficiency_reward.__dict__["outcome"] = outcome  # for `checks`, which calls only functions of this library
    return efficiency_reward


def call_penalty(
    *, fault: float = 0.1, tool_error: float = 0.0, no_call: float = 0.0, cap: float = MAX_CALL_PENALTY
) -> RewardFunction:
    """
    Make a penalty for failed calls, charged to the turns that made them.

    The cap keeps it below an outcome of 1, so that no failed trajectory beats a solved one. It never pays, so that nothing
    is gained by making calls. A trajectory without a final answer ([`Trajectory.answer`]) is charged the cap, the rest of it
    on its last turn, so that rambling on does not avoid penalties.

    Args:
        fault (`float`, *optional*, defaults to `0.1`):
            Cost of a call that could not be made: unreadable, unknown tool, invalid arguments.
        tool_error (`float`, *optional*, defaults to `0.0`):
            Cost of a call that the tool answered with an error. By default the outcome decides whether it was a mistake.
        no_call (`float`, *optional*, defaults to `0.0`):
            Cost of an answer without any call. Where no task can be solved without tools, make it the cap: otherwise a policy
            whose calls fail learns to make none.
        cap (`float`, *optional*, defaults to `0.3`):
            Maximum cost per trajectory.

    Returns:
        `Callable`: The reward function. It returns a list for each trajectory, with one penalty for each turn.
    """
    for name, value in (("fault", fault), ("tool_error", tool_error), ("no_call", no_call), ("cap", cap)):
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
        elif not attempt.exchanges:
            turns[-1] -= min(left, no_call)
        return turns

    def call_penalty_reward(trajectory: list[Trajectory], **kwargs: Any) -> list[list[float]]:
        return [penalties(attempt) for attempt in trajectory]

    call_penalty_reward.__name__ = "call_penalty"
    return call_penalty_reward


def total(reward: Any) -> float:
    """Return a reward as one number: itself, or the sum over its turns."""
    return math.fsum(reward) if isinstance(reward, list | tuple) else float(reward)


def without_logging(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for a function that is called once more, without what would log again."""
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
