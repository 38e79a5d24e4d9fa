"""Import tasks from files that were made for something else, and report how they were read."""

# `datasets` is not typed.
# pyright: reportMissingTypeStubs=false

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from datasets import Dataset

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.tasks.aliases import ALIASES, plain_text, read_aliases
from mcp_grpo.tasks.columns import dataset_from_rows
from mcp_grpo.tasks.loading import read_rows
from mcp_grpo.tasks.rows import MAX_TURNS, OPTIONAL_COLUMNS, REQUIRED_COLUMNS, few, refuse, row_problems, shown


ANSWER_TYPES = ("number", "date", "name", "set", "list", "boolean", "refusal")
"""Types of answers that [`~mcp_grpo.rewards.answer_match`] knows."""

_RESERVED = {
    *REQUIRED_COLUMNS,
    *OPTIONAL_COLUMNS,
    # What TRL and the trainer pass to reward functions, or read from a row by themselves.
    *("completion", "completions", "completion_ids", "prompts", "trajectory", "trainer_state", "environments"),
    *("log_extra", "log_metric", "image", "images"),
}
_MAX_ROWS = 10


@dataclass(frozen=True, kw_only=True)
class ImportReport:
    """Report on the columns and rows of an imported file. Print it to read it."""

    source: str
    num_rows: int
    num_tasks: int
    columns: Mapping[str, Mapping[str, int]]
    metadata: Mapping[str, str]
    lacking: Mapping[str, Sequence[str]]
    unreadable: Mapping[str, Sequence[str]]
    unmatched: Sequence[str]
    unknown_difficulties: Sequence[str]
    invented_ids: Sequence[str]
    changed_ids: Sequence[str]
    duplicates: Sequence[str]
    refused: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.source}: {self.num_tasks} tasks from {self.num_rows} rows."
        for column, sources in self.columns.items():
            yield f"  `{column}` from " + ", ".join(f"{source!r} ({count})" for source, count in sources.items())
        for source, name in self.metadata.items():
            yield f"  {source!r} kept as metadata" + (f" under the name `{name}`" if name != source else "")
        for column, rows in self.lacking.items():
            yield f"  no `{column}`: {few(rows, _MAX_ROWS, '; ')}"
        for column, rows in self.unreadable.items():
            yield f"  `{column}` not understood and left out: {few(rows, _MAX_ROWS, '; ')}"
        for title, rows in (
            (
                "`answer` kept, but `answer_match` cannot compare with it: read it in a reward function of yours",
                self.unmatched,
            ),
            (f"`difficulty` kept, but it sets no limit on turns, as {list(MAX_TURNS)} do", self.unknown_difficulties),
            ("id made from the content", self.invented_ids),
            ("id changed, because another task has it", self.changed_ids),
            ("left out, because an earlier row is the same", self.duplicates),
            ("left out, because it cannot be a task", self.refused),
        ):
            if rows:
                yield f"  {title}: {few(rows, _MAX_ROWS, '; ')}"


def import_tasks(path: str | Path, split: str | None = None) -> tuple[Dataset, ImportReport]:
    """
    Import tasks from a file with column names of its own.

    Columns are recognised by their usual names ([`ALIASES`]), at the top of a row or inside one of its objects; others are
    kept as metadata. Only a row without a question cannot become a task.

    Args:
        path (`str` or `Path`):
            A JSON, JSON Lines or Parquet file.
        split (`str`, *optional*):
            Key of the list in a JSON file; needed if it has more than one, such as `{"train": [...], "validation": [...]}`.

    Returns:
        `tuple[Dataset, ImportReport]`: The tasks, as [`load_tasks`] returns them, and a report on the file. Raises
        [`TaskFormatError`] if the file cannot be read, or no row of it can be a task.

    Example:

    ```python
    tasks, report = import_tasks("data/processed/train.json")
    print(report)
    ```
    """
    path = Path(path)
    if not path.is_file():
        raise TaskFormatError(f"There is no file {str(path)!r}. Check the path.")
    read = read_rows(path, split)
    importer = _Importer(read.name_row)
    for number, row in enumerate(read.rows):
        importer.add(number, row)
    if not importer.rows:
        refuse(read.problems + importer.refused, repr(str(path)))
        raise TaskFormatError(f"The file {str(path)!r} holds no tasks.")
    report = importer.report(str(path), len(read.rows) + len(read.problems), read.problems)
    return dataset_from_rows(importer.rows), report


class _Importer:
    def __init__(self, name_row: Callable[[int], str]) -> None:
        self.rows: list[dict[str, Any]] = []
        self.refused: list[tuple[str, str]] = []
        self._name_row = name_row
        self._columns: dict[str, Counter[str]] = {column: Counter() for column in ALIASES}
        self._metadata: dict[str, str] = {}
        self._lacking: dict[str, list[str]] = {}
        self._unreadable: dict[str, list[str]] = {}
        self._unmatched: list[str] = []
        self._unknown_difficulties: list[str] = []
        self._invented: list[str] = []
        self._changed: list[str] = []
        self._duplicates: list[str] = []
        self._contents: dict[str, str] = {}  # by id
        self._originals: set[str] = set()

    def add(self, number: int, source: Any) -> None:
        name = self._name_row(number)
        if not isinstance(source, Mapping):
            self.refused.append((name, f"A task is an object, got {shown(source)}."))
            return
        row = cast("Mapping[str, Any]", source)
        original = json.dumps(row, sort_keys=True, default=str)
        if original in self._originals:
            self._duplicates.append(name)
            return
        task, sources, unreadable = read_aliases(row)
        if "prompt" not in task:
            reason = f"There is no question in it: no text under any of {list(ALIASES['prompt'])}. Its columns are {sorted(row)}."
            self.refused.append((name, reason))
            return
        problems = row_problems({"task_id": "", **task})
        if problems:
            self.refused += [(name, problem) for problem in problems]
            return
        self._originals.add(original)
        self._note(name, task, sources, unreadable)
        task |= self._kept(row, sources.values())
        self.rows.append({"task_id": self._id(name, task.get("task_id"), original), **_without(task, "task_id")})

    def report(self, source: str, num_rows: int, problems: Sequence[tuple[str, str]]) -> ImportReport:
        return ImportReport(
            source=source,
            num_rows=num_rows,
            num_tasks=len(self.rows),
            columns={column: dict(sources) for column, sources in self._columns.items() if sources},
            metadata=self._metadata,
            lacking=self._lacking,
            unreadable=self._unreadable,
            unmatched=self._unmatched,
            unknown_difficulties=self._unknown_difficulties,
            invented_ids=self._invented,
            changed_ids=self._changed,
            duplicates=self._duplicates,
            refused=[f"{row}: {problem}" for row, problem in [*problems, *self.refused]],
        )

    def _note(
        self, name: str, task: Mapping[str, Any], sources: Mapping[str, str], unreadable: Mapping[str, Any]
    ) -> None:
        for column, source in sources.items():
            self._columns[column][source] += 1
        for column in ("answer", "tools", "difficulty"):
            if column not in task and column not in unreadable:
                self._lacking.setdefault(column, []).append(name)
        if "answer" in task and not _is_comparable(task["answer"]):
            self._unmatched.append(f"{name} ({shown(task['answer'])})")
        if task.get("difficulty", next(iter(MAX_TURNS))) not in MAX_TURNS and "max_turns" not in task:
            self._unknown_difficulties.append(f"{name} ({shown(task['difficulty'])})")
        for column, value in unreadable.items():
            self._unreadable.setdefault(column, []).append(f"{name} ({shown(value)})")

    def _kept(self, row: Mapping[str, Any], used: Any) -> dict[str, Any]:
        """Return the columns that were not mapped, under names that are not reserved."""
        paths = {part for path in used for part in path.split(" + ")}
        kept: dict[str, Any] = {}
        for source, value in row.items():
            if source in paths:
                continue
            if isinstance(value, Mapping):
                inner = cast("Mapping[str, Any]", value)
                value = {key: item for key, item in inner.items() if f"{source}.{key}" not in paths}
                if inner and not value:
                    continue
            name = f"source_{source}" if source in _RESERVED else source
            self._metadata[source] = name
            kept[name] = value
        return kept

    def _id(self, name: str, task_id: str | None, original: str) -> str:
        digest = hashlib.sha256(original.encode()).hexdigest()[:12]
        if task_id is None:
            self._invented.append(name)
            task_id = f"task-{digest}"
        elif self._contents.get(task_id, original) != original:
            self._changed.append(f"{name} ({task_id!r})")
            task_id = f"{task_id}-{digest}"
        self._contents[task_id] = original
        return task_id


def _is_comparable(answer: Any) -> bool:
    """Tell whether it looks like an answer to compare with: a value, a list of values, or an object with a type."""
    if isinstance(answer, Mapping):
        return cast("Mapping[str, Any]", answer).get("type") in ANSWER_TYPES
    if isinstance(answer, list):
        values = cast("list[Any]", answer)
        return bool(values) and not any(
            isinstance(value, list | bool) or not _is_comparable(value) for value in values
        )
    return plain_text(answer) is not None if isinstance(answer, str) else isinstance(answer, int | float)


def _without(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key != column}
