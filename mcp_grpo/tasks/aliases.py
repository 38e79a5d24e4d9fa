"""Other names for the columns of tasks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.tasks.rows import OPTIONAL_COLUMNS, row_problems


ALIASES: Mapping[str, tuple[str, ...]] = {
    "task_id": ("task_id", "id", "uid", "uuid"),
    "prompt": ("prompt", "question", "query", "messages", "input", "instruction", "task"),
    "tools": ("tools", "available_tools", "allowed_tools", "tool_names", "required_tools", "tools_available"),
    "difficulty": ("difficulty", "complexity", "level"),
    "answer": (
        "answer", "expected_answer", "ground_truth", "target", "solution", "expected_output", "reference_answer"
    ),
    "max_turns": ("max_turns", "max_steps"),
    "servers": ("servers",),
}  # fmt: skip
"""Known names of each column, the likeliest first."""


def is_importable(row: Any) -> bool:
    """Tell whether [`~mcp_grpo.tasks.import_tasks`] would turn a row into a task."""
    if not isinstance(row, Mapping):
        return False
    task = read_aliases(cast("Mapping[str, Any]", row))[0]
    return "prompt" in task and not row_problems({"task_id": "", **task})


def unread_columns(names: Sequence[str]) -> dict[str, str]:
    """Find columns that tasks do not read but that are known as other names of columns they do read."""
    given = {name.lower(): name for name in names}
    missing = [column for column in OPTIONAL_COLUMNS if column not in names]
    # A `solution` of ours is a script, which says nothing about the answer.
    found = {column: [a for a in ALIASES.get(column, ()) if a in given and a != "solution"] for column in missing}
    return {given[aliases[0]]: column for column, aliases in found.items() if aliases}


def read_aliases(row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], dict[str, Any]]:
    """
    Read a row by all known names of its columns; return the task, the source of each column, and unreadable values.
    """
    task: dict[str, Any] = {}
    sources: dict[str, str] = {}
    unreadable: dict[str, Any] = {}
    for column, read in _READERS.items():
        for path, value in _candidates(row, ALIASES[column]):
            if path in sources.values():
                continue
            understood = read(value)
            if understood is not None:
                task[column], sources[column] = understood, path
                unreadable.pop(column, None)
                break
            if column != "prompt" and not _is_script(value):
                unreadable.setdefault(column, value)
    if (
        sources.get("prompt") in ("input", "instruction")
        and plain_text(row.get("instruction"))
        and plain_text(row.get("input"))
    ):
        task["prompt"] = f"{row['instruction'].strip()}\n\n{row['input'].strip()}"
        sources["prompt"] = "instruction + input"
    return task, sources, unreadable


def _candidates(row: Mapping[str, Any], aliases: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield values under one of these names, the row's own first; case does not matter."""
    levels = [("", row)] + [
        (f"{column}.", cast("Mapping[str, Any]", value)) for column, value in row.items() if isinstance(value, Mapping)
    ]
    for prefix, level in levels:
        by_name = {str(key).lower(): key for key in level}
        for alias in aliases:
            if (key := by_name.get(alias)) is not None and level[key] is not None:
                yield f"{prefix}{key}", level[key]


def plain_text(value: Any) -> str | None:
    """Return a text that is not blank, and `None` for everything else."""
    return value if isinstance(value, str) and value.strip() else None


def _prompt(value: Any) -> Any:
    if isinstance(value, list) and value and not row_problems({"task_id": "", "prompt": value}):
        return cast("list[Any]", value)
    return plain_text(value)


def _label(value: Any) -> str | None:
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


def _difficulty(value: Any) -> str | None:
    label = _label(value)
    return None if label is None else label.lower()


def _max_turns(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _tools(value: Any) -> list[str] | None:
    """Return the names of tools, also of those given as schemas."""
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if isinstance(value, Mapping):
        value = list(cast("Mapping[Any, Any]", value))
    if not isinstance(value, list):
        return None
    names = [_tool(tool) for tool in cast("list[Any]", value)]
    return None if not names or None in names else list(dict.fromkeys(cast("list[str]", names)))


def _tool(value: Any) -> str | None:
    if isinstance(value, Mapping):
        tool = cast("Mapping[str, Any]", value)
        inner: Any = tool.get("function", tool)
        value = inner if isinstance(inner, str) else cast("Mapping[str, Any]", inner).get("name")
    return plain_text(value)


def _answer(value: Any) -> Any:
    return None if _is_script(value) else value


def _is_script(value: Any) -> bool:
    """Tell whether it is a scripted solution for [`~mcp_grpo.evaluation.run_solutions`], not an answer."""
    return isinstance(value, Mapping) and "steps" in value


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "prompt": _prompt,
    "task_id": _label,
    "servers": _tools,
    "tools": _tools,
    "max_turns": _max_turns,
    "difficulty": _difficulty,
    "answer": _answer,
}
