"""The metrics of a run, read as its file grows."""

import json
import os
import secrets
import threading
from pathlib import Path
from typing import Any


NUM_REMEMBERED = 256  # bytes before the place where reading goes on, by which a file that was written anew is known
AHEAD = "batch/"  # prefix of the metrics of a batch that has not been trained on yet

Series = dict[str, tuple[list[int], list[float | None]]]


class MetricsTail:
    """Metrics of a run so far, from `metrics.jsonl`. Only what is new in it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._begin_anew()

    def since(self, generation: str | None, start: int) -> dict[str, Any]:
        """
        Return the metrics after the first `start` lines, by name, and where to go on.

        Everything is returned where `generation` is not that of the file: it was written anew, as a resumed run does.
        """
        with self._lock:
            self._refresh()
            start = start if generation == self._generation else 0
            return {
                "generation": self._generation,
                "count": len(self._rows),
                "start": start,
                "step": self._rows[-1][0] if self._rows else 0,
                "ahead": self._ahead,
                "series": _by_name(self._rows[start:]),
            }

    def latest(self) -> dict[str, Any]:
        """Return the last step and reward that were logged."""
        with self._lock:
            self._refresh()
            rewards = (metrics["reward"] for _, metrics in reversed(self._rows) if metrics.get("reward") is not None)
            return {"step": self._rows[-1][0] if self._rows else 0, "reward": next(rewards, None)}

    def _begin_anew(self) -> None:
        self._generation = secrets.token_hex(6)
        self._rows: list[tuple[int, dict[str, float | None]]] = []
        self._ahead: dict[str, Any] | None = None
        self._offset, self._before, self._inode = 0, b"", -1

    def _refresh(self) -> None:
        if self._path.is_symlink():
            return
        try:
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                if not self._goes_on(file, status):
                    self._begin_anew()
                self._inode = status.st_ino
                file.seek(self._offset)
                lines, _, _ = file.read().rpartition(b"\n")  # a line without its end is still being written
        except OSError:  # not there yet, or not any more
            if self._offset:
                self._begin_anew()
            return
        if lines:
            self._offset += len(lines) + 1
            self._before = (self._before + lines + b"\n")[-NUM_REMEMBERED:]
            for line in lines.split(b"\n"):
                self._add(line)

    def _goes_on(self, file: Any, status: os.stat_result) -> bool:
        """Return whether a file is the one that was read before, with more in it or not."""
        if not self._offset:
            return True
        if status.st_ino != self._inode or status.st_size < self._offset:
            return False
        file.seek(self._offset - len(self._before))
        return file.read(len(self._before)) == self._before

    def _add(self, line: bytes) -> None:
        try:
            logged = json.loads(line)
            step = int(logged.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # a line that was broken off
        metrics = {
            str(name): None if value is None else float(value)
            for name, value in logged.items()
            if value is None or (isinstance(value, int | float) and not isinstance(value, bool))
        }
        if any(name.startswith(AHEAD) for name in metrics):
            self._ahead = {"step": step, "metrics": {k.removeprefix(AHEAD): v for k, v in metrics.items()}}
            return
        self._rows.append((step, metrics))
        if self._ahead is not None and step > self._ahead["step"]:
            self._ahead = None


def _by_name(rows: list[tuple[int, dict[str, float | None]]]) -> Series:
    found: Series = {}
    for step, metrics in rows:
        for name, value in metrics.items():
            steps, values = found.setdefault(name, ([], []))
            steps.append(step)
            values.append(value)
    return found
