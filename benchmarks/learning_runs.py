"""What the benchmarks that train have in common: one warmed-up model per seed, each run a process of its own, none run twice."""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

GOAL = 0.9
WINDOW = 5  # updates that success is averaged over
SUCCESS = "rewards/exact_answer/mean"

Way = tuple[str, ...]  # what tells the runs of a seed apart
Result = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class TaskSet:
    """
    What is trained on, and judged by.

    Args:
        train (`list[dict[str, Any]]`):
            Rows to train on.
        held_out (`list[dict[str, Any]]`):
            Rows to judge by.
        reward_funcs (`list[Callable[..., Any]]`):
            Reward functions; the first is success.
    """

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    reward_funcs: list[Callable[..., Any]]


def quickstart_tasks() -> TaskSet:
    """The tasks and the rewards of the quickstart."""
    from mcp_grpo import exact_answer, fault_penalty
    from mcp_grpo.quickstart.tasks import build_tasks

    train_rows, held_out_rows = build_tasks()
    return TaskSet(train=train_rows, held_out=held_out_rows, reward_funcs=[exact_answer, fault_penalty])


def make_parser(
    description: str | None, *, way: Sequence[str], output_dir: str, max_steps: int
) -> argparse.ArgumentParser:
    """
    The arguments that all of these benchmarks take.

    Args:
        description (`str`, *optional*):
            What the benchmark asks.
        way (`Sequence[str]`):
            Names of what tells the runs of a seed apart.
        output_dir (`str`):
            Where models and results go.
        max_steps (`int`):
            Updates of a run.

    Returns:
        `argparse.ArgumentParser`: The parser, to add others to.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--max-steps", type=int, default=max_steps, help="updates of a run that is yet to be made")
    parser.add_argument("--output-dir", type=Path, default=Path(output_dir))
    parser.add_argument("--base", type=int, metavar="SEED", help="only warm a model up")
    parser.add_argument("--train", nargs=1 + len(way), metavar=("SEED", *way), help="only train one")
    return parser


def run(
    program: str,
    arguments: argparse.Namespace,
    ways: Sequence[Way],
    *,
    train: Callable[..., Result],
    report: Callable[[argparse.Namespace], None],
) -> None:
    """
    Run all, or one part of it in a process of its own.

    Args:
        program (`str`):
            The benchmark's file.
        arguments (`argparse.Namespace`):
            From [`make_parser`].
        ways (`Sequence[Way]`):
            The runs of each seed.
        train (`Callable[..., Result]`):
            Makes one run, given the arguments, a seed and a way.
        report (`Callable[[argparse.Namespace], None]`):
            Shows what came out.
    """
    folder: Path = arguments.output_dir
    if arguments.base is not None:
        warm_up(arguments.base, folder)
    elif arguments.train is not None:
        seed, *way = arguments.train
        result = train(arguments, int(seed), *way)
        result_path(folder, int(seed), way).write_text(json.dumps(result))
    else:
        run_all(program, arguments, ways)
        report(arguments)


def run_all(program: str, arguments: argparse.Namespace, ways: Sequence[Way]) -> None:
    """Run what has not been run yet, several processes at a time."""
    folder: Path = arguments.output_dir
    bases = [["--base", str(seed)] for seed in arguments.seeds if not is_made(folder / f"base-{seed}")]
    runs = [
        ["--train", str(seed), *way]
        for seed in arguments.seeds
        for way in ways
        if not result_path(folder, seed, way).exists()
    ]
    common = ["--output-dir", str(folder), "--max-steps", str(arguments.max_steps)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for parts in (bases, runs):
            list(pool.map(lambda part: run_part(program, part, common), parts))


def run_part(program: str, part: list[str], common: list[str]) -> None:
    """Run one part, and show what it said if it failed."""
    start = time.monotonic()
    command = [sys.executable, program, *part, *common]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    Console().print(f"{' '.join(part)}: {time.monotonic() - start:.0f} s")
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def is_made(folder: Path) -> bool:
    """Whether a model was saved whole."""
    return (folder / "tokenizer.json").exists()


def result_path(folder: Path, seed: int, way: Sequence[str]) -> Path:
    """Where the result of a run is, once it has been made."""
    return folder / f"{'-'.join(way)}-{seed}.json"


def results(arguments: argparse.Namespace, *way: str) -> list[Result]:
    """What came out of a way, for each seed."""
    return [json.loads(result_path(arguments.output_dir, seed, way).read_text()) for seed in arguments.seeds]


def warm_up(seed: int, folder: Path) -> None:
    """Make the model that all runs of a seed start from."""
    import torch
    from quickstart import make_base_model

    torch.set_num_threads(1)
    make_base_model(quickstart_tasks().train, folder / f"base-{seed}", seed)


def train_on_servers(
    arguments: argparse.Namespace, seed: int, way: Sequence[str], tasks: TaskSet, **settings: Any
) -> Result:
    """
    Train the model of a seed with [`MCPGRPOTrainer`].

    Args:
        arguments (`argparse.Namespace`):
            From [`make_parser`].
        seed (`int`):
            Which model, and the seed of the training.
        way (`Sequence[str]`):
            What tells this run from the others of the seed.
        tasks ([`TaskSet`]):
            What to train on.
        settings (`Any`):
            Settings on top of the quickstart's.

    Returns:
        `Result`: `before` and `after` are success on held-out tasks, `history` what each update logged.
    """
    import torch
    from datasets import Dataset
    from quickstart import ADAPTER, SERVERS, make_config

    from mcp_grpo import MCPGRPOTrainer, summarize

    torch.set_num_threads(1)
    folder: Path = arguments.output_dir
    config = make_config(
        folder / "-".join((*way, str(seed))), seed, max_steps=arguments.max_steps, disable_tqdm=True, **settings
    )
    with MCPGRPOTrainer(
        str(folder / f"base-{seed}"),
        reward_funcs=tasks.reward_funcs,
        args=config,
        train_dataset=Dataset.from_list(tasks.train),
        servers=SERVERS,
        peft_config=ADAPTER,
    ) as trainer:
        held_out = Dataset.from_list(tasks.held_out)
        return train_and_judge(trainer, lambda: summarize(trainer.roll_out(held_out, num_generations=2)).success, seed)


def train_and_judge(trainer: Any, success: Callable[[], float], seed: int) -> Result:
    """Train, with a look at held-out tasks before and after."""
    before, start = success(), time.monotonic()
    trainer.train()
    seconds = time.monotonic() - start
    return {
        "seed": seed,
        "before": before,
        "after": success(),
        "seconds": seconds,
        "cpu_seconds": time.process_time(),
        "history": [entry for entry in trainer.state.log_history if SUCCESS in entry],
    }


def shown(values: Sequence[float], form: str) -> str:
    """The median, and all of them."""
    return f"{form.format(statistics.median(values))} ({', '.join(form.format(value) for value in values)})"


def averaged(history: Sequence[Result]) -> list[float]:
    """Success over the last few updates, from the first time that there are as many."""
    success = [entry[SUCCESS] for entry in history]
    return [statistics.mean(success[last - WINDOW : last]) for last in range(WINDOW, len(success) + 1)]


def updates_to_goal(history: Sequence[Result]) -> float:
    """Updates until success, averaged, reached the goal; infinite if it did not."""
    reached = (update for update, success in enumerate(averaged(history), start=WINDOW) if success >= GOAL)
    return next(reached, float("inf"))
