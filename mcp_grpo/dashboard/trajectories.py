"""The recorded trajectories of a run: found by what is small of each, and read one by one."""

import codecs
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from mcp_grpo.inert import inert


SMALL = (
    *("step", "rank", "row", "task_id", "family", "difficulty", "stop_reason", "is_learnt_from", "seconds", "rewards"),
    *("calls.list.element.name", "calls.list.element.kind", "calls.list.element.turn"),
)
"""Columns of every trajectory that are kept in memory."""
TOKENS = ("turn", "role", "in_loss", "sampler_logp", "trainer_logp", "advantage", "value")
UNSHOWN = {"prompt_ids", "token_text", "token_bytes", "token_ids", *TOKENS}
PAGE = 50
MAX_PAGE = 500
READ_SECONDS = 1.5  # of reading new files, before what was found so far is returned
MAX_STEPS_SHOWN = 40  # of the history of a task
MAX_ATTEMPTS_SHOWN = 64  # of a group
MAX_DEPTH = 100  # of JSON
SORTS = ("newest", "oldest", "reward", "-reward", "seconds", "-seconds")
_BRACKETS = re.compile(r"[\[\]{}]")
_UNREADABLE = (OSError, pa.ArrowException, KeyError)  # a file that a new run has just removed, or that is none of ours
_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which trajectories are wanted; `None` leaves a property open. Texts are as they are shown, with control characters inert."""

    min_reward: float | None = None
    max_reward: float | None = None
    family: str | None = None
    tool: str | None = None
    stop_reason: str | None = None
    min_step: int | None = None
    max_step: int | None = None
    task: str | None = None  # part of its id
    errors: bool = False  # only with a call that failed


class TrajectoryIndex:
    """
    The trajectories in a folder of Parquet files, one file for each batch and rank.

    Of each file only the columns that are listed and filtered by are read, and only once. Texts and tokens are read from the
    file of the trajectory that is opened.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._parts: dict[str, tuple[tuple[int, int], pa.Table | None]] = {}
        self._table: _Columns | None = None

    def num_files(self) -> int:
        """Return how many batches there are."""
        return len(self._files())

    def find(self, wanted: Filter, *, sort: str = "newest", offset: int = 0, limit: int = PAGE) -> dict[str, Any]:
        """Return one page of the trajectories that pass a filter, and how many do."""
        columns, is_complete = self._columns()
        places = columns.places(wanted)
        places = columns.ordered(places, sort)
        shown = places[offset : offset + min(limit, MAX_PAGE)]
        return {
            "total": len(places),
            "of": columns.num,
            "is_complete": is_complete,
            "rows": columns.rows(shown),
            "facets": columns.facets(),
        }

    def open(self, step: int, rank: int, row: int) -> dict[str, Any] | None:
        """Return one trajectory with its texts and tokens."""
        name = f"step-{step:06d}-rank-{rank}.parquet"
        if name not in self._files():
            return None
        try:
            table = _read(self._folder / name, None)
        except _UNREADABLE:
            return None
        places = np.flatnonzero(table["row"].to_numpy() == row)
        if not len(places):
            return None
        (found,) = table.slice(int(places[0]), 1).to_pylist()
        return _shown(found) | {"tokens": _tokens(found)}

    def group(self, step: int, task_id: str) -> list[dict[str, Any]]:
        """Return the attempts at a task in one batch, without their tokens."""
        columns, _ = self._columns()
        places = np.flatnonzero((columns.step == step) & columns.is_task(task_id))[:MAX_ATTEMPTS_SHOWN]
        return [_shown(found) for found in self._read_places(columns, places)]

    def history(self, task_id: str) -> dict[str, Any]:
        """Return what became of a task, step by step: rewards, the tools that were called in order, answers."""
        columns, _ = self._columns()
        places = np.flatnonzero(columns.is_task(task_id))
        steps = sorted({int(step) for step in columns.step[places]})
        shown = set(steps[-MAX_STEPS_SHOWN:])
        places = places[[int(step) in shown for step in columns.step[places]]]
        answers = {
            (found["step"], found["rank"], found["row"]): found["answer"]
            for found in self._read_places(columns, places, ["step", "rank", "row", "answer"])
        }
        by_step: dict[int, list[dict[str, Any]]] = {}
        for row in columns.rows(places):
            row["answer"] = answers.get((row["step"], row["rank"], row["row"]))
            by_step.setdefault(row["step"], []).append(row)
        return {"num_steps": len(steps), "steps": [_summed_up(step, by_step[step]) for step in sorted(by_step)]}

    def _read_places(
        self, columns: "_Columns", places: np.ndarray, names: list[str] | None = None
    ) -> list[dict[str, Any]]:
        wanted: dict[str, list[int]] = {}
        for place in places:
            name = f"step-{columns.step[place]:06d}-rank-{columns.rank[place]}.parquet"
            wanted.setdefault(name, []).append(int(columns.row[place]))
        found = []
        for name, rows in wanted.items():
            path = self._folder / name
            try:
                table = _read(path, names or [n for n in pq.read_schema(path).names if n not in UNSHOWN])
            except _UNREADABLE:
                continue
            found += table.filter(pa.array(np.isin(table["row"].to_numpy(), rows))).to_pylist()
        return found

    def _files(self) -> dict[str, os.DirEntry[str]]:
        try:
            if self._folder.is_symlink():
                return {}
            with os.scandir(self._folder) as entries:
                return {e.name: e for e in entries if _FILE.fullmatch(e.name) and e.is_file(follow_symlinks=False)}
        except OSError:
            return {}

    def _columns(self) -> tuple["_Columns", bool]:
        """Return what is small of all trajectories, and whether that is all of them: many files take a while."""
        with self._lock:
            deadline = time.monotonic() + READ_SECONDS
            files = self._files()
            gone = self._parts.keys() - files.keys()
            for name in gone:
                del self._parts[name]
            changed, is_complete = bool(gone), True
            for name in sorted(files, reverse=True):  # the newest first
                try:
                    status = files[name].stat(follow_symlinks=False)
                except OSError:
                    continue
                stamp = (status.st_mtime_ns, status.st_size)
                if name in self._parts and self._parts[name][0] == stamp:
                    continue
                if time.monotonic() > deadline:
                    is_complete = False
                    break
                self._parts[name] = (stamp, _read_small(self._folder / name))
                changed = True
            if changed or self._table is None:
                self._table = _Columns([part for _, (_, part) in sorted(self._parts.items()) if part is not None])
            return self._table, is_complete


class _Columns:
    """The small columns of all trajectories, as arrays."""

    def __init__(self, parts: Sequence[pa.Table]) -> None:
        table = pa.concat_tables(parts).combine_chunks() if parts else None
        self.num = 0 if table is None else len(table)
        self._table = table
        self._facets: dict[str, Any] | None = None
        self.step, self.rank, self.row = (self._numbers(name, np.int64) for name in ("step", "rank", "row"))
        self.seconds = self._numbers("seconds", np.float64)
        self.is_learnt_from = self._numbers("is_learnt_from", np.bool_)
        self.reward = self._rewards()
        texts = ("task_id", "family", "stop_reason")
        self._strings = {name: _coded(None if table is None else table[name]) for name in texts}
        self._parents = np.empty(0, np.int64)  # trajectory of each call
        calls = None
        if table is not None:
            column = table["calls"].combine_chunks()
            calls, self._parents = column.flatten(), column.value_parent_indices().to_numpy().astype(np.int64)
        for name, place in (("tool", "name"), ("kind", "kind")):
            self._strings[name] = _coded(None if calls is None else calls.field(place))

    def places(self, wanted: Filter) -> np.ndarray:
        """Return which trajectories pass a filter."""
        keep = np.ones(self.num, dtype=bool)
        if wanted.min_reward is not None:
            keep &= self.reward >= wanted.min_reward
        if wanted.max_reward is not None:
            keep &= self.reward <= wanted.max_reward
        if wanted.min_step is not None:
            keep &= self.step >= wanted.min_step
        if wanted.max_step is not None:
            keep &= self.step <= wanted.max_step
        for name, value in (("family", wanted.family), ("stop_reason", wanted.stop_reason)):
            if value is not None:
                keep &= self._passes(name, lambda each, value=value: each == value)
        if wanted.task:
            part = wanted.task.casefold()
            keep &= self._passes("task_id", lambda each: part in each.casefold())
        if wanted.tool is not None:
            keep &= self._with_call(self._passes("tool", lambda each: each == wanted.tool))
        if wanted.errors:
            keep &= self._with_call(self._passes("kind", lambda each: each != "ok"))
        return np.flatnonzero(keep)

    def ordered(self, places: np.ndarray, sort: str) -> np.ndarray:
        """Return places in an order of `SORTS`; within it, as they were recorded."""
        keys = {"reward": self.reward, "seconds": self.seconds}
        if sort.lstrip("-") in keys:
            values = keys[sort.lstrip("-")][places]
            return places[np.argsort(-values if sort.startswith("-") else values, kind="stable")]
        steps = self.step[places]
        return places[np.argsort(steps if sort == "oldest" else -steps, kind="stable")]

    def rows(self, places: np.ndarray) -> list[dict[str, Any]]:
        """Return what is small of some trajectories."""
        if self._table is None:
            return []
        found = self._table.take(pa.array(places, pa.int64())).to_pylist()
        for place, row in zip(places, found, strict=True):
            row["reward"] = float(self.reward[place])
            row["rewards"] = dict(row["rewards"] or ())
            row["calls"] = row["calls"] or []
        return found

    def facets(self) -> dict[str, Any]:
        """Return what there is to filter by."""
        if self._facets is None:
            rewards = self.reward[~np.isnan(self.reward)]
            self._facets = {
                "families": self._counted("family"),
                "stop_reasons": self._counted("stop_reason"),
                "tools": self._counted("tool"),
                "steps": [int(self.step.min()), int(self.step.max())] if self.num else None,
                "rewards": [float(rewards.min()), float(rewards.max())] if len(rewards) else None,
            }
        return self._facets

    def is_task(self, task_id: str) -> np.ndarray:
        """Return which trajectories are attempts at a task."""
        return self._passes("task_id", lambda each: each == task_id)

    def _passes(self, name: str, test: Callable[[str], bool]) -> np.ndarray:
        """Return where a column of texts passes a test, which is made once for each text, as it is shown."""
        codes, texts = self._strings[name]
        passed = np.array([*(test(inert(text)) for text in texts), False], dtype=bool)
        return passed[codes]  # -1, for none, is the last one

    def _with_call(self, is_wanted: np.ndarray) -> np.ndarray:
        """Return which trajectories have a call that is wanted."""
        found = np.zeros(self.num, dtype=bool)
        found[self._parents[is_wanted]] = True
        return found

    def _counted(self, name: str) -> list[tuple[str, int]]:
        codes, texts = self._strings[name]
        counts = np.bincount(codes[codes >= 0], minlength=len(texts))
        return _most_common({text: int(count) for text, count in zip(texts, counts, strict=True)})

    def _numbers(self, name: str, dtype: Any) -> np.ndarray:
        if self._table is None:
            return np.empty(0, dtype)
        column = pc.fill_null(self._table[name], False if dtype is np.bool_ else 0)
        return column.to_numpy().astype(dtype)

    def _rewards(self) -> np.ndarray:
        """Return the sum of the parts of each reward; NaN where none was given."""
        if self._table is None:
            return np.empty(0)
        column = self._table["rewards"].combine_chunks()
        column = column.chunk(0) if isinstance(column, pa.ChunkedArray) else column
        parents = np.repeat(np.arange(self.num), np.diff(column.offsets.to_numpy()))
        values = column.items.to_numpy(zero_copy_only=False)[column.offsets[0].as_py() :][: len(parents)]
        given = ~np.isnan(values)
        sums = np.bincount(parents[given], weights=values[given], minlength=self.num)
        return np.where(np.bincount(parents[given], minlength=self.num) > 0, sums, np.nan)


def _coded(column: Any) -> tuple[np.ndarray, list[str]]:
    """Return a column of texts as numbers, -1 for none, and the texts that they stand for."""
    if column is None:
        return np.empty(0, np.int64), []
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    column = column.dictionary_encode()
    return pc.fill_null(column.indices, -1).to_numpy().astype(np.int64), column.dictionary.to_pylist()


def _most_common(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return Counter(counts).most_common(200)


def _read(path: Path, columns: list[str] | None) -> pa.Table:
    return pq.ParquetFile(path).read(columns=columns, use_threads=False)


def _read_small(path: Path) -> pa.Table | None:
    """Return what is small of a file; `None` where it cannot be read."""
    try:
        return _read(path, list(SMALL))
    except _UNREADABLE:
        return None


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a recorded trajectory as the page takes it: JSON read, tokens left out."""
    shown = {name: value for name, value in row.items() if name not in UNSHOWN}
    for name in ("prompt", "messages", "states"):
        shown[name] = _parsed(shown.get(name))
    rewards = dict(shown.get("rewards") or ())
    given = [value for value in rewards.values() if value == value]
    return shown | {"rewards": rewards, "reward": sum(given) if given else None}


def _parsed(text: Any) -> Any:
    """Return what a text of JSON says; the text itself where that cannot be read, or is nested too deep to be written again."""
    depths = accumulate(1 if each in "[{" else -1 for each in _BRACKETS.findall(text or ""))
    try:
        return text if max(depths, default=0) > MAX_DEPTH else json.loads(text or "null")
    except (ValueError, RecursionError):
        return text


def _tokens(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens of a trajectory: their texts, and every quantity that was recorded of them."""
    lengths, data = row.get("token_bytes") or [], row.get("token_text") or b""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    texts, offset = [], 0
    for length in lengths:
        # A character of several tokens is shown with the last of them.
        texts.append(decoder.decode(data[offset : offset + length]))
        offset += length
    tokens = {"ids": row.get("token_ids") or [], "text": texts} | {name: row.get(name) for name in TOKENS}
    own, sampler = row.get("trainer_logp"), row.get("sampler_logp")
    if own is not None and sampler is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            tokens["ratio"] = np.exp(np.array(own, dtype=float) - np.array(sampler, dtype=float)).tolist()
    return tokens


def _summed_up(step: int, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the attempts at a task did in one step."""
    paths = Counter(" → ".join(call["name"] or "?" for call in row["calls"]) for row in rows)
    answers = Counter(row["answer"] for row in rows if row["answer"] is not None)
    given = [row["reward"] for row in rows if row["reward"] == row["reward"]]
    return {
        "step": step,
        "mean_reward": sum(given) / len(given) if given else None,
        "attempts": [
            {name: row[name] for name in ("rank", "row", "reward", "stop_reason", "seconds")} for row in rows
        ],
        "paths": paths.most_common(3),
        "answers": answers.most_common(3),
        "stop_reasons": Counter(row["stop_reason"] for row in rows).most_common(),
    }
