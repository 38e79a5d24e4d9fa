"""
Ask what it costs to learn from trajectories of older policies, and what it saves.

    python benchmarks/staleness.py [--seeds 0 1 2] [--bounds 0 1 3] [--max-steps 30] [--latency 0.45]
        [--output-dir outputs/staleness]

The quickstart's model learns the quickstart's tasks on its two real servers, with vLLM in process, an update for 64 attempts at eight tasks.
Every answer of a server comes late: 0.45 s on average with a heavy tail, and one in a hundred after 10 s (`late.py`). Runs differ only
in `max_staleness`. The table has the seconds of training, the seconds until success on training tasks, averaged over five updates, reached
the goal, the mean success over all updates, how stale the trajectories were, and success on held-out tasks before and after.

Each run is a process of its own, one after another; those that are finished are not repeated. vLLM is needed, a GPU is not.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from datasets import Dataset
from learning_runs import GOAL, SUCCESS, WINDOW, averaged, mean_success, quickstart_tasks, run_part, shown
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback


LATE = Path(__file__).with_name("late.py")
ENGINE = {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 128 << 20}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask what older policies cost and save.")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 3], help="values of `max_staleness`")
    parser.add_argument("--max-steps", type=int, default=30)
    parser.add_argument("--latency", type=float, default=0.45, help="seconds of a call, on average")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/staleness"))
    parser.add_argument("--train", type=int, nargs=2, metavar=("SEED", "BOUND"), help="only train one")
    return parser.parse_args()


def result_path(folder: Path, seed: int, bound: int) -> Path:
    """Where the result of a run is, once it has been made."""
    return folder / f"{bound}-{seed}.json"


class Clock(TrainerCallback):
    """Seconds from the beginning of training to the end of each update."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._start = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self.seconds.append(time.monotonic() - self._start)


def train(arguments: argparse.Namespace, seed: int, bound: int) -> dict[str, Any]:
    """Train once, and judge before and after."""
    import torch
    from quickstart import ADAPTER, SERVERS, make_config

    from mcp_grpo import MCPGRPOTrainer, summarize
    from mcp_grpo.quickstart.warm_start import WARM_START

    torch.set_num_threads(1)
    tasks, clock = quickstart_tasks(), Clock()
    config = make_config(
        arguments.output_dir / f"run-{bound}-{seed}",
        seed,
        max_steps=arguments.max_steps,
        disable_tqdm=True,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_max_model_length=1024,
        vllm_engine_kwargs=ENGINE,
        max_staleness=bound,
    )
    servers = {
        name: {"command": sys.executable, "args": [str(LATE), str(arguments.latency), each["command"], *each["args"]]}
        for name, each in SERVERS["mcpServers"].items()
    }
    with MCPGRPOTrainer(
        str(WARM_START),
        reward_funcs=tasks.reward_funcs,
        args=config,
        train_dataset=Dataset.from_list(tasks.train),
        servers=servers,
        peft_config=ADAPTER,
        callbacks=[clock],
    ) as trainer:
        held_out = Dataset.from_list(tasks.held_out)
        before = summarize(trainer.roll_out(held_out, num_generations=2)).success
        trainer.train()
        after = summarize(trainer.roll_out(held_out, num_generations=2)).success
        history = [entry for entry in trainer.state.log_history if SUCCESS in entry]
    return {"seed": seed, "before": before, "after": after, "seconds": clock.seconds, "history": history}


def seconds_to_goal(result: dict[str, Any]) -> float:
    """Seconds of training until success, averaged, reached the goal; infinite if it did not."""
    reached = (
        result["seconds"][update - 1]
        for update, success in enumerate(averaged(result["history"]), start=WINDOW)
        if success >= GOAL
    )
    return next(reached, float("inf"))


def report(arguments: argparse.Namespace) -> None:
    """Show what came out."""
    names = ("seconds", f"seconds to {GOAL:.0%}", "success over all updates", "staleness", "before", "after")
    table = Table("max_staleness", *names, title=f"{arguments.max_steps} updates, calls of {arguments.latency} s")
    for bound in arguments.bounds:
        paths = [result_path(arguments.output_dir, seed, bound) for seed in arguments.seeds]
        found = [json.loads(path.read_text()) for path in paths if path.exists()]
        if not found:
            continue
        stale = [statistics.mean(entry.get("rollout/staleness", 0.0) for entry in run["history"]) for run in found]
        table.add_row(
            str(bound),
            shown([run["seconds"][-1] for run in found], "{:.0f}"),
            shown([seconds_to_goal(run) for run in found], "{:.0f}"),
            shown([mean_success(run) for run in found], "{:.3f}"),
            shown(stale, "{:.2f}"),
            shown([run["before"] for run in found], "{:.3f}"),
            shown([run["after"] for run in found], "{:.3f}"),
        )
    Console(width=200).print(table)


def main(arguments: argparse.Namespace) -> None:
    """Run what has not been run yet, and show all."""
    folder: Path = arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    if arguments.train is not None:
        seed, bound = arguments.train
        result_path(folder, seed, bound).write_text(json.dumps(train(arguments, seed, bound)))
        return
    common = [
        "--output-dir",
        str(folder),
        "--max-steps",
        str(arguments.max_steps),
        "--latency",
        str(arguments.latency),
    ]
    for seed in arguments.seeds:
        for bound in arguments.bounds:
            if not result_path(folder, seed, bound).exists():
                run_part(__file__, ["--train", str(seed), str(bound)], common)
    report(arguments)


if __name__ == "__main__":
    main(parse_arguments())
