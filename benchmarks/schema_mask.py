"""
Ask whether the schema mask helps: the quickstart's model and tasks, without a mask, with a hard one, and with the default one.

    python benchmarks/schema_mask.py [--seeds 0 1 2 3 4] [--jobs 2] [--output-dir outputs/schema_mask]

For each seed one model is warmed up, and every way of masking starts from it, with the same tasks and the same settings. The table
has the updates until success on the training tasks, averaged over five updates, reached 0.9; held-out success at the end; and the
share of calls that could not be read or made, in the first ten updates and in the last ten. It takes about six minutes of one
core for each seed and way.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))

MASKS: dict[str, dict[str, Any]] = {
    "off": {"schema_mask": "off"},
    "hard": {
        "schema_mask": "syntax",
        "schema_mask_min_prob": 0.0,
        "min_unforced_tokens": 0,
        "min_unforced_fraction": 0.0,
    },
    "default": {"schema_mask": "syntax"},
}
GOAL = 0.9
WINDOW = 5  # updates that success is averaged over


def main() -> None:
    """Run all, or one part of it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/schema_mask"))
    parser.add_argument("--base", type=int, metavar="SEED", help="only warm a model up")
    parser.add_argument("--train", nargs=2, metavar=("SEED", "MASK"), help="only train one")
    arguments = parser.parse_args()
    if arguments.base is not None:
        warm_up(arguments.base, arguments.output_dir)
    elif arguments.train is not None:
        seed, mask = arguments.train
        train(int(seed), mask, arguments.output_dir, arguments.max_steps)
    else:
        run_all(arguments)
        report(arguments.output_dir, arguments.seeds, arguments.masks)


def run_all(arguments: argparse.Namespace) -> None:
    """Run what has not been run yet, several processes at a time."""
    folder: Path = arguments.output_dir
    bases = [["--base", str(seed)] for seed in arguments.seeds if not is_made(folder / f"base-{seed}")]
    runs = [
        ["--train", str(seed), mask]
        for seed in arguments.seeds
        for mask in arguments.masks
        if not (folder / f"{mask}-{seed}.json").exists()
    ]
    common = ["--output-dir", str(folder), "--max-steps", str(arguments.max_steps)]
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for parts in (bases, runs):
            list(pool.map(lambda part: run_part([*part, *common]), parts))


def run_part(part: list[str]) -> None:
    """Run one part, and show what it said if it failed."""
    start = time.monotonic()
    done = subprocess.run([sys.executable, __file__, *part], capture_output=True, text=True, check=False)
    Console().print(f"{' '.join(part[:3])}: {time.monotonic() - start:.0f} s")
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])


def is_made(folder: Path) -> bool:
    """Whether a model was saved whole."""
    return (folder / "tokenizer.json").exists()


def warm_up(seed: int, folder: Path) -> None:
    """Make the model that all runs of a seed start from."""
    import torch
    from quickstart import make_base_model
    from quickstart_world.tasks import build_tasks

    torch.set_num_threads(1)
    train_rows, _ = build_tasks()
    make_base_model(train_rows, folder / f"base-{seed}", seed)


def train(seed: int, mask: str, folder: Path, max_steps: int) -> None:
    """Train once, and write down what was logged."""
    import torch
    from datasets import Dataset
    from quickstart import ADAPTER, SERVERS, make_config
    from quickstart_world.tasks import build_tasks

    from mcp_grpo import MCPGRPOTrainer, evaluate, exact_answer, fault_penalty

    torch.set_num_threads(1)
    train_rows, held_out_rows = build_tasks()
    config = make_config(folder / f"{mask}-{seed}", seed, max_steps=max_steps, disable_tqdm=True, **MASKS[mask])
    with MCPGRPOTrainer(
        str(folder / f"base-{seed}"),
        reward_funcs=[exact_answer, fault_penalty],
        args=config,
        train_dataset=Dataset.from_list(train_rows),
        servers=SERVERS,
        peft_config=ADAPTER,
    ) as trainer:
        held_out = Dataset.from_list(held_out_rows)
        before = evaluate(trainer.roll_out(held_out, num_generations=2)).success
        trainer.train()
        after = evaluate(trainer.roll_out(held_out, num_generations=2)).success
    history = [entry for entry in trainer.state.log_history if "rewards/exact_answer/mean" in entry]
    result = {"seed": seed, "mask": mask, "before": before, "after": after, "history": history}
    (folder / f"{mask}-{seed}.json").write_text(json.dumps(result))


def report(folder: Path, seeds: list[int], masks: list[str]) -> None:
    """Print the table."""
    table = Table(title=f"Schema mask: {len(seeds)} seeds each; median (all)")
    for column in (
        "",
        "updates to 0.9",
        "held out before",
        "held out after",
        "bad calls, first 10",
        "last 10",
        "masked",
    ):
        table.add_column(column)
    for mask in masks:
        runs = [json.loads((folder / f"{mask}-{seed}.json").read_text()) for seed in seeds]
        table.add_row(
            mask,
            shown([updates_to_goal(run["history"]) for run in runs], "{:.0f}"),
            shown([run["before"] for run in runs], "{:.2f}"),
            shown([run["after"] for run in runs], "{:.2f}"),
            shown([bad_calls(run["history"][:10]) for run in runs], "{:.3f}"),
            shown([bad_calls(run["history"][-10:]) for run in runs], "{:.3f}"),
            shown(
                [statistics.mean(e.get("mask/masked_fraction", 0.0) for e in run["history"]) for run in runs], "{:.2f}"
            ),
        )
    Console(width=160).print(table)


def shown(values: list[float], form: str) -> str:
    """The median, and all of them."""
    return f"{form.format(statistics.median(values))} ({', '.join(form.format(value) for value in values)})"


def updates_to_goal(history: list[dict[str, Any]]) -> float:
    """Updates until success, averaged, reached the goal; infinite if it did not."""
    success = [entry["rewards/exact_answer/mean"] for entry in history]
    for last in range(WINDOW, len(success) + 1):
        if statistics.mean(success[last - WINDOW : last]) >= GOAL:
            return last
    return float("inf")


def bad_calls(history: list[dict[str, Any]]) -> float:
    """Share of calls that could not be read or made."""
    return statistics.mean(1 - entry["tools/valid_rate"] for entry in history)


if __name__ == "__main__":
    main()
