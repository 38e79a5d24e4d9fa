"""A run in short, in a file beside what it logs: how far it goes, its bounds, what it chose, and what was found wrong."""

import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mcp_grpo.monitor.health import HealthNote


RUN_FILE = "run.json"
SETTINGS = (
    "learning_rate",
    "num_generations",
    "num_iterations",
    "loss_type",
    "advantage_mode",
    "schema_mask",
    "beta",
    "kl_target",
    "kl_hard_cap",
    "ratio_gate",
    "temperature",
    "seed",
)

logger = logging.getLogger(__name__)


class RunFile(TrainerCallback):
    """Keeps `run.json` of a run's folder up to date. Where it cannot be written, the run goes on without it."""

    def __init__(
        self,
        path: Path,
        clip_limits: Sequence[float],
        notes: Callable[[], Sequence[HealthNote]],
        *,
        is_main: bool = True,
    ) -> None:
        self._path, self._notes, self._is_main = path, notes, is_main
        self._content: dict[str, Any] = {"state": "running", "clip_limits": list(clip_limits)}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._content |= {"state": "running", "max_steps": state.max_steps}
        self._content["settings"] = {name: getattr(args, name, None) for name in SETTINGS}
        self.write()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._content["state"] = "ended"
        self.write()

    def note(self, chosen: Mapping[str, str]) -> None:
        """Note what the run has chosen by itself, and why, by what it is about."""
        self._content["chosen"] = dict(chosen)
        self.write()

    def write(self) -> None:
        """Write the run as it is now; a reader sees the file whole, or the one before it."""
        if not self._is_main:
            return
        content = self._content | {"health": [asdict(note) for note in self._notes()]}
        draft = self._path.with_suffix(".json.part")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            draft.write_text(json.dumps(content, indent=2, default=str) + "\n")
            os.replace(draft, self._path)
        except OSError as error:
            logger.warning("%s could not be written (%s). Training goes on.", self._path, error)
