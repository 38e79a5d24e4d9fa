"""
Ask what it costs to record every trajectory, as a share of a training step.

    python benchmarks/recording.py [--steps 6]

The quickstart's model trains on its two real servers. Counted is the processor time that recording takes on the training
thread and on its own, beside the wall-clock time of the same steps. Exits with 1 if both together are more than 2 %. A minute
on two quiet cores; nothing is downloaded.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

import quickstart  # sets how threads wait, before it loads torch
from datasets import Dataset
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOTrainer, exact_answer
from mcp_grpo.monitor import TrajectoryRecorder
from mcp_grpo.monitor.recorder import FOLDER
from mcp_grpo.quickstart.tasks import build_tasks


MAX_SHARE = 0.02
spent = {"training thread": 0.0, "its own thread": 0.0}


def timed(function: Callable[..., Any], where: str) -> Callable[..., Any]:
    """Add the processor time of a method to what is spent."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        start = time.thread_time()
        try:
            return function(*args, **kwargs)
        finally:
            spent[where] += time.thread_time() - start

    return call


class Steps(TrainerCallback):
    """Notes how long steps take."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.start = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds.append(time.monotonic() - self.start)


def main() -> None:
    """Train, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="steps to train (default: %(default)s)")
    arguments = parser.parse_args()
    for name in ("begin", "add_pass", "end"):
        setattr(TrajectoryRecorder, name, timed(getattr(TrajectoryRecorder, name), "training thread"))
    TrajectoryRecorder._write = timed(TrajectoryRecorder._write, "its own thread")
    rows, _ = build_tasks()
    steps = Steps()
    with tempfile.TemporaryDirectory() as folder:
        config = quickstart.make_config(Path(folder), seed=0, max_steps=arguments.steps, disable_tqdm=True)
        with MCPGRPOTrainer(
            str(quickstart.WARM_START),
            reward_funcs=exact_answer,
            args=config,
            train_dataset=Dataset.from_list(rows),
            servers=quickstart.SERVERS,
            peft_config=quickstart.ADAPTER,
            callbacks=[steps],
        ) as trainer:
            trainer.train()
        sizes = [path.stat().st_size for path in (Path(folder) / FOLDER).glob("*.parquet")]
    assert len(sizes) == arguments.steps, "Not every batch was recorded."
    total = sum(steps.seconds)
    table = Table(title=f"Recording, over {arguments.steps} steps of {median(steps.seconds):.2f} s (median)")
    for column in ("", "processor seconds a step", "share of a step"):
        table.add_column(column)
    for where, seconds in spent.items():
        table.add_row(where, f"{seconds / arguments.steps:.4f}", f"{seconds / total:.2%}")
    Console().print(table)
    Console().print(f"{median(sizes) / 1e6:.2f} MB a step, {config.generation_batch_size} trajectories.")
    if (share := sum(spent.values()) / total) > MAX_SHARE:
        sys.exit(f"Recording took {share:.1%} of a step, more than {MAX_SHARE:.0%}.")


if __name__ == "__main__":
    main()
