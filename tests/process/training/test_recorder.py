"""Every trajectory of a run is in its folder, token by token as the loss saw it; nothing that happens there stops a run."""

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from helpers.fork_server import ForkServer
from helpers.runs import make_trainer
from peft import LoraConfig

from mcp_grpo.cli import main
from mcp_grpo.monitor import RUN_FILE, ScoredBatch, TrajectoryRecorder
from mcp_grpo.monitor.recorder import FOLDER, SCHEMA
from mcp_grpo.types import Exchange, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


LORA = LoraConfig(r=4, target_modules="all-linear")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [row for path in sorted((folder / FOLDER).glob("*.parquet")) for row in pq.read_table(path).to_pylist()]


def test_every_token_is_recorded_as_the_loss_saw_it(tmp_path: Path, adding_model: str) -> None:
    batches: list[ScoredBatch] = []
    with make_trainer(
        tmp_path, adding_model, peft_config=LORA, advantage_mode="gae", schema_mask="syntax", schema_mask_min_prob=0.0
    ) as trainer:
        trainer.watch_batches(batches.append)
        trainer.train()
        trainer._say([trainer._monitor.note_fall("It falls.", 2)])  # at once, not at the end
    recorded = rows(tmp_path)
    assert [row["step"] for row in recorded] == [0] * 8 + [1] * 8
    attempts = [attempt for batch in batches for attempt in batch.trajectories]
    for row, attempt in zip(recorded, attempts, strict=True):
        assert row["task_id"] == attempt.task.task_id
        assert tuple(row["token_ids"]) == attempt.completion_ids
        assert row["sampler_logp"] == pytest.approx(attempt.logprobs)
        assert tuple(row["turn"]) == attempt.turn_ids
        assert [int(each) for each in row["in_loss"]] == list(attempt.loss_mask)
        assert [call["name"] for call in row["calls"]] == [exchange.call.name for exchange in attempt.exchanges]
        pieces = attempt.vocabulary.pieces(attempt.completion_ids) if attempt.vocabulary else []
        assert row["token_text"] == b"".join(pieces)
        assert sum(row["token_bytes"]) == len(row["token_text"])
        for name in ("trainer_logp", "advantage", "value"):
            assert len(row[name]) == len(attempt.completion_ids)
            assert [math.isnan(each) for each in row[name]] == [not each for each in attempt.sampled_mask]
        for sampled, own, sampler in zip(attempt.sampled_mask, row["trainer_logp"], row["sampler_logp"], strict=True):
            assert not sampled or own == pytest.approx(sampler, abs=1e-3)  # on-policy, the two agree
        assert len(row["generation_seconds"]) == len(row["tool_seconds"]) == attempt.num_turns
        assert sum(row["generation_seconds"]) + sum(row["tool_seconds"]) <= row["seconds"] + 1e-3
        for call in row["calls"]:
            assert call["seconds"] <= row["tool_seconds"][call["turn"]] + 1e-3
        assert {turn for turn in row["turn"] if turn >= 0}  # each turn has its own advantage in this mode
    assert dict(recorded[0]["rewards"]) == pytest.approx(dict(batches[0].rewards[0]))
    assert {"choice", "forced"} <= {role for row in recorded for role in row["role"]}
    run = json.loads((tmp_path / RUN_FILE).read_text())
    assert (run["state"], run["max_steps"], run["clip_limits"]) == ("ended", 2, [0.8, 1.2])
    assert run["settings"]["ratio_gate"] == 4.0
    assert [(note["step"], note["sentence"]) for note in run["health"]][-1] == (2, "It falls.")


@pytest.mark.full
def test_several_passes_in_another_order_come_back_to_their_rows_and_are_shown(
    tmp_path: Path, adding_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: Any = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "max_steps": 1}
    with make_trainer(tmp_path, adding_model, **settings) as trainer:
        trainer.train()
    recorded = rows(tmp_path)
    assert [row["row"] for row in recorded] == list(range(8))
    for row in recorded:
        for turn, own, sampler in zip(row["turn"], row["trainer_logp"], row["sampler_logp"], strict=True):
            assert turn < 0 or own == pytest.approx(sampler, abs=1e-3)
        assert row["value"] is None
    assert main(["replay", str(tmp_path), "--number", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 of 8 trajectories of step 0." in shown
    assert f"add({recorded[0]['calls'][0]['arguments']})" in shown
    assert main(["replay", str(tmp_path), "--task", recorded[0]["task_id"], "--number", "1"]) == 0
    assert f"of task {recorded[0]['task_id']}." in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "nothing")]) == 1
    assert "no recorded trajectories" in capsys.readouterr().err


@pytest.mark.full
def test_a_new_run_starts_anew_and_a_resumed_one_goes_on(tmp_path: Path, adding_model: str) -> None:
    (tmp_path / FOLDER).mkdir()
    for step in (0, 7):
        (tmp_path / FOLDER / f"step-{step:06d}-rank-1.parquet").write_text("of another run")
    saving: Any = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    with make_trainer(tmp_path, adding_model, **saving) as trainer:
        trainer.train()
    first = {path.name: path.read_bytes() for path in (tmp_path / FOLDER).iterdir()}
    assert sorted(first) == ["step-000000-rank-0.parquet", "step-000001-rank-0.parquet"]
    with make_trainer(tmp_path, adding_model, **saving) as trainer:
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert [row["step"] for row in rows(tmp_path)] == [0] * 8 + [1] * 8
    assert (tmp_path / FOLDER / "step-000000-rank-0.parquet").read_bytes() == first["step-000000-rank-0.parquet"]


@pytest.mark.full
def test_without_it_nothing_is_written(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, max_steps=1, record_trajectories=False) as trainer:
        trainer.train()
    assert not (tmp_path / FOLDER).exists()


@pytest.mark.full
def test_a_folder_that_cannot_be_written_to_is_said_once_and_training_goes_on(
    tmp_path: Path, adding_model: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    with caplog.at_level(logging.WARNING, "mcp_grpo"), make_trainer(tmp_path, adding_model) as trainer:
        trainer.train()
    assert trainer.state.global_step == 2
    said = [record.message for record in caplog.records if "could not be recorded" in record.message]
    assert len(said) == 1
    assert "Training goes on" in said[0]


def batch(step: int = 0) -> ScoredBatch:
    return ScoredBatch(step=step, trajectories=[], rewards=[], columns={})


# On a real disk of 64 KiB, in a mount namespace of its own: small batches fit, large ones do not.
FULL_DISK = """
import ctypes, logging, os, subprocess, sys
from contextlib import suppress
from pathlib import Path
disk, user, group = Path(sys.argv[1]), os.getuid(), os.getgid()
NEW_USER, NEW_MOUNTS = 0x10000000, 0x00020000
if ctypes.CDLL(None).unshare(NEW_USER | NEW_MOUNTS):
    sys.exit("SKIP: this kernel gives no namespaces to this user")
Path("/proc/self/uid_map").write_text(f"0 {user} 1")
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/gid_map").write_text(f"0 {group} 1")
mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True, text=True)
if mounted.returncode:
    sys.exit(f"SKIP: {mounted.stderr}")
from mcp_grpo.monitor.recorder import FOLDER, TrajectoryRecorder
from mcp_grpo.monitor.trajectory_log import ScoredBatch
from mcp_grpo.types import Segment, StopReason, Task, Trajectory
import random

logging.basicConfig(level=logging.WARNING, format="%(message)s")
noise = random.Random(0)  # nothing that could be compressed

def batch(step, size):
    ids = tuple(noise.randrange(2**31) for _ in range(size))
    segment = Segment(token_ids=ids, logprobs=(-1.0,) * size)
    task = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
    attempt = Trajectory(
        task=task, prompt_ids=(0,), segments=(segment,), messages=(), exchanges=(), stop_reason=StopReason.MAX_TOKENS
    )
    return ScoredBatch(step=step, trajectories=[attempt], rewards=[{}], columns={})

def files():
    return sorted(path.name for path in (disk / FOLDER).iterdir())

recorder = TrajectoryRecorder(disk)
for step, size in enumerate((10, 40_000, 40_000, 10)):
    recorder.begin(batch(step, size))
    recorder.close()
    print(step, *files(), flush=True)
with suppress(OSError):
    (disk / "other").write_bytes(b"x" * 64_000)
recorder.begin(batch(4, 100))
recorder.close()
(disk / "other").unlink()
recorder.begin(batch(5, 100))
recorder.close()
print("end", *files(), flush=True)
"""


def test_a_full_disk_leaves_whole_files_and_what_fits_later_is_written(
    tmp_path: Path, fork_server: ForkServer
) -> None:
    done = fork_server.start("-c", FULL_DISK, tmp_path, cwd=tmp_path, env=os.environ)
    status = done.wait()
    if "SKIP: " in done.err:
        pytest.skip(f"needs to mount a tmpfs: {done.err}")
    assert status == 0, done.err
    first, last = "step-000000-rank-0.parquet", "step-000003-rank-0.parquet"
    assert done.out.splitlines() == [
        f"0 {first}",
        f"1 {first}",
        f"2 {first}",
        f"3 {first} {last}",
        f"end {first} {last} step-000005-rank-0.parquet",
    ]
    assert done.err.count("No space left on device") == 1
    assert not list(tmp_path.iterdir())  # the disk went with its namespace


def test_a_slow_disk_does_not_hold_up_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write = pq.write_table
    monkeypatch.setattr(pq, "write_table", lambda *args, **how: (time.sleep(0.4), write(*args, **how)))
    recorder = TrajectoryRecorder(tmp_path)
    start = time.monotonic()
    for step in range(20):
        recorder.begin(batch(step))
        recorder.end()
    assert time.monotonic() - start < 5  # of 8
    recorder.close()
    written = len(list((tmp_path / FOLDER).iterdir()))
    assert 0 < written < 20
    assert f"{20 - written} batches of trajectories were not recorded" in caplog.text


KILLED = """
import sys, time
from pathlib import Path
from mcp_grpo.monitor.recorder import TrajectoryRecorder
from mcp_grpo.monitor.trajectory_log import ScoredBatch
from mcp_grpo.types import Segment, StopReason, Task, Trajectory

segment = Segment(token_ids=tuple(range(20_000)), logprobs=(-1.0,) * 20_000)
task = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
attempt = Trajectory(task=task, prompt_ids=(0,), segments=(segment,), messages=(), exchanges=(), stop_reason=StopReason.MAX_TOKENS)
recorder = TrajectoryRecorder(Path(sys.argv[1]))
for step in range(10_000):
    recorder.begin(ScoredBatch(step=step, trajectories=[attempt] * 4, rewards=[{}] * 4, columns={}))
    recorder.end()
    time.sleep(0.02)
    print(step, flush=True)
"""


@pytest.mark.full
def test_what_is_killed_in_the_middle_of_a_write_leaves_only_whole_files(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout
    deadline = time.monotonic() + 60
    while len(list((tmp_path / FOLDER).glob("*.parquet"))) < 5 and time.monotonic() < deadline:
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    files = sorted((tmp_path / FOLDER).glob("*.parquet"))
    assert len(files) >= 5
    for path in files:
        assert pq.read_table(path).schema.equals(SCHEMA)


def test_half_a_surrogate_pair_does_not_end_recording(tmp_path: Path) -> None:
    half = "half \ud83d"
    attempt = Trajectory(
        task=Task(task_id="t", prompt=({"role": "user", "content": half},), metadata={"family": half}),
        prompt_ids=(0,),
        segments=(Segment(token_ids=(1,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": half},),
        exchanges=(Exchange(call=ToolCall(name=half, arguments={half: half}), result=ToolResult(text=half), turn=0),),
        stop_reason=StopReason.ANSWERED,
        states={"s": half},
    )
    recorder = TrajectoryRecorder(tmp_path)
    recorder.begin(ScoredBatch(step=0, trajectories=[attempt], rewards=[{"r": torch.nan}], columns={}))
    recorder.close()
    (row,) = rows(tmp_path)
    assert row["calls"][0]["name"] == "half ?"
