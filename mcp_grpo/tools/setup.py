"""The state in which a task wants its servers to start, and the calls that show how it left them."""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.types import Task, ToolCall


COLUMN = "setup"
"""Column of a task's row that has the arguments of each server's `setup_tool`."""

STATE_COLUMN = "state_calls"
"""Column of a task's row that has calls of each server, which show what a trajectory has left behind."""


def start_states(task: Task | None) -> dict[str, dict[str, Any]]:
    """
    Return what each server is to be set up with for a task.

    Args:
        task ([`Task`], *optional*):
            The task. Its column `setup` maps names of servers to objects; the whole or an object may be JSON text, since a
            dataset gives all objects of a column the same keys.

    Returns:
        `dict[str, dict[str, Any]]`: An object for each server that the column names; none without a task or a column.

    Raises:
        [`TaskFormatError`]: If the column is something else.
    """
    found = None if task is None else _read(task.metadata.get(COLUMN))
    if task is None or found is None:
        return {}
    named = cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else None
    if named is not None:
        states = {name: _read(state) for name, state in named.items()}
        given = {name: state for name, state in states.items() if state is not None}
        if all(isinstance(state, Mapping) for state in given.values()):
            return {name: dict(state) for name, state in given.items()}
    raise TaskFormatError(
        f"The `{COLUMN}` of task {task.task_id!r} must map names of servers to objects, such as "
        f'{{"files": {{"tree": {{"a.txt": "hello"}}}}}}, got {str(cast(object, found))[:200]}.'
    )


def state_calls(task: Task) -> dict[str, list[ToolCall]]:
    """
    Return the calls that show what a trajectory has left behind.

    Args:
        task ([`Task`]):
            The task. Its column `state_calls` maps names of servers to lists of `{"name": ..., "arguments": {...}}`; the whole may
            be JSON text.

    Returns:
        `dict[str, list[ToolCall]]`: The calls of each server.

    Raises:
        [`TaskFormatError`]: If the column is something else.
    """
    found = _read(task.metadata.get(STATE_COLUMN))
    try:
        named = {name: _read(calls) for name, calls in dict(found or {}).items()}
        return {
            str(server): [ToolCall(name=str(call["name"]), arguments=dict(call["arguments"] or {})) for call in calls]
            for server, calls in named.items()
            if calls is not None
        }
    except (TypeError, ValueError, KeyError) as error:
        raise TaskFormatError(
            f"The `{STATE_COLUMN}` of task {task.task_id!r} must map names of servers to lists of calls, such as "
            f'{{"files": [{{"name": "list_files", "arguments": {{}}}}]}}, got {str(cast(object, found))[:200]}.'
        ) from error


def setup_problems(tasks: Iterable[Task], servers: Collection[str]) -> list[str]:
    """Return a sentence for each server that tasks want to set up and that cannot be, given those that can."""
    tasks_of: dict[str, list[str]] = {}
    for task in tasks:
        for server in start_states(task):
            if server not in servers:
                tasks_of.setdefault(server, []).append(task.task_id)
    can = ", ".join(f"`{name}`" for name in servers) or "none"
    return [
        f"The `{COLUMN}` of {len(ids)} task{'s' if len(ids) > 1 else ''} ({ids[0]!r}{' and others' if len(ids) > 1 else ''}) is for "
        f"server {server!r}, which cannot be set up. Servers that can are {can}: those with a `setup_tool`, made for each task, or with "
        "isolation 'meta'. Name the tool that sets it up, or correct the name."
        for server, ids in tasks_of.items()
    ]


def _read(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
