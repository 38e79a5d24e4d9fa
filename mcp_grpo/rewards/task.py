"""Whether a task was done, whatever it asked for."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.answers import answer_spec, is_matched, question_of
from mcp_grpo.rewards.rubric import Rubric
from mcp_grpo.rewards.shape import call_penalty
from mcp_grpo.rewards.states import COLUMN, is_as_expected
from mcp_grpo.types import ResultKind, Task, ToolCall, Trajectory


SYMBOLS = "symbols"

_NAMED = re.compile(r"(?<=[^.?!:\s]\s)(?:the\s+)?([A-Z][\w&'’-]+)(?:[ ]+(?:[A-Z][\w&.'’-]*|&))*")


def task_outcome(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    1 if a trajectory did what its task asked for, 0 otherwise.

    A task with an `answer` wants that answer ([`answer_match`]), one with an `expected_state` wants that state
    ([`state_match`]), and one with both wants both. Nothing is paid to a trajectory that did not come to an answer of its own
    ([`Trajectory.answer`]).

    That there is no data is paid for only where a tool was asked and answered. If the task has a column `symbols`, no answer
    is paid that was guessed: the tools must have answered a call with each of them in its arguments; where there is only one
    and the answer is not that there is none, or where there is none, a name in the question will do as well.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            What else the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_done(attempt)) for attempt in trajectory]


def is_done(trajectory: Trajectory) -> bool:
    """
    Whether a trajectory did what its task asked for; see [`task_outcome`].

    Args:
        trajectory ([`Trajectory`]):
            A finished trajectory.

    Returns:
        `bool`: Whether it did.
    """
    task = trajectory.task
    wants_state = task.metadata.get(COLUMN) is not None
    if task.answer is None and not wants_state:
        raise TaskFormatError(
            f"Task {task.task_id!r} has neither an `answer` nor an `{COLUMN}` to compare with. Give every task one of them."
        )
    # Both are looked at in any case, so that a task is found wrong by the first attempt at it.
    is_right = [is_as_expected(trajectory)] if wants_state else []
    if task.answer is None:
        return all(is_right)
    is_right.append(is_matched(trajectory))
    if not all(is_right):
        return False
    is_refusal = answer_spec(task.answer)["type"] == "refusal"
    if task.metadata.get(SYMBOLS) is None:
        return not is_refusal or bool(_answered(trajectory))
    return _has_looked(trajectory, is_refusal=is_refusal)


def _answered(trajectory: Trajectory) -> list[ToolCall]:
    """Calls that a tool has said something to."""
    kinds = (ResultKind.OK, ResultKind.TOOL_ERROR)
    return [exchange.call for exchange in trajectory.exchanges if exchange.result.kind in kinds]


def _has_looked(trajectory: Trajectory, *, is_refusal: bool) -> bool:
    """Return whether tools were asked about what the task is about, and said something."""
    calls = _answered(trajectory)
    words = {word for call in calls for word in _words(call.arguments)}
    symbols = {str(symbol).casefold() for symbol in cast("Sequence[Any]", trajectory.task.metadata[SYMBOLS])}
    # Names stand for one listing only, and that it was found by its name says nothing about its data.
    if len(symbols) > 1 or (symbols and is_refusal):
        return symbols <= words
    topics = symbols | _names(trajectory.task)
    return bool(topics & words) if topics else bool(calls)


def _names(task: Task) -> set[str]:
    """First words of the names in a question."""
    return {re.sub(r"['’]s?$", "", match[1]).casefold() for match in _NAMED.finditer(question_of(task))}


def _words(arguments: Mapping[str, Any]) -> set[str]:
    """Words and symbols in the arguments of a call."""
    text = json.dumps(dict(arguments), ensure_ascii=False, default=str).casefold()
    return set(re.findall(r"[\w&'’-]+(?:\.\w+)*", text))


def desk_reward() -> Rubric:
    """
    The reward of the desk's tasks: [`task_outcome`], less a little for calls that could not be made ([`call_penalty`]).

    Returns:
        [`Rubric`]: A reward function, which logs its parts as `rewards/outcome/mean` and `rewards/calls/mean`.
    """
    return Rubric({"outcome": task_outcome, "calls": call_penalty()})
