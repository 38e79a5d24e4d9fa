"""What a run logs, in a file that needs nothing to be read."""

import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """
    Writes every metric that is logged to a file, one JSON object a line.

    A run that is resumed continues the file; what was logged after its checkpoint is replaced. A new run starts a new file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self._path.exists():
            return
        kept = [line for line in self._path.read_text().splitlines() if _is_before(line, state.global_step)]
        self._path.write_text("".join(line + "\n" for line in kept))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # JSON has no NaN.
        metrics = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
        with self._path.open("a") as lines:
            lines.write(json.dumps({"step": state.global_step, **metrics}, default=str) + "\n")


def _is_before(line: str, step: int) -> bool:
    """Return whether a line belongs to a run up to a checkpoint: not one that is broken off, nor the batch after it."""
    try:
        metrics = json.loads(line)
    except ValueError:
        return False
    is_of_next = any(name.startswith("batch/") for name in metrics)
    return step > 0 and (metrics["step"] < step or (metrics["step"] == step and not is_of_next))
