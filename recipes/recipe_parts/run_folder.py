"""The folder of a run: what it was told, with which versions, what it logged, and where it can go on from."""

import json
import logging
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import get_last_checkpoint

from mcp_grpo.errors import SettingsError
from mcp_grpo.hub import run_command
from mcp_grpo.monitor import installed_versions
from recipe_parts.command_line import read_settings, write_settings


PACKAGES = (
    "mcp-grpo",
    "accelerate",
    "bitsandbytes",
    "datasets",
    "deepspeed",
    "mcp",
    "peft",
    "torch",
    "transformers",
    "trl",
    "vllm",
)
MAY_DIFFER = {"config", "resume", "debug_trajectory", "profile", "preflight", "output_dir"}  # from what is resumed

logger = logging.getLogger("recipes")


class RunFolder:
    """
    Where a run writes: `config.yaml`, `versions.json`, `run.log`, `metrics.jsonl`, `profile.md`, `debug/`, and checkpoints.

    Args:
        path (`Path`):
            The folder.
        settings (`dict[str, Any]`):
            The settings of the run, from [`StrictParser.parse`].
        is_main (`bool`, *optional*, defaults to `True`):
            Whether this process writes.
    """

    def __init__(self, path: Path, settings: dict[str, Any], is_main: bool = True) -> None:
        self.path = path
        self._settings = settings
        self._is_main = is_main

    def checkpoint(self) -> str | None:
        """
        What to go on from, with `resume`; and a word about settings that have changed since.

        Returns:
            `str` or `None`: The last checkpoint; `None` if the run starts anew.

        Raises:
            [`SettingsError`]: If there is none though `resume` was set, or there is one though it was not.
        """
        found = get_last_checkpoint(str(self.path)) if self.path.is_dir() else None
        if not self._settings["resume"]:
            if found is not None:
                raise SettingsError(
                    f"{self.path} has a checkpoint of an earlier run, {Path(found).name}, which would be written over. Go on "
                    "from it with `--resume`, or choose another `--output_dir`."
                )
            return None
        if found is None:
            raise SettingsError(f"There is no checkpoint in {self.path} to resume from. Leave `--resume` out.")
        file = self.path / "config.yaml"
        before = read_settings(file) if file.exists() else {}
        changed = [
            f"{name} ({before[name]!r} -> {value!r})"
            for name, value in self._settings.items()
            if name in before and name not in MAY_DIFFER and before[name] != getattr(value, "value", value)
        ]
        if changed:
            logger.warning("Settings have changed, so the run does not go on as it would have: %s", ", ".join(changed))
        return found

    @contextmanager
    def logging(self) -> Iterator[None]:
        """Context in which everything that is logged also goes to `run.log`."""
        if not self._is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        # The loggers of these libraries do not pass on what they get to the root.
        loggers = [logging.getLogger(name) for name in (None, "transformers", "trl", "mcp_grpo", "recipes")]
        loggers = [each for each in loggers if each.name == "root" or not each.propagate or each.name == "recipes"]
        levels = [each.level for each in loggers]
        logging.getLogger("recipes").setLevel(logging.INFO)
        for each in loggers:
            if each.name != "recipes":
                each.addHandler(handler)
        try:
            yield
        except BaseException:
            logger.exception("The run has failed")
            raise
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.removeHandler(handler)
                each.setLevel(level)
            handler.close()

    def write(self, catalog: Any, num_tasks: int) -> None:
        """
        Write what the run was told, and with what it runs.

        Args:
            catalog (`Catalog`):
                The tools of the servers.
            num_tasks (`int`):
                How many tasks there are.
        """
        if not self._is_main:
            return
        write_settings(self._settings | {"resume": False}, self.path / "config.yaml")
        facts = {
            "command": run_command(),
            "python": platform.python_version(),
            "packages": installed_versions(PACKAGES),
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "commit": _commit(),
            "catalog_hash": catalog.hash,
            "tools": sorted(f"{tool.server}/{tool.tool}" for tool in catalog.tools),
            "num_tasks": num_tasks,
        }
        (self.path / "versions.json").write_text(json.dumps(facts, indent=2) + "\n")


def _commit() -> str | None:
    folder = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False, timeout=10
    )
    return asked.stdout.strip() or None
