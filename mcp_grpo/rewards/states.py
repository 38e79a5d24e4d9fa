"""Compare the state in which a trajectory left its servers with the expected one."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.answers import answer_spec, gives_only, is_assignable, matches_answer, mentions_answer
from mcp_grpo.rewards.words import GENERAL, AnswerWords
from mcp_grpo.types import Task, Trajectory


COLUMN = "expected_state"
MAX_BITS = 4096  # of an integer that is read as an answer


def state_match(trajectory: list[Trajectory], **kwargs: Any) -> list[float]:
    """
    Pay 1 if a trajectory left behind what the task's `expected_state` says and nothing else, and 0 otherwise.

    The column maps names of servers to the expected result of their `state_tool`; see [`matches_state`]. Keys that it
    names at the top of a server's state must match; other keys must be empty, so that one post too many costs all. A
    trajectory without a final answer, because it ran out of tokens or turns, is paid nothing.

    Args:
        trajectory (`list[Trajectory]`):
            The trajectories.
        kwargs (`Any`):
            Other arguments that the trainer passes to reward functions; not used.

    Returns:
        `list[float]`: One reward per trajectory.

    Example:

    ```python
    {
        "task_id": "post-revenue",
        "prompt": "Post VLTA's revenue of 2023 in #earnings.",
        "expected_state": {
            "slack": {
                "added": [
                    {
                        "kind": "post",
                        "channel": "earnings",
                        "text": {"contains": ["VLTA", {"type": "number", "value": 12.5, "unit": "million"}]},
                    }
                ]
            }
        },
    }
    ```
    """
    return [float(is_as_expected(attempt)) for attempt in trajectory]


def is_as_expected(trajectory: Trajectory, *, words: AnswerWords = GENERAL) -> bool:
    """Tell whether a trajectory left behind what its task expects; see [`state_match`]."""
    expected = _expected(trajectory.task)
    if trajectory.answer is None or not trajectory.is_learnt_from:
        return False
    for server, state in expected.items():
        if server not in trajectory.states:
            raise TaskFormatError(
                f"`{COLUMN}` of task {trajectory.task.task_id!r} names the server {server!r}, whose state is unknown; known are those of "
                f"{sorted(trajectory.states)}. Set its `state_tool`, and let the task use it."
            )
        try:
            if not _is_left_so(trajectory.states[server], state, words):
                return False
        except TaskFormatError as error:
            raise TaskFormatError(f"`{COLUMN}` of task {trajectory.task.task_id!r}: {error}") from error
    return True


def matches_state(got: Any, expected: Any, *, words: AnswerWords = GENERAL) -> bool:
    """
    Tell whether a JSON value is as expected.

    | `expected` | matches |
    |---|---|
    | a text, a number, `true`, `null` | the same; spaces at the ends of texts do not matter |
    | `{"channel": "general", ...}` | an object whose keys of these names match; it may have others |
    | `[...]` | a list with as many items, which match in this order |
    | `{"any_order": [...]}` | the same in any order |
    | `{"one_of": [...]}` | what one of these matches |
    | `{"contains": [...]}` | a text with all of these in it: texts, or answers that it mentions |
    | `{"only": [...]}` | a text that gives these answers in its sentences, and no other figure or name that could be meant |
    | `{"type": "number", ...}` | an answer, as [`answer_match`] knows them |
    | `{"equals": ...}` | exactly this, for objects with keys of these names |
    | `{"any": true}` | anything |

    Args:
        got (`Any`):
            The value.
        expected (`Any`):
            The expectation. Raises [`TaskFormatError`] if it is malformed.
        words ([`AnswerWords`], *optional*):
            Words of the field that answers are from.

    Returns:
        `bool`: Whether it is.
    """
    if isinstance(expected, Mapping):
        return _matches_mapping(got, cast("Mapping[str, Any]", expected), words)
    if isinstance(expected, list | tuple):
        values, items = cast("Sequence[Any]", expected), _items(got)
        return (
            isinstance(got, list)
            and len(items) == len(values)
            and all(matches_state(item, value, words=words) for item, value in zip(items, values, strict=True))
        )
    if isinstance(expected, str):
        return isinstance(got, str) and got.strip() == expected.strip()
    if isinstance(got, bool) or isinstance(expected, bool) or not isinstance(got, int | float):
        return got is expected
    return isinstance(expected, int | float) and _is_close(got, expected)


def _expected(task: Task) -> dict[str, Any]:
    expected = task.metadata.get(COLUMN)
    if expected and not isinstance(expected, Mapping):
        raise TaskFormatError(
            f"`{COLUMN}` of task {task.task_id!r} must be an object with the expected state of each server, got {expected!r}."
        )
    # A dataset gives every row the keys of all, and `None` to those it did not have.
    servers = {k: v for k, v in cast("Mapping[str, Any]", expected).items() if v is not None} if expected else {}
    if not servers:
        raise TaskFormatError(
            f"Task {task.task_id!r} has no `{COLUMN}` to compare with. Give every task one, such as "
            '`{"slack": {"added": []}}`, or use a reward function that does not need it.'
        )
    try:
        for state in servers.values():
            _check_form(state)
    except TaskFormatError as error:
        raise TaskFormatError(f"`{COLUMN}` of task {task.task_id!r}: {error}") from error
    return servers


def _check_form(expected: Any) -> None:
    """Refuse a malformed expectation, even where the comparison would never reach it."""
    inner: Iterable[Any] = ()
    if isinstance(expected, Mapping):
        mapping = cast("Mapping[str, Any]", expected)
        inner = _checked_inner(_operator(mapping), mapping)
    elif isinstance(expected, list | tuple):
        inner = cast("Sequence[Any]", expected)
    for value in inner:
        _check_form(value)


def _checked_inner(operator: str | None, expected: Mapping[str, Any]) -> Iterable[Any]:
    """Check one expectation, and return those inside it."""
    _check_alone(operator, expected)
    if operator is None:
        return expected.values()
    if operator in ("any_order", "one_of"):
        return _values(operator, expected[operator])
    if operator == "type":
        answer_spec(expected)
    elif operator in ("contains", "only"):
        for piece in _pieces(operator, expected[operator]):
            if not isinstance(piece, str):
                answer_spec(piece)
    return ()


def _is_left_so(got: Any, expected: Any, words: AnswerWords) -> bool:
    is_plain = isinstance(expected, Mapping) and not _operator(cast("Mapping[str, Any]", expected))
    if is_plain and isinstance(got, Mapping):
        others = {key: value for key, value in cast("Mapping[str, Any]", got).items() if key not in expected}
        if any(others.values()):
            return False
    return matches_state(got, expected, words=words)


def _operator(expected: Mapping[str, Any]) -> str | None:
    return next((key for key in expected if key in _OPERATORS or key == "type"), None)


def _check_alone(operator: str | None, expected: Mapping[str, Any]) -> None:
    if operator not in (None, "type") and len(expected) > 1:
        raise TaskFormatError(
            f"{dict(expected)!r} mixes {operator!r} with other keys. Put it alone, or say {{'equals': ...}} for an object "
            "with such keys."
        )


def _matches_mapping(got: Any, expected: Mapping[str, Any], words: AnswerWords) -> bool:
    operator = _operator(expected)
    if operator == "type":
        answer_spec(expected)
        return isinstance(got, str | int | float) and matches_answer(_as_text(got), expected, words=words)
    if operator is not None:
        _check_alone(operator, expected)
        return _OPERATORS[operator](got, expected[operator], words)
    if not isinstance(got, Mapping):
        return False
    there = cast("Mapping[str, Any]", got)
    return all(key in there and matches_state(there[key], value, words=words) for key, value in expected.items())


def _in_any_order(got: Any, expected: Any, words: AnswerWords) -> bool:
    values = _values("any_order", expected)
    fits = [[matches_state(item, value, words=words) for value in values] for item in _items(got)]
    return isinstance(got, list) and is_assignable(fits, len(values))


def _contains(got: Any, expected: Any, words: AnswerWords) -> bool:
    pieces = _pieces("contains", expected)
    return isinstance(got, str) and all(_has(got, piece, words) for piece in pieces)


def _has(text: str, piece: Any, words: AnswerWords) -> bool:
    if isinstance(piece, str):
        return " ".join(piece.split()).casefold() in " ".join(text.split()).casefold()
    return mentions_answer(text, piece, words)


def _only(got: Any, expected: Any, words: AnswerWords) -> bool:
    pieces = _pieces("only", expected)
    return isinstance(got, str) and gives_only(got, pieces, words)


def _one_of(got: Any, expected: Any, words: AnswerWords) -> bool:
    return any(matches_state(got, value, words=words) for value in _values("one_of", expected))


def _items(got: Any) -> list[Any]:
    return cast("list[Any]", got) if isinstance(got, list) else []


def _values(operator: str, expected: Any) -> Sequence[Any]:
    if not isinstance(expected, list | tuple):
        raise TaskFormatError(f"{operator!r} takes a list, got {expected!r}.")
    return cast("Sequence[Any]", expected)


def _pieces(operator: str, expected: Any) -> Sequence[Any]:
    return [expected] if isinstance(expected, str | Mapping) else _values(operator, expected)


def _is_close(got: float, expected: float) -> bool:
    try:
        return math.isclose(got, expected, rel_tol=1e-12)
    except OverflowError:  # an integer of more than 308 digits
        return got == expected


def _as_text(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return ""  # Python refuses to write it, and it is no answer
    return str(value).lower() if isinstance(value, bool) else str(value)


_OPERATORS: Mapping[str, Callable[[Any, Any, AnswerWords], bool]] = {
    "any_order": _in_any_order,
    "one_of": _one_of,
    "contains": _contains,
    "only": _only,
    "equals": lambda got, expected, words: got == expected,
    "any": lambda got, expected, words: True,
}
