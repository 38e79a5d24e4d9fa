"""Reward the outcome of a task, whatever it asks for."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.answers import answer_spec, is_matched, question_of
from mcp_grpo.rewards.states import COLUMN, is_as_expected
from mcp_grpo.rewards.words import GENERAL, AnswerWords
from mcp_grpo.types import ResultKind, Task, ToolCall, Trajectory


SYMBOLS = "symbols"

_NAMED = re.compile(r"(?<=[^.?!:\s]\s)(?:the\s+)?([A-Z][\w&'’-]+)(?:[ ]+(?:[A-Z][\w&.'’-]*|&))*")


def task_outcome(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 if a trajectory did what its task asked for, and 0 otherwise.

    A task with an `answer` wants that answer ([`answer_match`]), one with an `expected_state` wants that state
    ([`state_match`]), and one with both wants both. A trajectory without a final answer ([`Trajectory.answer`]) is paid
    nothing.

    The answer that there is no data is paid only after a tool has answered. If the task has a column `symbols`, guesses are
    not paid: a tool must have answered a call with each of the symbols in its arguments. For a single symbol whose answer
    is not a refusal, or without symbols, a name from the question counts as well.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.
    """
    return [float(is_done(attempt)) for attempt in trajectory]


def is_done(trajectory: Trajectory, *, words: AnswerWords = GENERAL) -> bool:
    """Tell whether a trajectory did what its task asked for; see [`task_outcome`]."""
    task = trajectory.task
    wants_state = task.metadata.get(COLUMN) is not None
    if task.answer is None and not wants_state:
        raise TaskFormatError(
            f"Task {task.task_id!r} has neither an `answer` nor an `{COLUMN}` to compare with. Give every task one of them."
        )
    # Both are looked at in any case, so that a task is found wrong by the first attempt at it.
    is_right = [is_as_expected(trajectory, words=words)] if wants_state else []
    if task.answer is None:
        return all(is_right)
    is_right.append(is_matched(trajectory, words=words))
    if not all(is_right):
        return False
    is_refusal = answer_spec(task.answer)["type"] == "refusal"
    if task.metadata.get(SYMBOLS) is None:
        return not is_refusal or bool(_answered(trajectory))
    return _has_looked(trajectory, is_refusal=is_refusal)


def _answered(trajectory: Trajectory) -> list[ToolCall]:
    """Return the calls that a tool answered."""
    kinds = (ResultKind.OK, ResultKind.TOOL_ERROR)
    return [exchange.call for exchange in trajectory.exchanges if exchange.result.kind in kinds]


def _has_looked(trajectory: Trajectory, *, is_refusal: bool) -> bool:
    """Tell whether tools were asked about the task's subject, and answered."""
    calls = _answered(trajectory)
    words = {word for call in calls for word in _words(call.arguments)}
    symbols = {str(symbol).casefold() for symbol in cast("Sequence[Any]", trajectory.task.metadata[SYMBOLS])}
    # Names stand for one listing only, and that it was found by its name says nothing about its data.
    if len(symbols) > 1 or (symbols and is_refusal):
        return symbols <= words
    topics = symbols | _names(trajectory.task)
    return bool(topics & words) if topics else bool(calls)


def _names(task: Task) -> set[str]:
    """Return the first words of the names in a question."""
    return {re.sub(r"['’]s?$", "", match[1]).casefold() for match in _NAMED.finditer(question_of(task))}


def _words(arguments: Mapping[str, Any]) -> set[str]:
    """Return the words and symbols in the arguments of a call."""
    text = json.dumps(dict(arguments), ensure_ascii=False, default=str).casefold()
    return set(re.findall(r"[\w&'’-]+(?:\.\w+)*", text))
