"""Folders of runs as a training leaves them, made by hand: metrics, `run.json`, and recorded trajectories."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mcp_grpo.monitor.recorder import SCHEMA


def call(
    name: str = "add", *, turn: int = 0, kind: str = "ok", text: str = "5", arguments: Any = None
) -> dict[str, Any]:
    """Return a call as it is recorded."""
    found = {"turn": turn, "name": name, "arguments": json.dumps(arguments or {"a": 2, "b": 3}), "kind": kind}
    return found | {"server": "sums", "seconds": 0.25, "attempts": 1, "text": text}


def attempt(
    step: int = 0,
    row: int = 0,
    *,
    task_id: str = "sum-1",
    family: str | None = "sums",
    rewards: Mapping[str, float] | None = None,
    calls: Sequence[Mapping[str, Any]] = (),
    answer: str | None = "5",
    stop_reason: str = "answered",
    prompt: str = "What is 2 + 3?",
    tokens: Sequence[bytes] = (b"<call>", b" add", b"<end>", b"\n5\n", b"It", b" is 5"),
    turns: Sequence[int] = (0, 0, 0, -1, 1, 1),
    **changes: Any,
) -> dict[str, Any]:
    """Return a trajectory as it is recorded: a call, its result and an answer, if nothing else is said."""
    calls = calls or [call()]
    numbers = [math.nan if turn < 0 else -0.1 * (place + 1) for place, turn in enumerate(turns)]
    found = {
        "step": step,
        "rank": 0,
        "row": row,
        "task_id": task_id,
        "family": family,
        "difficulty": "easy",
        "prompt": json.dumps([{"role": "user", "content": prompt}]),
        "messages": json.dumps(
            [
                {"role": "assistant", "content": "I add."},
                {"role": "tool", "name": "add", "content": "5"},
                {"role": "assistant", "content": answer or ""},
            ]
        ),
        "calls": calls,
        "answer": answer,
        "states": "{}",
        "stop_reason": stop_reason,
        "error": None,
        "is_learnt_from": True,
        "seconds": 1.0 + row,
        "queue_seconds": 0.0,
        "staleness": 0,
        "generation_seconds": [0.5, 0.25],
        "tool_seconds": [0.25, 0.0],
        "rewards": list(({"exact": 1.0} if rewards is None else rewards).items()),
        "prompt_ids": [1, 2, 3],
        "token_ids": list(range(len(tokens))),
        "token_text": b"".join(tokens),
        "token_bytes": [len(token) for token in tokens],
        "turn": list(turns),
        "role": ["environment" if turn < 0 else "choice" for turn in turns],
        "in_loss": [turn >= 0 for turn in turns],
        "sampler_logp": [0.0 if math.isnan(number) else number for number in numbers],
        "trainer_logp": [0.5 * number for number in numbers],
        "advantage": [math.nan if turn < 0 else 0.5 - turn for turn in turns],
        "value": [0.25 if turn >= 0 else math.nan for turn in turns],
    }
    return found | changes


def write_batch(folder: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write the trajectories of one batch, as the recorder does."""
    path = folder / "trajectories" / f"step-{rows[0]['step']:06d}-rank-{rows[0]['rank']}.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(list(rows), schema=SCHEMA), draft, compression="zstd")
    return draft.replace(path)


def write_metrics(folder: Path, *rows: Mapping[str, Any]) -> None:
    """Add lines to the metrics of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_about(folder: Path, **changes: Any) -> None:
    """Write what a run says about itself."""
    settings = {"beta": 0.05, "kl_target": 0.4, "kl_hard_cap": 3.0, "ratio_gate": 4.0}
    found = {"state": "running", "max_steps": 30, "clip_limits": [0.8, 1.2], "settings": settings, "health": []}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(found | changes))
