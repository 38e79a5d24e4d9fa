"""Load tasks from files, folders and the Hub."""

# `datasets` and `pyarrow` are not typed.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
import logging
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.tasks.aliases import is_importable, unread_columns
from mcp_grpo.tasks.columns import dataset_from_rows
from mcp_grpo.tasks.rows import checked_tasks, refuse, row_problems, shown


logger = logging.getLogger(__name__)

SUFFIXES = (".json", ".jsonl", ".ndjson", ".parquet")
LIST_KEYS = ("tasks", "data")  # under which a JSON file may have its list
_NUM_LOOKED_AT = 100  # rows that are no tasks, to see whether they would become some

TaskSource = str | Path | Dataset | DatasetDict


def load_tasks(source: TaskSource, split: str | None = None) -> Dataset:
    """
    Load tasks for training or evaluation.

    Args:
        source (`str`, `Path`, [`~datasets.Dataset`] or [`~datasets.DatasetDict`]):
            A JSON file (a list of tasks, or an object with the list under `"tasks"`, `"data"`, the name of the split, or any
            name if there is only one), a JSON Lines file, a Parquet file, a folder written by `Dataset.save_to_disk`, the id of a dataset on the Hub,
            or a dataset.
        split (`str`, *optional*):
            Split, if the source has more than one.

    Returns:
        [`~datasets.Dataset`]: One task per row; see [`task_from_row`] for the columns. Values are as in the file, also
        where they differ in type from row to row.

    Raises:
        [`TaskFormatError`]: If the source cannot be read, or a row is not a task; the message lists every problem with its
        line or row.

    Example:

    ```python
    tasks = load_tasks("tasks.jsonl")
    ```
    """
    if isinstance(source, Dataset | DatasetDict):
        dataset, name = _one_split(source, split, "the dataset"), "the dataset"
    else:
        path = Path(source)
        if path.is_dir():
            dataset, name = _one_split(_from_disk(path), split, repr(str(path))), repr(str(path))
        elif path.is_file():
            return _load_file(path, split)
        elif path.suffix.lower() in SUFFIXES or path.is_absolute() or str(source).count("/") > 1:
            raise TaskFormatError(
                f"There is no file {str(path)!r}. Check the path; the current folder is {str(Path.cwd())!r}."
            )
        else:
            dataset, name = _one_split(_from_hub(str(source), split), None, f"{source!r}"), f"{source!r} on the Hub"
    refuse(checked_tasks(dataset)[1], name)
    return dataset


@dataclass(frozen=True, slots=True)
class SourceRows:
    """The rows of a file, their names in messages, and what could not be read."""

    rows: list[Any]
    name_row: Callable[[int], str]
    problems: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])


def read_rows(path: Path, split: str | None = None) -> SourceRows:
    """Read the rows of a file, tasks or not."""
    suffix = path.suffix.lower()
    if suffix != ".json":
        _refuse_split(path, split)
    if suffix == ".parquet":
        return SourceRows(_parquet(path).to_list(), lambda number: f"row {number}")
    if suffix not in SUFFIXES:
        raise TaskFormatError(
            f"Tasks are read from files that end in {', '.join(SUFFIXES)}, got {str(path)!r}. Convert it, or load it as a "
            "`datasets.Dataset` and pass that."
        )
    text = _text(path)
    return _json_rows(path, text, split) if suffix == ".json" else _line_rows(text)


def split_names(path: Path) -> list[str]:
    """Name the lists of a JSON file that has more than one."""
    if path.suffix.lower() != ".json":
        return []
    content = _json(path, _text(path))
    names = list(_lists(cast("dict[str, Any]", content))) if isinstance(content, dict) else []
    return names if len(names) > 1 else []


def _load_file(path: Path, split: str | None) -> Dataset:
    if path.suffix.lower() == ".parquet":
        _refuse_split(path, split)
        dataset = _parquet(path)
        problems = checked_tasks(dataset)[1]
        refuse(problems, repr(str(path)), _import_advice(path, list(dataset), split) if problems else "")
        _warn_of_unread(path, dataset, split)
        return dataset
    read = read_rows(path, split)
    _, problems = checked_tasks(read.rows, name_row=read.name_row)
    refuse(read.problems + problems, repr(str(path)), _import_advice(path, read.rows, split) if problems else "")
    if not read.rows:
        raise TaskFormatError(f"The file {str(path)!r} holds no tasks.")
    dataset = dataset_from_rows(read.rows)
    _warn_of_unread(path, dataset, split)
    return dataset


def import_command(path: Path, split: str | None = None) -> str:
    """Return the command that imports a file with column names of its own."""
    output = path.with_name(f"{path.stem}_tasks.jsonl" if split is None else f"{path.stem}_{split}.jsonl")
    words = ["mcp-grpo", "tasks", "import", str(path), str(output), *(["--split", split] if split else [])]
    return shlex.join(words)


def _import_advice(path: Path, rows: Sequence[Any], split: str | None) -> str:
    wrong = [row for row in rows if row_problems(row)]
    if not any(map(is_importable, wrong[:_NUM_LOOKED_AT])):
        return ""
    return f"\nThe file seems to have column names of its own. Import it first:\n  {import_command(path, split)}"


def _warn_of_unread(path: Path, dataset: Dataset, split: str | None) -> None:
    unread = unread_columns(dataset.column_names)
    if unread:
        logger.warning(
            "%r has no %s, but %s, which tasks do not read. To use them, import the file first: %s",
            str(path),
            ", ".join(f"`{column}`" for column in unread.values()),
            ", ".join(f"`{name}`" for name in unread),
            import_command(path, split),
        )


def _text(path: Path) -> str:
    data = path.read_bytes()
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise TaskFormatError(
            f"Line {line} of {str(path)!r} is not UTF-8: byte {data[error.start : error.start + 1]!r}. Save the file as UTF-8."
        ) from error


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        advice = " If it has one task per line, name it `.jsonl`." if error.msg == "Extra data" else ""
        raise TaskFormatError(
            f"{str(path)!r} is not JSON: line {error.lineno}, column {error.colno}: {error.msg}.{advice}"
        ) from error


def _json_rows(path: Path, text: str, split: str | None) -> SourceRows:
    content = _json(path, text)
    if isinstance(content, list):
        _refuse_split(path, split)
        return SourceRows(cast("list[Any]", content), lambda number: f"row {number}")
    found: Mapping[str, Any] = cast("dict[str, Any]", content) if isinstance(content, dict) else {}
    lists = _lists(found)
    if split is None and len(lists) > 1:
        counts = ", ".join(f"{name!r} ({len(rows)} rows)" for name, rows in lists.items())
        folder = path.with_suffix("")
        raise TaskFormatError(
            f"{str(path)!r} has more than one list: {counts}. Name one with `--split` (`split=` in Python), or write a file of "
            f"tasks for each: {shlex.join(['mcp-grpo', 'tasks', 'import', str(path), str(folder)])}"
        )
    rows = next(iter(lists.values()), None) if split is None else found.get(split)
    if isinstance(rows, list):
        return SourceRows(cast("list[Any]", rows), lambda number: f"row {number}")
    keys = f"an object with the keys {sorted(found)}" if found else shown(content)
    wanted = f"the key {split!r}" if split is not None else " or ".join(f"the key {key!r}" for key in LIST_KEYS)
    raise TaskFormatError(
        f"{str(path)!r} must hold a list of tasks, or an object with {wanted} for that list, got {keys}."
    )


def _lists(content: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the lists of rows in an object: the one under a known key, or else all of them."""
    lists = {str(key): cast("list[Any]", value) for key, value in content.items() if isinstance(value, list)}
    for key in LIST_KEYS:
        if key in lists:
            return {key: lists[key]}
    return {key: rows for key, rows in lists.items() if rows and all(isinstance(row, dict) for row in rows)}


def _refuse_split(path: Path, split: str | None) -> None:
    if split is not None:
        raise TaskFormatError(f"{str(path)!r} has no splits, got `split={split!r}`. Leave `split` out.")


def _line_rows(text: str) -> SourceRows:
    rows: list[Any] = []
    lines: list[int] = []
    problems: list[tuple[str, str]] = []
    # Not `splitlines`: JSON may hold line separators of Unicode as they are.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
            lines.append(number)
        except json.JSONDecodeError as error:
            problem = f"This is not JSON: column {error.colno}: {error.msg}. It begins with {line[:60]!r}."
            problems.append((f"line {number}", problem))
    return SourceRows(rows, lambda index: f"line {lines[index]}", problems)


def _parquet(path: Path) -> Dataset:
    try:
        return Dataset(pq.read_table(path))
    except (pa.ArrowInvalid, OSError) as error:
        raise TaskFormatError(f"{str(path)!r} is not a Parquet file: {error}") from error


def _from_disk(path: Path) -> Dataset | DatasetDict:
    try:
        return load_from_disk(str(path))
    except FileNotFoundError as error:
        files = sorted(file.name for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
        advice = f" Name one of the files in it: {files}." if files else " Name a file."
        raise TaskFormatError(
            f"The folder {str(path)!r} was not written by `Dataset.save_to_disk`.{advice}"
        ) from error


def _from_hub(name: str, split: str | None) -> Dataset | DatasetDict:
    try:
        return load_dataset(name, split=split)
    except (OSError, ValueError) as error:
        raise TaskFormatError(
            f"{name!r} is neither a file here nor a dataset that could be loaded from the Hub: {error}"
        ) from error


def _one_split(dataset: Dataset | DatasetDict, split: str | None, name: str) -> Dataset:
    if isinstance(dataset, Dataset):
        if split is not None and str(dataset.split) != split:
            raise TaskFormatError(f"{name} has no splits, got `split={split!r}`. Leave `split` out.")
        return dataset
    splits: Sequence[str] = [str(key) for key in dataset]
    if split is None and len(splits) == 1:
        return dataset[splits[0]]
    if split not in splits:
        raise TaskFormatError(f"{name} has the splits {splits}, got `split={split!r}`. Name one of them.")
    return dataset[split]
