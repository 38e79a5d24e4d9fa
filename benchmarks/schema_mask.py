"""
Ask whether the schema mask helps: the quickstart's model and tasks, without a mask, with a hard one, and with the default one.

    python benchmarks/schema_mask.py [--seeds 0 1 2 3 4] [--jobs 2] [--output-dir outputs/schema_mask]

For each seed one model is warmed up, and every way of masking starts from it, with the same tasks and the same settings. The table
has the updates until success on the training tasks, averaged over five updates, reached 0.9; held-out success at the end; and the
share of calls that could not be read or made, in the first ten updates and in the last ten. It takes about six minutes of one
core for each seed and way.
"""

import argparse
import statistics
from typing import Any

from learning_runs import Result, make_parser, quickstart_tasks, results, run, shown, train_on_servers, updates_to_goal
from rich.console import Console
from rich.table import Table


MASKS: dict[str, dict[str, Any]] = {
    "off": {"schema_mask": "off"},
    "hard": {
        "schema_mask": "syntax",
        "schema_mask_min_prob": 0.0,
        "min_unforced_fraction": 0.0,
    },
    "default": {"schema_mask": "syntax"},
}


def main() -> None:
    """Run all, or one part of it in a process of its own."""
    parser = make_parser(__doc__, way=["MASK"], output_dir="outputs/schema_mask", max_steps=60)
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    arguments = parser.parse_args()
    run(__file__, arguments, [(mask,) for mask in arguments.masks], train=train, report=report)


def train(arguments: argparse.Namespace, seed: int, mask: str) -> Result:
    """Train once."""
    return {"mask": mask, **train_on_servers(arguments, seed, [mask], quickstart_tasks(), **MASKS[mask])}


def report(arguments: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title=f"Schema mask: {len(arguments.seeds)} seeds each; median (all)")
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
    for mask in arguments.masks:
        if not (runs := results(arguments, mask)):
            continue
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


def bad_calls(history: list[Result]) -> float:
    """Share of calls that could not be read or made."""
    return statistics.mean(1 - entry["tools/valid_rate"] for entry in history)


if __name__ == "__main__":
    main()
