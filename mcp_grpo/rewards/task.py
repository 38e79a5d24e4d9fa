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
from mcp_grpo.types import ResultKind, Task, Trajectory


SYMBOLS = "symbols"

_NAMED = re.compile(r"(?<=[^.?!:\s]\s)(?:the\s+)?([A-Z][\w&'’-]+)(?:[ ]+(?:[A-Z][\w&.'’-]*|&))*")


def task_outcome(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    1 if a trajectory did what its task asked for, 0 otherwise.

    A task with an `answer` wants that answer ([`answer_match`]), one with an `expected_state` wants that state
    ([`state_match`]), and one with both wants both. That there is no data is paid for only where a tool was asked
    and answered; and, if the task has a column `symbols`, asked about one of these symbols or a name in the question.
    Nothing is paid to a trajectory that did not come to an answer of its own ([`Trajectory.answer`]).

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
    return answer_spec(task.answer)["type"] != "refusal" or _has_looked(trajectory)


def _has_looked(trajectory: Trajectory) -> bool:
    """Whether a tool was asked about what the task is about, and said something."""
    answered = [
        exchange.call
        for exchange in trajectory.exchanges
        if exchange.result.kind in (ResultKind.OK, ResultKind.TOOL_ERROR)
    ]
    topics = _topics(trajectory.task)
    return bool(answered) and (topics is None or any(topics & _words(call.arguments) for call in answered))


def _topics(task: Task) -> set[str] | None:
    """Symbols and first words of names that a look must be about; `None` if any will do."""
    symbols = task.metadata.get(SYMBOLS)
    if symbols is None:
        return None
    names = {re.sub(r"['’]s?$", "", match[1]) for match in _NAMED.finditer(question_of(task))}
    return {str(topic).casefold() for topic in (*cast("Sequence[Any]", symbols), *names)} or None


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
