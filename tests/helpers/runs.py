"""Short training runs on the server of `servers/sums.py`, run in this process, where it starts at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from servers.sums import server

from helpers.sums import ROWS, TEMPLATE_KWARGS
from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, Task, Trajectory, exact_answer


IN_BF16 = [] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [pytest.mark.full]
"""Marks of a run in bf16, which takes minutes on a CPU that only imitates it."""


RELYING_AT_ONCE = {"mcp_grpo.learning.advantages.hybrid.WARMUP_BATCHES": 0}
"""Constants with which `advantage_mode="hybrid"` relies on the value head from the first batch on."""
BRIEF = {"max_completion_length": 200}
"""Enough for three turns of `adding_model`: one that has lost its way, which many a test makes it, goes on up to there."""
IMPATIENT = {"mcp_grpo.monitor.health.PATIENCE": 3}
"""Constants with which a sign of ill health counts sooner."""


def settings(folder: Path, **changes: Any) -> MCPGRPOConfig:
    """Those of a run of two steps, each with a group of eight."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": 8,
        "num_generations": 8,
        "max_completion_length": 400,
        "max_steps": 2,
        "max_turns": 3,
        "learning_rate": 1e-3,
        "on_unhealthy": "warn",  # many a test makes its batches up
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "chat_template_kwargs": TEMPLATE_KWARGS,
    }
    return MCPGRPOConfig(output_dir=str(folder), **{**defaults, **changes})


def make_trainer(
    folder: Path,
    model: Any,
    kind: type[MCPGRPOTrainer] = MCPGRPOTrainer,
    reward: Any = exact_answer,
    rows: Any = ROWS,
    eval_rows: Any = None,
    peft_config: Any = None,
    callbacks: Any = None,
    constants: dict[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A trainer that is ready to train, made with other constants of the library."""
    with pytest.MonkeyPatch.context() as patch:
        for place, value in (constants or {}).items():
            patch.setattr(place, value)
        return kind(
            model,
            reward,
            settings(folder, **changes),
            Dataset.from_list(rows),
            servers={"sums": server},
            eval_dataset=None if eval_rows is None else Dataset.from_list(eval_rows),
            peft_config=peft_config,
            callbacks=callbacks,
        )


class Attempting(MCPGRPOTrainer):
    """A trainer whose attempts a test may replace."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._collector
        self._own_attempt = self._collector.attempt
        self._collector.attempt = lambda tasks, **how: self.attempt(tasks, **how)

    def attempt(self, tasks: Sequence[Task], **how: Any) -> list[Trajectory]:
        return self._own_attempt(tasks, **how)


class OneByOne(Attempting):
    """Rolls out one trajectory at a time: which of them share a batch depends on the tools' timing, and rounding on that."""

    def attempt(self, tasks: Sequence[Task], **how: Any) -> list[Trajectory]:
        return [trajectory for task in tasks for trajectory in super(OneByOne, self).attempt([task], **how)]
