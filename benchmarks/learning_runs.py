"""What the benchmarks that train have in common: one warmed-up model per seed, each run a process of its own, none run twice."""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

GOAL = 0.9
WINDOW = 5  # updates that success is averaged over
SUCCESS = "rewards/exact_answer/mean"
BASE = "base"  # the model that runs start from, where there is only one for each seed

Way = tuple[str, ...]  # what tells the runs of a seed apart
Result = dict[str, Any]
MakeBase = Callable[[int, Path], None]  # makes the model of a seed, and saves it in a folder


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
    parser.add_argument("--stop-after", type=float, default=math.inf, help="seconds after which no run is begun")
    parser.add_argument("--table", action="store_true", help="only show what has been run")
    parser.add_argument("--base", nargs=2, metavar=("NAME", "SEED"), help="only warm a model up")
    parser.add_argument("--train", nargs=1 + len(way), metavar=("SEED", *way), help="only train one")
    return parser


def run(
    program: str,
    arguments: argparse.Namespace,
    ways: Sequence[Way],
    *,
    train: Callable[..., Result],
    report: Callable[[argparse.Namespace], None],
    bases: Mapping[str, MakeBase] | None = None,
    base_of: Callable[[Way], str] = lambda way: BASE,
    order: Callable[[int, Way], Any] = lambda seed, way: seed,
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
        bases (`Mapping[str, MakeBase]`, *optional*):
            What makes the models that runs start from, by name. If not given, one that is warmed up as the quickstart's.
        base_of (`Callable[[Way], str]`, *optional*):
            Name of the model that a way starts from.
        order (`Callable[[int, Way], Any]`, *optional*):
            What runs are sorted by, given a seed and a way. If not given, the seed.
    """
    folder: Path = arguments.output_dir
    if arguments.table:
        report(arguments)
    elif arguments.base is not None:
        name, seed = arguments.base
        (bases or {BASE: warm_up})[name](int(seed), base_path(folder, name, int(seed)))
    elif arguments.train is not None:
        seed, *way = arguments.train
        result = train(arguments, int(seed), *way)
        result_path(folder, int(seed), way).write_text(json.dumps(result))
    else:
        runs = sorted(((seed, way) for seed in arguments.seeds for way in ways), key=lambda each: order(*each))
        run_all(program, arguments, runs, base_of)
        report(arguments)


def run_all(
    program: str, arguments: argparse.Namespace, runs: Sequence[tuple[int, Way]], base_of: Callable[[Way], str]
) -> None:
    """Run what has not been run yet, several processes at a time, and before it the models that it starts from."""
    folder: Path = arguments.output_dir
    left = [(seed, way) for seed, way in runs if not result_path(folder, seed, way).exists()]
    needed = dict.fromkeys((base_of(way), seed) for seed, way in left)
    bases = [["--base", name, str(seed)] for name, seed in needed if not is_made(base_path(folder, name, seed))]
    trainings = [["--train", str(seed), *way] for seed, way in left]
    common = ["--output-dir", str(folder), "--max-steps", str(arguments.max_steps)]
    latest = time.monotonic() + arguments.stop_after
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for parts in (bases, trainings):
            begun = pool.map(lambda part: time.monotonic() >= latest or run_part(program, part, common), parts)
            if not all(list(begun)):
                raise SystemExit("Not all could be run: see above. What was run is kept, and shown by `--table`.")


def run_part(program: str, part: list[str], common: list[str]) -> bool:
    """Run one part, and show what it said if it failed; return whether it did not."""
    start = time.monotonic()
    command = [sys.executable, program, *part, *common]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = done.stdout[-2000:] + done.stderr[-4000:] if done.returncode else ""
    Console(width=200).print(f"{' '.join(part)}: {time.monotonic() - start:.0f} s", said, markup=False)
    return not done.returncode


def is_made(folder: Path) -> bool:
    """Whether a model was saved whole."""
    return (folder / "tokenizer.json").exists()


def base_path(folder: Path, name: str, seed: int) -> Path:
    """Where the model that the runs of a seed start from is, once it has been made."""
    return folder / f"{name}-{seed}"


def result_path(folder: Path, seed: int, way: Sequence[str]) -> Path:
    """Where the result of a run is, once it has been made."""
    return folder / f"{'-'.join(way)}-{seed}.json"


def results(arguments: argparse.Namespace, *way: str) -> list[Result]:
    """What came out of a way, for each seed that has been run."""
    paths = [result_path(arguments.output_dir, seed, way) for seed in arguments.seeds]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def warm_up(seed: int, folder: Path) -> None:
    """Make a model that calls tools, though not always the right ones, as the quickstart does."""
    import torch
    from quickstart import make_base_model

    torch.set_num_threads(1)
    make_base_model(quickstart_tasks().train, folder, seed)


def train_on_servers(
    arguments: argparse.Namespace,
    seed: int,
    way: Sequence[str],
    tasks: TaskSet,
    *,
    base: str = BASE,
    lora_r: int | None = None,
    **settings: Any,
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
        base (`str`, *optional*, defaults to `"base"`):
            Name of the model.
        lora_r (`int`, *optional*):
            Rank of the adapter. If not given, the quickstart's.
        settings (`Any`):
            Settings on top of the quickstart's.

    Returns:
        `Result`: `before` and `after` are success on held-out tasks, `history` what each update logged.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from quickstart import ADAPTER, SERVERS, make_config

    from mcp_grpo import MCPGRPOTrainer, summarize
    from mcp_grpo.tasks.columns import dataset_from_rows

    torch.set_num_threads(1)
    folder: Path = arguments.output_dir
    rank = lora_r or ADAPTER.r
    adapter = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=ADAPTER.target_modules)
    config = make_config(
        folder / "-".join((*way, str(seed))), seed, max_steps=arguments.max_steps, disable_tqdm=True, **settings
    )
    with MCPGRPOTrainer(
        str(base_path(folder, base, seed)),
        reward_funcs=tasks.reward_funcs,
        args=config,
        train_dataset=dataset_from_rows(
            tasks.train
        ),  # solutions as they are: Arrow would add arguments of other calls
        servers=SERVERS,
        peft_config=adapter,
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


def mean_success(result: Result) -> float:
    """Mean of success on training tasks over all updates."""
    return statistics.mean(entry[SUCCESS] for entry in result["history"])


def paired_gain(before: Sequence[Result], after: Sequence[Result], value: Callable[[Result], float]) -> str:
    """The mean gain from one way to another, seed by seed, with its 95 % interval over the seeds that both have."""
    from mcp_grpo.evaluation import mean_difference

    found = mean_difference(*({str(run["seed"]): [value(run)] for run in runs} for runs in (before, after)))
    return "too few seeds" if found is None else f"{found.mean:+.3f} ({found.low:+.3f} to {found.high:+.3f})"


def averaged(history: Sequence[Result]) -> list[float]:
    """Success over the last few updates, from the first time that there are as many."""
    success = [entry[SUCCESS] for entry in history]
    return [statistics.mean(success[last - WINDOW : last]) for last in range(WINDOW, len(success) + 1)]


def updates_to_goal(history: Sequence[Result]) -> float:
    """Updates until success, averaged, reached the goal; infinite if it did not."""
    reached = (update for update, success in enumerate(averaged(history), start=WINDOW) if success >= GOAL)
    return next(reached, float("inf"))
