"""Show recorded trajectories turn by turn."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from rich.console import Console
from rich.rule import Rule
from rich.text import Text

from mcp_grpo.errors import SettingsError
from mcp_grpo.monitor.recorder import FOLDER


MAX_SHOWN = 2000  # characters of a tool result
_FILE = re.compile(r"step-(\d+)-rank-(\d+)\.parquet")
_TOKENS = (
    "prompt_ids",
    "token_ids",
    "token_text",
    "token_bytes",
    "turn",
    "role",
    "in_loss",
    "sampler_logp",
    "trainer_logp",
)
_LIGHT = {"advantage", "value", *_TOKENS}


def recorded_steps(folder: Path) -> list[int]:
    """Return the steps that trajectories were recorded of."""
    return sorted({int(found[1]) for path in _files(folder) if (found := _FILE.fullmatch(path.name))})


def recorded(folder: Path, *, step: int | None = None, task_id: str | None = None) -> Iterator[dict[str, Any]]:
    """
    Read recorded trajectories without their tokens, step by step.

    Args:
        folder (`Path`):
            Output folder of a run.
        step (`int`, *optional*):
            Only those of this step: steps done before the batch was learnt from.
        task_id (`str`, *optional*):
            Only those of this task.

    Raises:
        [`SettingsError`]: If there are none in the folder.
    """
    files = sorted(
        (int(found[1]), int(found[2]), path) for path in _files(folder) if (found := _FILE.fullmatch(path.name))
    )
    if not files:
        raise SettingsError(
            f"There are no recorded trajectories in {folder}. Name the output folder of a run, with `record_trajectories` on."
        )
    for number, _, path in files:
        if step is not None and number != step:
            continue
        columns = [name for name in pq.read_schema(path).names if name not in _LIGHT]
        for row in pq.read_table(path, columns=columns).to_pylist():
            if task_id is None or row["task_id"] == task_id:
                yield row


def show(row: dict[str, Any], console: Console) -> None:
    """Print a recorded trajectory, turn by turn."""
    rewards = ", ".join(f"{name} {value + 0.0:.3f}" for name, value in row["rewards"])  # 0.0, so that none is -0.000
    console.print(Rule(Text(f"step {row['step']}, row {row['row']}: {row['task_id']}")))
    for message in json.loads(row["prompt"]):
        console.print(
            Text.assemble((f"{message['role']}: ", "bold cyan"), _text(message.get("content"))), soft_wrap=True
        )
    turn = -1
    for message in json.loads(row["messages"]):
        if message["role"] != "assistant":
            continue
        turn += 1
        console.print(Text.assemble((f"turn {turn}: ", "bold green"), _text(message.get("content"))), soft_wrap=True)
        for call in row["calls"]:
            if call["turn"] == turn:
                style = "yellow" if call["kind"] == "ok" else "bold red"
                named = f"  {call['name']}({call['arguments']})"
                console.print(Text.assemble((named, style)), soft_wrap=True)
                console.print(
                    Text(f"  {call['kind']}, {call['seconds']:.2f} s: {_cut(call['text'])}", "dim"), soft_wrap=True
                )
    end = f"{row['stop_reason']}, {row['seconds']:.1f} s" + (f", {row['error']}" if row["error"] else "")
    learnt = "" if row["is_learnt_from"] else "; not learnt from"
    console.print(Text(f"{end}; {rewards or 'no reward'}{learnt}\n", "bold"), soft_wrap=True)


def _files(folder: Path) -> Iterator[Path]:
    return (folder / FOLDER).glob("*.parquet")


def _text(content: Any) -> str:
    return content if isinstance(content, str) else json.dumps(content)


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ... ({len(text) - MAX_SHOWN} more characters)"
