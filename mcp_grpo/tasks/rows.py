"""Dataset rows as tasks."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Message, Task


REQUIRED_COLUMNS = ("task_id", "prompt")
OPTIONAL_COLUMNS = ("servers", "tools", "max_turns", "difficulty", "answer")
_MAX_PROBLEMS = 20


def task_from_row(row: Mapping[str, Any]) -> Task:
    """
    Read one row of a dataset as a task.

    Args:
        row (`Mapping[str, Any]`):
            The row. `task_id` and `prompt` are required; `servers`, `tools`, `max_turns`, `difficulty` and `answer` are
            optional; every other column goes into the task's `metadata`. A prompt that is a string is one message of
            the user.

    Returns:
        [`Task`]: The task.

    Raises:
        [`TaskFormatError`]: If the row is not a task; the message names the column and what to do.

    Example:

    ```python
    task_from_row({"task_id": "capital", "prompt": "What is the capital of France?", "answer": "Paris"})
    ```
    """
    missing = [column for column in REQUIRED_COLUMNS if row.get(column) is None]
    if missing:
        raise TaskFormatError(
            f"A task needs the columns `task_id` and `prompt`; this row has no {' and no '.join(map(repr, missing))}. "
            f"Its columns are {sorted(row)}. Rename them with `dataset.rename_columns`, or add them with `dataset.map`."
        )
    known = {*REQUIRED_COLUMNS, *OPTIONAL_COLUMNS}
    return Task(
        task_id=str(row["task_id"]),
        prompt=_messages(row["prompt"]),
        servers=_names(row, "servers"),
        tools=_names(row, "tools"),
        max_turns=_max_turns(row.get("max_turns")),
        difficulty=row.get("difficulty"),
        answer=row.get("answer"),
        metadata={key: value for key, value in row.items() if key not in known},
    )


def tasks_from_rows(rows: Iterable[Any]) -> list[Task]:
    """
    Read every row of a dataset, and report everything that is wrong with them at once.

    Args:
        rows (`Iterable[Mapping[str, Any]]`):
            The rows, such as a [`~datasets.Dataset`].

    Returns:
        `list[Task]`: One task per row.

    Raises:
        [`TaskFormatError`]: If a row is not a task, or an id stands for two different tasks.
    """
    tasks: list[Task] = []
    problems: list[str] = []
    seen: dict[str, tuple[int, Task]] = {}
    for number, row in enumerate(rows):
        try:
            task = task_from_row(row)
        except TaskFormatError as error:
            problems.append(f"row {number}: {error}")
            continue
        first, namesake = seen.setdefault(task.task_id, (number, task))
        if task != namesake:
            problems.append(
                f"row {number}: `task_id` {task.task_id!r} is that of row {first}, a different task. Give each its own."
            )
        tasks.append(task)
    if problems:
        shown = "\n".join(f"  - {problem}" for problem in problems[:_MAX_PROBLEMS])
        more = f"\n  and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
        raise TaskFormatError(f"{len(problems)} rows of the dataset are not tasks:\n{shown}{more}")
    return tasks


def _messages(prompt: Any) -> tuple[Message, ...]:
    if isinstance(prompt, str):
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list | tuple) or not prompt:
        raise TaskFormatError(
            f"`prompt` must be a string or a list of messages, got {prompt!r}. A message is "
            '`{"role": "user", "content": "..."}`.'
        )
    messages = cast("Sequence[Any]", prompt)
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(cast("Message", message).get("role"), str):
            raise TaskFormatError(
                f'`prompt` holds {message!r}, which is not a message. A message is `{{"role": "user", "content": "..."}}`.'
            )
    if messages[-1]["role"] == "assistant":
        raise TaskFormatError(
            "`prompt` ends with an assistant message. End it with the user's: the policy comes next."
        )
    # A dataset gives every message every key, and `None` to those it did not have.
    return tuple({key: value for key, value in message.items() if value is not None} for message in messages)


def _names(row: Mapping[str, Any], column: str) -> tuple[str, ...] | None:
    names = row.get(column)
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise TaskFormatError(f"`{column}` must be a list of names, or `None` for all, got {names!r}.")
    return tuple(names)


def _max_turns(value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise TaskFormatError(f"`max_turns` must be a whole number of at least 1, or `None`, got {value!r}.")
    return value
