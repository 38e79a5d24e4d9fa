"""
Time the dashboard with many recorded trajectories: list, filter and open, against reading every file whole.

    python benchmarks/dashboard.py [--trajectories 100000] [--tokens 400]

The recording is made up, in a temporary folder.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mcp_grpo.dashboard import trajectories as dashboard
from mcp_grpo.dashboard.trajectories import Filter, TrajectoryIndex
from mcp_grpo.monitor.recorder import SCHEMA


BATCH = 64
TOOLS = ("find_person", "get_manager", "get_desk", "get_phone")


def main() -> None:
    """Make a recording, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=400, help="of each trajectory")
    arguments = parser.parse_args()
    dashboard.READ_SECONDS = float("inf")  # the page shows what was read so far; here all of it is to be there
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        num_files = write(folder, arguments.trajectories, arguments.tokens)
        size = sum(path.stat().st_size for path in folder.iterdir()) / 2**20
        say(f"{num_files * BATCH} trajectories of {arguments.tokens} tokens in {num_files} files, {size:.0f} MiB")
        whole = timed("read every file whole", lambda: [len(pq.read_table(path)) for path in folder.iterdir()])
        index = TrajectoryIndex(folder)
        last = num_files - 1
        cases: dict[str, Callable[[], Any]] = {
            "first list, which reads the small columns": lambda: index.find(Filter()),
            "list again": lambda: index.find(Filter()),
            "filter by reward, tool and stop reason": lambda: index.find(
                Filter(min_reward=0.5, tool="get_desk", stop_reason="answered"), sort="-reward"
            ),
            "filter by part of a task's id": lambda: index.find(Filter(task="task-17")),
            "open one with its tokens": lambda: index.open(last // 2, 0, 17),
            "the group of one task": lambda: index.group(last, f"task-{last % 500}-0"),
            "one task from step to step": lambda: index.history("task-17-0"),
        }
        for words, case in cases.items():
            timed(words, case, whole)


def timed(words: str, case: Callable[[], Any], whole: float | None = None) -> float:
    """Print how long something takes, and how many times longer all takes."""
    start = time.perf_counter()
    case()
    seconds = time.perf_counter() - start
    say(f"{words:45} {1000 * seconds:10.1f} ms" + ("" if whole is None else f"   1/{whole / seconds:.0f}"))
    return seconds


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def write(folder: Path, num: int, num_tokens: int) -> int:
    """Write a recording, and return how many files it has."""
    random = np.random.default_rng(0)
    num_files = -(-num // BATCH)
    numbers = random.normal(size=(BATCH, num_tokens)).astype(np.float32)
    tokens: dict[str, Any] = {name: list(numbers) for name in ("sampler_logp", "trainer_logp", "advantage", "value")}
    tokens |= {name: list(random.integers(0, 30_000, (BATCH, num_tokens))) for name in ("prompt_ids", "token_ids")}
    tokens |= {"turn": [np.zeros(num_tokens, np.int16)] * BATCH, "in_loss": [np.ones(num_tokens, bool)] * BATCH}
    tokens |= {"token_bytes": [np.full(num_tokens, 4)] * BATCH, "token_text": [b"word" * num_tokens] * BATCH}
    tokens["role"] = [["choice"] * num_tokens] * BATCH
    # What takes long to convert is the same in every file.
    same = {name: pa.array(values, SCHEMA.field(name).type) for name, values in tokens.items()}
    for step in range(num_files):
        rewards = random.choice([0.0, 1.0], BATCH)
        plain = [
            {
                "step": step,
                "rank": 0,
                "row": row,
                "task_id": f"task-{step % 500}-{row // 8}",
                "family": f"family-{row // 8}",
                "prompt": '[{"role": "user", "content": "Where does she sit?"}]',
                "messages": '[{"role": "assistant", "content": "At desk 7."}]',
                "calls": [
                    {"turn": turn, "name": TOOLS[(row + turn) % 4], "kind": "ok", "seconds": 0.1, "text": "E1234" * 20}
                    for turn in range(3)
                ],
                "answer": "7",
                "stop_reason": "answered" if row % 5 else "max_turns",
                "is_learnt_from": True,
                "seconds": 1.0 + row,
                "rewards": [("exact_answer", rewards[row]), ("fault_penalty", 0.0)],
            }
            for row in range(BATCH)
        ]
        names = [field for field in SCHEMA if field.name not in same]
        table = pa.Table.from_pylist(plain, schema=pa.schema(names))
        arrays = [same[field.name] if field.name in same else table.column(field.name) for field in SCHEMA]
        path = folder / f"step-{step:06d}-rank-0.parquet"
        pq.write_table(pa.Table.from_arrays(arrays, schema=SCHEMA), path, compression="zstd")
    return num_files


if __name__ == "__main__":
    main()
