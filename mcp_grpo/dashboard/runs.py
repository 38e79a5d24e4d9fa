"""The runs in a folder."""

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mcp_grpo.dashboard.metrics import MetricsTail
from mcp_grpo.dashboard.trajectories import TrajectoryIndex
from mcp_grpo.inert import inert


# As `mcp_grpo.monitor` names them, which takes seconds to import; a test compares the two.
METRICS_FILE = "metrics.jsonl"
RUN_FILE = "run.json"
FOLDER = "trajectories"
SIGNS = (METRICS_FILE, RUN_FILE, FOLDER)
MAX_DEPTH = 3  # folders below the one that is shown
MAX_FOLDERS = 10_000
SCAN_SECONDS = 1.0  # for which a list of runs is good enough
MAX_RUN_FILE = 2**20  # bytes


class Run:
    """One run: its metrics, its trajectories, and what it says about itself."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.metrics = MetricsTail(path / METRICS_FILE)
        self.trajectories = TrajectoryIndex(path / FOLDER)
        self._path = path

    def about(self) -> dict[str, Any]:
        """Return what is known of the run in short: state, steps, bounds, health."""
        said = self._said()
        return {
            "name": self.name,
            "state": said.get("state"),
            "max_steps": said.get("max_steps"),
            "clip_limits": said.get("clip_limits") or [],
            "settings": said.get("settings") or {},
            "health": said.get("health") or [],
            "quiet_seconds": self._quiet_seconds(),
            "num_files": self.trajectories.num_files(),
            **self.metrics.latest(),
        }

    def _said(self) -> dict[str, Any]:
        file = self._path / RUN_FILE
        try:
            if file.is_symlink() or file.stat().st_size > MAX_RUN_FILE:
                return {}
            found = json.loads(file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}

    def _quiet_seconds(self) -> float | None:
        """Return how long ago the run last wrote something."""
        times = []
        for name in SIGNS:
            try:
                times.append((self._path / name).lstat().st_mtime)
            except OSError:
                continue
        return max(0.0, time.time() - max(times)) if times else None


class Runs:
    """
    All runs in a folder, or the folder itself where it is one.

    A run is known by its path below the folder. Links are not followed, so nothing outside of the folder is read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._found: dict[str, Run] = {}
        self._scanned = -float("inf")

    def all(self) -> list[Run]:
        """Return the runs there are now, by name."""
        with self._lock:
            if time.monotonic() - self._scanned > SCAN_SECONDS:
                paths = dict(self._scan())
                self._found = {name: self._found.get(name) or Run(name, paths[name]) for name in sorted(paths)}
                self._scanned = time.monotonic()
            return list(self._found.values())

    def get(self, name: str) -> Run | None:
        """Return the run of a name, which is only compared with those that were found, and never made into a path."""
        return next((run for run in self.all() if run.name == name), None)

    def _scan(self) -> Iterator[tuple[str, Path]]:
        waiting = [(self._folder, 0)]
        for _ in range(MAX_FOLDERS):
            if not waiting:
                return
            folder, depth = waiting.pop()
            try:
                entries = list(os.scandir(folder))
            except OSError:
                continue
            if any(entry.name in SIGNS and not entry.is_symlink() for entry in entries):
                relative = folder.relative_to(self._folder).as_posix()
                yield inert(self._folder.resolve().name if relative == "." else relative), folder
            elif depth < MAX_DEPTH:
                waiting += [
                    (Path(entry.path), depth + 1)
                    for entry in entries
                    if entry.is_dir(follow_symlinks=False) and not entry.name.startswith((".", "checkpoint-"))
                ]
