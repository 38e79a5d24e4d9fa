"""Convert rows of a dataset to tasks."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Message, Task, UserTurn


REQUIRED_COLUMNS = ("task_id", "prompt")
OPTIONAL_COLUMNS = ("servers", "tools", "max_turns", "difficulty", "answer", "user_turns")
MAX_TURNS = {"easy": 5, "medium": 8, "hard": 10}
"""Default limit on turns by difficulty."""

_MAX_PROBLEMS = 50  # that differ, in one message
_MAX_ROWS = 5  # named for one problem
_MAX_SHOWN = 200  # characters of a value in a message


def task_from_row(row: Mapping[str, Any]) -> Task:
    """Read one row of a dataset as a task."""
    problems = row_problems(row)
    if problems:
        raise TaskFormatError(" ".join(problems))
    return _task(row)


def tasks_from_rows(rows: Iterable[Any], *, name_row: Callable[[int], str] | None = None) -> list[Task]:
    """
    Read every row of a dataset, and report everything that is wrong with them at once.

    Args:
        rows (`Iterable[Mapping[str, Any]]`):
            The rows, such as a [`~datasets.Dataset`].
        name_row (`Callable[[int], str]`, *optional*):
            Names a row in a message by its index, such as `"line 3"`. By default it is `"row 2"`, counted from 0.

    Returns:
        `list[Task]`: One task per row.

    Raises:
        [`TaskFormatError`]: If a row is not a task, or an id stands for two different tasks.
    """
    tasks, problems = checked_tasks(rows, name_row=name_row)
    refuse(problems, "the dataset")
    return tasks


def checked_tasks(
    rows: Iterable[Any], *, name_row: Callable[[int], str] | None = None
) -> tuple[list[Task], list[tuple[str, str]]]:
    """Read every row that is a task, and return what is wrong with the others."""
    name_row = name_row or (lambda number: f"row {number}")
    tasks: list[Task] = []
    problems: list[tuple[str, str]] = []
    seen: dict[str, tuple[int, Task]] = {}
    for number, row in enumerate(rows):
        found = row_problems(row)
        problems += [(name_row(number), problem) for problem in found]
        if found:
            continue
        task = _task(row)
        first, namesake = seen.setdefault(task.task_id, (number, task))
        if task != namesake:
            problem = f"`task_id` {task.task_id!r} is that of {name_row(first)}, a different task. Give each its own."
            problems.append((name_row(number), problem))
        tasks.append(task)
    return tasks, problems


def refuse(problems: Sequence[tuple[str, str]], source: str, advice: str = "") -> None:
    """Raise for all problems at once, if there are any."""
    if not problems:
        return
    rows_of: dict[str, list[str]] = {}
    for row, problem in problems:
        rows_of.setdefault(problem, []).append(row)
    lines = [f"  - {few(rows, _MAX_ROWS)}: {problem}" for problem, rows in rows_of.items()]
    more = f"\n  and {len(lines) - _MAX_PROBLEMS} more" if len(lines) > _MAX_PROBLEMS else ""
    num_rows = len({row for row, _ in problems})
    are = "row of {} is not a task" if num_rows == 1 else "rows of {} are not tasks"
    raise TaskFormatError(f"{num_rows} {are.format(source)}:\n" + "\n".join(lines[:_MAX_PROBLEMS]) + more + advice)


def row_problems(row: Any) -> list[str]:
    """Return everything that is wrong with a row."""
    if not isinstance(row, Mapping):
        return [f"A task is an object with the columns `task_id` and `prompt`, got {shown(row)}."]
    columns = cast("Mapping[str, Any]", row)
    problems: list[str] = []
    missing = [column for column in REQUIRED_COLUMNS if columns.get(column) is None]
    if missing:
        problems.append(
            f"A task needs the columns `task_id` and `prompt`; this row has no {' and no '.join(map(repr, missing))}. "
            f"Its columns are {sorted(columns)}. Rename them with `dataset.rename_columns`, or add them with "
            "`dataset.map`."
        )
    if "prompt" not in missing:
        problems += _prompt_problems(columns["prompt"])
    for column in ("servers", "tools"):
        names = columns.get(column)
        if names is not None and not _is_names(names):
            problems.append(f"`{column}` must be a list of names, or `None` for all, got {shown(names)}.")
    problems += _user_turn_problems(columns.get("user_turns"))
    max_turns = columns.get("max_turns")
    if max_turns is not None and (isinstance(max_turns, bool) or not isinstance(max_turns, int) or max_turns < 1):
        problems.append(f"`max_turns` must be a whole number of at least 1, or `None`, got {shown(max_turns)}.")
    return problems


def few(names: Sequence[str], most: int, separator: str = ", ") -> str:
    """Join the first names, and count the others."""
    return separator.join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def shown(value: Any) -> str:
    """Return a value, shortened for a message."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _task(row: Mapping[str, Any]) -> Task:
    known = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    difficulty, max_turns = row.get("difficulty"), row.get("max_turns")
    if max_turns is None and isinstance(difficulty, str):
        max_turns = MAX_TURNS.get(difficulty)
    return Task(
        task_id=str(row["task_id"]),
        prompt=_messages(row["prompt"]),
        servers=_names(row.get("servers")),
        tools=_names(row.get("tools")),
        max_turns=max_turns,
        difficulty=difficulty,
        answer=_settled(row.get("answer")),
        user_turns=_user_turns(row.get("user_turns")),
        metadata={key: _settled(value) for key, value in row.items() if key not in known},
    )


def _settled(value: Any) -> Any:
    """
    Round away a decoding error: `datasets` decodes some numbers of JSON, such as 0.304688, with the last bit wrong.
    """
    if isinstance(value, float) and math.isfinite(value):
        short = float(f"{value:.15g}")
        return short if abs(short - value) <= 2 * math.ulp(value) else value
    if isinstance(value, list):
        return [_settled(item) for item in cast("list[Any]", value)]
    if isinstance(value, dict):
        return {key: _settled(item) for key, item in cast("dict[str, Any]", value).items()}
    return value


def _messages(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    # A dataset gives every message every key, and `None` to those it did not have.
    return tuple({key: value for key, value in message.items() if value is not None} for message in prompt)


def _prompt_problems(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return []
    if not isinstance(prompt, list | tuple) or not prompt:
        return [
            f"`prompt` must be a string or a list of messages, got {shown(cast('object', prompt))}. A message is "
            '`{"role": "user", "content": "..."}`.'
        ]
    messages = cast("Sequence[Any]", prompt)
    problems = [
        f'`prompt` holds {shown(message)}, which is not a message. A message is `{{"role": "user", "content": "..."}}`.'
        for message in messages
        if not isinstance(message, Mapping) or not isinstance(cast("Message", message).get("role"), str)
    ]
    if not problems and messages[-1]["role"] == "assistant":
        problems.append("`prompt` ends with an assistant message. End it with the user's: the policy comes next.")
    return problems


def _user_turn_problems(turns: Any) -> list[str]:
    turns = _from_json(turns)
    form = '`user_turns` is a list of further messages of the user, each a text or `{"content": "...", "tools": ["name"]}`'
    if turns is None:
        return []
    if not isinstance(turns, list | tuple):
        return [f"{form}; got {shown(cast('object', turns))}."]
    return [
        f"{form}; got {shown(turn)}."
        for turn in cast("Sequence[Any]", turns)
        if not _is_user_turn({"content": turn} if isinstance(turn, str) else turn)
    ]


def _is_user_turn(turn: Any) -> bool:
    if not isinstance(turn, Mapping):
        return False
    given = cast("Mapping[str, Any]", turn)
    tools = given.get("tools")
    has_text = isinstance(given.get("content"), str) and bool(given["content"].strip())
    return has_text and given.keys() <= {"content", "tools"} and (tools is None or _is_names(tools))


def _user_turns(turns: Any) -> tuple[UserTurn, ...]:
    given = [{"content": turn} if isinstance(turn, str) else turn for turn in _from_json(turns) or ()]
    return tuple(UserTurn(content=turn["content"], tools=tuple(turn.get("tools") or ())) for turn in given)


def _from_json(value: Any) -> Any:
    """Read JSON text: a dataset gives all objects of a column the same keys, and all items of a list one type."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _is_names(names: Any) -> bool:
    return isinstance(names, list | tuple) and all(isinstance(name, str) for name in cast("Sequence[Any]", names))


def _names(names: Sequence[str] | None) -> tuple[str, ...] | None:
    return None if names is None else tuple(names)
