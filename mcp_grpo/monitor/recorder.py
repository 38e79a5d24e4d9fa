"""Every trajectory of a run, in Parquet files: what was said and done, and what the loss saw of each token."""

import json
import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from mcp_grpo.monitor.trajectory_log import ScoredBatch
from mcp_grpo.types import TokenRole, Trajectory


FOLDER = "trajectories"
ROW = "batch_row"
"""Column of the loss's inputs that says which trajectory of the batch a row is."""
MAX_WAITING = 2  # batches that wait to be written; further ones are left out
CLOSE_TIME = 30.0  # seconds for what is left to be written

_CALL = pa.struct(
    {
        "turn": pa.int32(),
        "name": pa.string(),
        "arguments": pa.string(),
        "kind": pa.string(),
        "server": pa.string(),
        "seconds": pa.float32(),
        "attempts": pa.int32(),
        "text": pa.string(),
    }
)
SCHEMA = pa.schema(
    {
        "step": pa.int32(),
        "rank": pa.int32(),
        "row": pa.int32(),
        "task_id": pa.string(),
        "family": pa.string(),
        "difficulty": pa.string(),
        "prompt": pa.string(),
        "messages": pa.string(),
        "calls": pa.list_(_CALL),
        "answer": pa.string(),
        "states": pa.string(),
        "stop_reason": pa.string(),
        "error": pa.string(),
        "is_learnt_from": pa.bool_(),
        "is_scripted": pa.bool_(),
        "seconds": pa.float32(),
        "queue_seconds": pa.float32(),
        "staleness": pa.int32(),
        "generation_seconds": pa.list_(pa.float32()),
        "tool_seconds": pa.list_(pa.float32()),
        "rewards": pa.map_(pa.string(), pa.float64()),
        "prompt_ids": pa.list_(pa.int32()),
        "token_ids": pa.list_(pa.int32()),
        "token_text": pa.binary(),
        "token_bytes": pa.list_(pa.int32()),
        "turn": pa.list_(pa.int16()),
        "role": pa.list_(pa.dictionary(pa.int8(), pa.string())),
        "in_loss": pa.list_(pa.bool_()),
        "sampler_logp": pa.list_(pa.float32()),
        "trainer_logp": pa.list_(pa.float32()),
        "advantage": pa.list_(pa.float32()),
        "value": pa.list_(pa.float32()),
    }
)
"""
Columns of the files, one row per trajectory. `prompt`, `messages`, `arguments` and `states` are JSON. `staleness` is in
updates of the policy. `generation_seconds` and
`tool_seconds` have an entry for each turn: how long it was generated, and how long its calls took. Columns of tokens have
an entry for each token after the prompt: `token_bytes` is its length in `token_text`, `turn` is -1 and `trainer_logp` NaN where
the policy did not write it.
"""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Pending:
    """A batch that is learnt from, with what the passes of the loss have shown of it so far."""

    batch: ScoredBatch
    passes: list[dict[str, torch.Tensor]] = field(default_factory=list)


class TrajectoryRecorder:
    """
    Writes the batches of a run, each to a file of its own, on a thread of its own. Nothing that happens here stops a run.

    A file is there whole or not at all. Where the disk is full or the folder cannot be written to, that is said once, and
    training goes on; where writing is slower than training, batches are left out.

    Args:
        folder (`Path`):
            Output folder of the run; the files are in its `trajectories`.
        rank (`int`, *optional*, defaults to `0`):
            Which process this is. Each writes its own trajectories.
    """

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self._folder = folder / FOLDER
        self._rank = rank
        self._pending: _Pending | None = None
        self._queue: queue.Queue[_Pending | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._has_complained = False
        self.num_left_out = 0

    def forget_from(self, step: int) -> None:
        """Remove what an earlier run recorded from a step on. A run that is resumed goes on; a new one starts anew."""
        if self._rank:
            return
        for path in self._folder.glob("step-*.parquet*"):
            number = path.name.split("-")[1]
            if number.isdecimal() and int(number) >= step:
                with suppress(OSError):
                    path.unlink()

    def begin(self, batch: ScoredBatch) -> None:
        """Take a batch that is about to be learnt from, and write the one before it, if that is still to be done."""
        self.end()
        self._pending = _Pending(batch)

    def add_pass(self, inputs: Mapping[str, Any], logps: torch.Tensor, values: torch.Tensor | None) -> None:
        """Add what a pass of the loss shows of some rows of the batch."""
        if self._pending is None or ROW not in inputs:
            return
        advantages = inputs["advantages"]
        shown = {"row": inputs[ROW], "logp": logps, "advantage": advantages, "mask": inputs["completion_mask"]}
        if "tool_mask" in inputs:
            shown["mask"] = shown["mask"] * inputs["tool_mask"]
        if values is not None:
            shown["value"] = values
        # Without waiting for the device; the thread reads them after the update, which waits for it.
        self._pending.passes.append({name: v.detach().to("cpu", non_blocking=True) for name, v in shown.items()})

    def end(self) -> None:
        """Write the batch at hand, when it has been learnt from."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="mcp-grpo-recorder", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(pending)
        except queue.Full:
            self.num_left_out += 1

    def close(self) -> None:
        """Wait until everything is written."""
        self.end()
        if self._thread is None or not self._thread.is_alive():
            return
        deadline = time.monotonic() + CLOSE_TIME
        while time.monotonic() < deadline:
            try:
                self._queue.put_nowait(None)
                break
            except queue.Full:
                time.sleep(0.05)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        self._thread = None
        if self.num_left_out:
            logger.warning("%d batches of trajectories were not recorded: writing was slower.", self.num_left_out)
            self.num_left_out = 0

    def _work(self) -> None:
        while (pending := self._queue.get()) is not None:
            try:
                self._write(pending)
            except Exception as error:  # whatever it is, it must not end a run
                if not self._has_complained:
                    self._has_complained = True
                    logger.warning(
                        "Trajectories could not be recorded in %s (%s: %s). Training goes on; what can be written later will be.",
                        self._folder,
                        type(error).__name__,
                        error,
                    )

    def _write(self, pending: _Pending) -> None:
        batch = pending.batch
        name = f"step-{batch.step:06d}-rank-{self._rank}.parquet"
        table = batch_table(batch, pending.passes, rank=self._rank)
        self._folder.mkdir(parents=True, exist_ok=True)
        draft = self._folder / f"{name}.part"
        try:
            pq.write_table(table, draft, compression="zstd")
            draft.replace(self._folder / name)
        finally:
            draft.unlink(missing_ok=True)


def batch_table(batch: ScoredBatch, passes: Sequence[Mapping[str, torch.Tensor]], *, rank: int = 0) -> pa.Table:
    """Return a batch as its file has it, given what each pass of the loss has shown of some of its rows."""
    attempts = batch.trajectories
    shown: dict[int, dict[str, np.ndarray]] = {}
    for each in passes:
        arrays = {name: values.float().numpy() for name, values in each.items() if name != "row"}
        for place, row in enumerate(each["row"].tolist()):
            shown[row] = {name: values[place] for name, values in arrays.items()}

    def seen(name: str) -> list[np.ndarray | None]:
        """Return a quantity of each token that the policy wrote; one that is the same for all of them is repeated."""
        found: list[np.ndarray | None] = []
        for row, attempt in enumerate(attempts):
            values = shown.get(row, {}).get(name)
            if values is None:
                found.append(None)
                continue
            length = len(attempt.completion_ids)
            wide = np.broadcast_to(values, length) if values.ndim == 0 else values[:length]
            found.append(np.where(np.asarray(attempt.sampled_mask, dtype=bool), wide, np.nan))
        return found

    pieces = [t.vocabulary.pieces(t.completion_ids) if t.vocabulary else [] for t in attempts]
    in_loss = [
        shown[row]["mask"][: len(attempt.completion_ids)] > 0 if "mask" in shown.get(row, {}) else None
        for row, attempt in enumerate(attempts)
    ]
    tokens = {
        "prompt_ids": _lists([t.prompt_ids for t in attempts], np.int32),
        "token_ids": _lists([t.completion_ids for t in attempts], np.int32),
        "token_bytes": _lists([[len(piece) for piece in found] for found in pieces], np.int32),
        "turn": _lists([t.turn_ids for t in attempts], np.int16),
        "role": _roles(attempts),
        "in_loss": _lists(in_loss, np.bool_),
        "sampler_logp": _lists([None if t.is_scripted else t.logprobs for t in attempts], np.float32),
        "trainer_logp": _lists(seen("logp"), np.float32),
        "advantage": _lists(seen("advantage"), np.float32),
        "value": _lists(seen("value"), np.float32),
        "token_text": pa.array([b"".join(found) for found in pieces], pa.binary()),
    }
    rows = [
        {"step": batch.step, "rank": rank, "row": row, **_said(attempt), "rewards": list(batch.rewards[row].items())}
        for row, attempt in enumerate(attempts)
    ]
    plain = pa.schema([field for field in SCHEMA if field.name not in tokens])
    columns = pa.Table.from_pylist(rows, schema=plain)
    arrays = [tokens[name] if name in tokens else columns.column(name) for name in SCHEMA.names]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _lists(rows: Sequence[Any], dtype: Any) -> pa.Array:
    """Return lists of numbers as a column; `None` where there is none. One by one, numbers would take ten times as long."""
    arrays = [np.asarray(() if row is None else row, dtype=dtype) for row in rows]
    offsets = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    values = pa.array(np.concatenate([*arrays, np.empty(0, dtype)]))
    missing = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=missing)


def _roles(attempts: Sequence[Trajectory]) -> pa.Array:
    codes = {role: code for code, role in enumerate(TokenRole)}
    found = _lists([None if t.roles is None else [codes[role] for role in t.roles] for t in attempts], np.int8)
    names = pa.DictionaryArray.from_arrays(found.values, pa.array([str(role) for role in TokenRole]))
    missing = pa.array([t.roles is None for t in attempts], pa.bool_())
    return pa.ListArray.from_arrays(found.offsets, names, mask=missing)


def _said(trajectory: Trajectory) -> dict[str, Any]:
    """Return what was said and done."""
    task = trajectory.task
    family = task.metadata.get("family")
    return {
        "task_id": task.task_id,
        "family": None if family is None else _plain(str(family)),
        "difficulty": task.difficulty,
        "prompt": _json(list(task.prompt)),
        "messages": _json(list(trajectory.messages)),
        "calls": [
            {
                "turn": exchange.turn,
                "name": _plain(exchange.call.name),
                "arguments": _json(dict(exchange.call.arguments)),
                "kind": str(exchange.result.kind),
                "server": exchange.result.server,
                "seconds": exchange.result.seconds,
                "attempts": exchange.result.num_attempts,
                "text": _plain(exchange.result.text),
            }
            for exchange in trajectory.exchanges
        ],
        "answer": None if trajectory.answer is None else _plain(trajectory.answer),
        "states": _json(dict(trajectory.states)),
        "stop_reason": str(trajectory.stop_reason),
        "error": None if trajectory.error is None else _plain(trajectory.error),
        "is_learnt_from": trajectory.is_learnt_from,
        "is_scripted": trajectory.is_scripted,
        "seconds": trajectory.seconds,
        "queue_seconds": trajectory.queue_seconds,
        "staleness": trajectory.staleness,
        "generation_seconds": [generation for generation, _ in trajectory.turn_seconds],
        "tool_seconds": [tools for _, tools in trajectory.turn_seconds],
    }


def _json(value: Any) -> str:
    return json.dumps(value, default=str)  # in ASCII: half a surrogate pair, which a policy may write, is no text


def _plain(text: str) -> str:
    return text.encode("utf-8", "replace").decode("utf-8")
