"""A file in the folder of a run that says which stages are done, so that the same command goes on where it stopped."""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcp_grpo.errors import SettingsError
from mcp_grpo.train.arguments import flag


LEDGER_FILE, LOCK_FILE = "train.json", ".train.lock"
FREE = {"doctor"}  # stages that leave nothing, and are simply done again for other arguments


class Ledger:
    """
    What is done in the folder of a run.

    Args:
        folder (`Path`):
            The folder; it need not exist.
        told (`Mapping[str, Any]`):
            What the command was told. Once a stage has left something, a command that was told something else is refused.

    Raises:
        [`SettingsError`]: If the folder has another run.
    """

    def __init__(self, folder: Path, told: Mapping[str, Any]) -> None:
        self.folder, self._told = folder, dict(told)
        self._path = folder / LEDGER_FILE
        content = self._read()
        self._stages: dict[str, dict[str, Any]] = content.get("stages", {})
        self._facts: dict[str, Any] = content.get("facts", {})
        differences = _differences(content.get("told", {}), self._told) if self._stages else []
        if differences and self._stages.keys() <= FREE:
            self._stages, self._facts = {}, {}
        elif differences:
            raise SettingsError(
                f"{folder} has a run that was told something else: {'; '.join(differences)}. Go on with it by giving the same "
                "arguments, or name another folder with `--out`."
            )

    def is_done(self, stage: str) -> bool:
        """Tell whether a stage is done."""
        return stage in self._stages

    def said(self, stage: str) -> str:
        """Return what a stage came to."""
        return self._stages[stage]["said"]

    def seconds(self, stage: str) -> float:
        """Return how long a stage took."""
        return self._stages[stage]["seconds"]

    def finish(self, stage: str, said: str, seconds: float) -> None:
        """Note that a stage is done, and what it came to."""
        self._stages[stage] = {"said": said, "seconds": round(seconds, 1)}
        self._write()

    def __getitem__(self, name: str) -> Any:
        return self._facts.get(name)

    def note(self, **facts: Any) -> None:
        """Write down what a later stage needs."""
        self._facts |= facts
        self._write()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep a second command out of the folder; a process that ends, however it ends, lets go."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK_FILE).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise SettingsError(
                    f"Another `mcp-grpo train` is at work in {self.folder}. Wait for it, or name another folder with `--out`."
                ) from None
            yield

    def _read(self) -> dict[str, Any]:
        if not self._path.is_file():
            taken = [
                name for name in ("run.json", "adapter_config.json", "config.json") if (self.folder / name).exists()
            ]
            if taken:
                raise SettingsError(
                    f"{self.folder} has something else in it ({taken[0]}), which would be written over. Name another folder "
                    "with `--out`."
                )
            return {}
        try:
            return json.loads(self._path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise SettingsError(f"{self._path} cannot be read: {error}. Name another folder with `--out`.") from error

    def _write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        draft = self._path.with_suffix(".part")
        content = {"told": self._told, "stages": self._stages, "facts": self._facts}
        draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        os.replace(draft, self._path)  # whole, or as it was


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Say in which arguments two commands differ."""
    found: list[str] = []
    for name in [*before, *(name for name in now if name not in before)]:
        first, last = before.get(name), now.get(name)
        if first == last:
            continue
        if name.startswith("contents of "):
            if first is not None and last is not None:  # else the argument itself differs
                found.append(f"the {name} have changed")
        else:
            found.append(f"`{flag(name)}` was {_shown(first)} and is {_shown(last)} now")
    return found


def _shown(value: Any) -> str:
    return "not given" if value is None or value is False else "given" if value is True else str(value)
