"""The folder of a run: what it was told, with which versions, what it logged, and where it can go on from."""

import hashlib
import json
import logging
import os
import platform
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.errors import HealthError, SettingsError
from mcp_grpo.monitor import InertFormatter, speak_in_terminal
from mcp_grpo.publishing import installed_versions, newest_checkpoint, run_command
from mcp_grpo.tools.secrets import secret_values, shown_error
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
MAX_TASKS = 200  # that are written down; a hash stands for all of them
# From what is resumed.
MAY_DIFFER = {"config", "resume", "minutes", "debug_trajectory", "profile", "preflight", "output_dir"}

logger = logging.getLogger("recipes")


class RunFolder:
    """
    Where a run writes: `config.yaml`, `servers.json`, `tasks/`, `versions.json`, `run.log`, `metrics.jsonl`,
    `evaluations.jsonl`, `report.txt`, `profile.md`, `debug/`, and checkpoints.

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
        """Return the checkpoint to go on from, with `resume`, and warn of settings that have changed since."""
        found, problems = newest_checkpoint(self.path)
        if not self._settings["resume"]:
            if found is not None:
                raise SettingsError(
                    f"{self.path} has a checkpoint of an earlier run, {Path(found).name}, which would be written over. Go on "
                    "from it with `--resume`, or choose another `--output_dir`."
                )
            return None
        if found is None:
            raise SettingsError(
                " ".join([*problems, f"There is no checkpoint in {self.path} to resume from. Leave `--resume` out."])
            )
        for problem in problems:
            logger.warning("%s", problem)
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
        """Write what is logged to `run.log`, too. Warnings still reach the terminal."""
        if not self._is_main:
            yield
            return
        self.path.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(self.path / "run.log")
        handler.setFormatter(InertFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        speak_in_terminal("mcp_grpo", "recipes")  # a handler of the root would silence them
        # The loggers of these libraries do not pass on what they get to the root.
        others = [logging.getLogger(name) for name in ("transformers", "trl")]
        receiving = [logging.getLogger(), *(each for each in others if not each.propagate)]
        own = [logging.getLogger(name) for name in ("mcp_grpo", "recipes")]
        levels = [each.level for each in own]
        for each in own:
            each.setLevel(logging.INFO)
        for each in receiving:
            each.addHandler(handler)
        try:
            yield
        except HealthError as error:
            logger.error("The run was stopped: %s", error, extra={"is_said": True})
            raise
        except BaseException as error:
            trace = shown_error(error, secret_values(os.environ.items(), {}))
            logger.error("The run has failed\n%s", trace, extra={"is_said": True})
            raise
        finally:
            for each in receiving:
                each.removeHandler(handler)
            for each, level in zip(own, levels, strict=True):
                each.setLevel(level)
            handler.close()

    def write(self, trainer: MCPGRPOTrainer, servers: Any) -> None:
        """Write what the run was told, and with what it runs; keys in `servers` are not written."""
        if not self._is_main:
            return
        catalog = trainer.catalog
        write_settings(self._settings | {"resume": False}, self.path / "config.yaml")
        text = Path(servers).read_text() if isinstance(servers, str | Path) else json.dumps(servers, indent=2) + "\n"
        (self.path / "servers.json").write_text(trainer.without_secrets(text))
        datasets = {"train": trainer.train_dataset, "eval": trainer.eval_dataset}
        tasks = {name: self._write_tasks(name, rows) for name, rows in datasets.items() if isinstance(rows, Dataset)}
        given = {name: value for name, value in self._settings.items() if value is not None}
        logger.info("Settings: %s", json.dumps(given, default=str, sort_keys=True))
        logger.info("Tasks: %s", json.dumps(tasks))
        for server in catalog.servers:
            names = [tool.name for tool in catalog.tools if tool.server == server]
            logger.info("Server %s: %d tools: %s", server, len(names), ", ".join(names))
        facts = {
            "command": run_command(),
            "python": platform.python_version(),
            "packages": installed_versions(PACKAGES),
            "cuda": torch.version.cuda,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "commit": _commit(),
            "catalog_hash": catalog.hash,
            "tools": sorted(f"{tool.server}/{tool.tool}" for tool in catalog.tools),
            "tasks": tasks,
        }
        (self.path / "versions.json").write_text(json.dumps(facts, indent=2) + "\n")

    def _write_tasks(self, name: str, rows: Dataset) -> dict[str, Any]:
        """Write the first tasks, and return how many there are, with a hash of all of them."""
        lines = [json.dumps(row, sort_keys=True, default=str, ensure_ascii=False) for row in rows]
        (self.path / "tasks").mkdir(exist_ok=True)
        (self.path / "tasks" / f"{name}.jsonl").write_text("".join(line + "\n" for line in lines[:MAX_TASKS]))
        return {
            "num_tasks": len(lines),
            "num_written": min(len(lines), MAX_TASKS),
            "sha256": hashlib.sha256("\n".join(lines).encode()).hexdigest(),
        }


def _commit() -> str | None:
    folder = Path(__file__).parent
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=False, timeout=10
    )
    return asked.stdout.strip() or None
