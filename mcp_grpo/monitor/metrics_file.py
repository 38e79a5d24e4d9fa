"""What a run logs, in a file that needs nothing to be read."""

import json
import math
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


METRICS_FILE = "metrics.jsonl"


class MetricsFile(TrainerCallback):
    """
    Writes every figure that is logged to a file, one JSON object a line.

    A run that goes on from a checkpoint goes on in the file; what was logged after that checkpoint is replaced.

    Args:
        path (`Path`):
            The file. A run that starts anew begins it anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero or not self._path.exists():
            return
        lines = self._path.read_text().splitlines()
        kept = [line for line in lines if json.loads(line)["step"] <= state.global_step] if state.global_step else []
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
        figures = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in logs.items()}
        with self._path.open("a") as lines:
            lines.write(json.dumps({"step": state.global_step, **figures}, default=str) + "\n")
