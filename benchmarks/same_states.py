"""
Count how many turns of a run begin where others of the same group begin, too: what a baseline over identical states would have.

    python benchmarks/same_states.py RUN [--steps 10]

RUN is the folder of a run that recorded its trajectories (`record_trajectories`). A turn's state is all tokens before it; attempts of
a group share the first turn's, so that only later turns are counted. A baseline needs two peers or more, and rewards that differ among them.
Scripted solutions are left out. Nothing is trained.
"""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.table import Table


MIN_STATES = 3  # a turn and two peers
COLUMNS = ["task_id", "token_ids", "turn", "is_scripted", "rewards"]

State = tuple[int, tuple[int, ...]]


def states_of(row: Mapping[str, Any]) -> Iterable[State]:
    """Yield the number of each turn after the first, with all tokens before it."""
    turns = [-1, *row["turn"]]  # -1: a token that the policy did not write
    for place, (before, here) in enumerate(pairwise(turns)):
        if here > 0 and here != before:
            yield here, tuple(row["token_ids"][:place])


def peers_of(rows: Iterable[Mapping[str, Any]]) -> list[tuple[int, list[float]]]:
    """Return the turn of each state of a batch and the rewards of the attempts that were in it."""
    found = defaultdict[tuple[str, State], list[float]](list)
    for row in rows:
        if not row["is_scripted"]:
            for state in states_of(row):
                found[row["task_id"], state].append(sum(dict(row["rewards"]).values()))
    return [(turn, rewards) for (_, (turn, _)), rewards in found.items()]


def share(counted: Sequence[int], total: int) -> str:
    """Return a share as text."""
    return f"{sum(counted) / total:.1%}" if total else "none"


def main() -> None:
    """Count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=10, help="batches to look at")
    arguments = parser.parse_args()
    files = islice(sorted((arguments.run / "trajectories").glob("step-*.parquet")), arguments.steps)
    states = [state for file in files for state in peers_of(pq.read_table(file, columns=COLUMNS).to_pylist())]
    if not states:
        parser.error(f"{arguments.run} has no recorded trajectories with a second turn.")
    table = Table(title=f"Turns after the first, {arguments.steps} batches at most")
    for column in ("turn", "number", "with two peers or more", "and rewards that differ"):
        table.add_column(column)
    last = max(turn for turn, _ in states)
    for name, turns in [("all", range(1, last + 1)), *((str(turn + 1), [turn]) for turn in range(1, last + 1))]:
        here = [rewards for turn, rewards in states if turn in turns]
        total = sum(map(len, here))
        joined = [rewards for rewards in here if len(rewards) >= MIN_STATES]
        mixed = [rewards for rewards in joined if len(set(rewards)) > 1]
        table.add_row(name, str(total), share([*map(len, joined)], total), share([*map(len, mixed)], total))
    Console().print(table)


if __name__ == "__main__":
    main()
