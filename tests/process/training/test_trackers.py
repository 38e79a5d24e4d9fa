"""What is logged arrives: in a file, in Trackio, in Weights & Biases."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.runs import make_trainer, settings
from peft import LoraConfig
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOConfig
from mcp_grpo import config as config_module
from mcp_grpo.monitor import METRICS_FILE, MetricsFile


LORA = LoraConfig(r=4, target_modules="all-linear")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / METRICS_FILE).read_text().splitlines()]


class Order(TrainerCallback):
    """Notes what of a step was in the file by the time the step ended."""

    def __init__(self) -> None:
        self.before_the_end: list[list[dict[str, Any]]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before_the_end.append(lines(Path(args.output_dir)))


@pytest.fixture
def without_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "is_trackio_available", lambda: False)


@pytest.mark.usefixtures("without_trackio")
@pytest.mark.full
def test_with_nothing_configured_every_figure_is_in_a_file_and_a_rollout_s_before_its_step(
    tmp_path: Path, adding_model: str
) -> None:
    order = Order()
    with make_trainer(tmp_path, adding_model, peft_config=LORA, report_to=None, callbacks=[order]) as trainer:
        trainer.train()
    (first, *_), (*_, second) = order.before_the_end[0], order.before_the_end[1]
    assert first["step"] == 0
    assert {"batch/reward", "batch/tools/valid_rate", "batch/stop/answered"} <= first.keys()
    assert second["step"] == 1
    logged = lines(tmp_path)
    for step in (1, 2):
        (entry,) = [line for line in logged if line["step"] == step and "loss" in line]
        (known,) = [line for line in trainer.state.log_history if line["step"] == step and "loss" in line]
        assert entry == known
    early = next(line for line in logged if "batch/reward" in line)
    (late,) = [line for line in logged if line["step"] == 1 and "loss" in line]
    assert early["batch/reward"] == pytest.approx(late["reward"])
    assert not any("batch/reward" in entry for entry in trainer.state.log_history)


@pytest.mark.usefixtures("without_trackio")
@pytest.mark.parametrize(("report_to", "is_written"), [(None, True), ("none", False), ("wandb", False)])
def test_the_file_is_written_only_if_nothing_is_configured(tmp_path: Path, report_to: Any, is_written: bool) -> None:
    args = settings(tmp_path, report_to=report_to)
    assert args.writes_metrics == is_written
    assert args.report_to == ([] if report_to in (None, "none") else [report_to])


def test_trackio_is_the_default_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "is_trackio_available", lambda: True)
    args = MCPGRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False)
    assert args.report_to == ["trackio"]
    assert args.writes_metrics
    assert args.project == tmp_path.name


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({}, False),
        ({"trackio_static_space_id": "somebody/curves"}, "somebody/curves"),
        ({"trackio_space_id": "somebody/curves"}, None),
    ],
)
@pytest.mark.parametrize("report_to", [None, "trackio"])
def test_trackio_uploads_only_to_a_space_that_is_named(
    tmp_path: Path, report_to: str | None, named: dict[str, Any], expected: Any
) -> None:
    args = settings(tmp_path, report_to=report_to, **named)
    assert args.trackio_static_space_id is expected


def test_a_project_that_is_named_keeps_its_name(tmp_path: Path) -> None:
    assert settings(tmp_path, report_to=None, project="mine").project == "mine"


def test_a_run_that_goes_on_replaces_what_was_logged_after_its_checkpoint(tmp_path: Path) -> None:
    class State:
        is_world_process_zero, global_step = True, 1

    args: Any = settings(tmp_path)
    state: Any = State()
    file = tmp_path / METRICS_FILE
    before = [{"step": 1, "loss": 0.5}, {"step": 1, "batch/reward": 1.0}, {"step": 2, "loss": 0.5}]
    file.write_text("".join(json.dumps(one) + "\n" for one in before) + '{"step": 2, "batch/rew')
    callback, control = MetricsFile(file), Any
    callback.on_train_begin(args, state, control)
    callback.on_log(args, state, control, logs={"loss": float("nan")})
    assert lines(tmp_path) == [{"step": 1, "loss": 0.5}, {"step": 1, "loss": None}]
    state.global_step = 0
    callback.on_train_begin(args, state, control)
    assert lines(tmp_path) == []


SCRIPT = """
import sys
from pathlib import Path

from helpers.runs import make_trainer
from peft import LoraConfig

folder, model, *names = sys.argv[1:]
lora = LoraConfig(r=4, target_modules="all-linear")
for name in names:
    settings = {"report_to": None if name == "default" else name, "log_completions": True, "project": "sums"}
    with make_trainer(Path(folder, name), model, peft_config=lora, run_name="adding", **settings) as trainer:
        trainer.evaluate(trainer.train_dataset.select(range(2)))  # before Trackio's run is open, and after it is closed
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(2)))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> Path:
    """Folder of a run with each tracker, in a process of their own, as trackers keep state in theirs."""
    folder, tests = tmp_path_factory.mktemp("tracked"), Path(__file__).parents[2]
    names = ["wandb"] * (find_spec("wandb") is not None) + ["default"] * (find_spec("trackio") is not None)
    environment = {"WANDB_MODE": "offline", "WANDB_DIR": str(folder), "WANDB_SILENT": "true"}
    environment |= {"TRACKIO_DIR": str(folder / "trackio")}
    path = os.pathsep.join([str(tests), str(tests.parent)])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), adding_model, *names],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def log_records(content: bytes) -> Iterator[bytes]:
    """The records of LevelDB's log format, which an offline run is in: blocks of 32 KiB, a record in one or more pieces."""
    header, block, position, pieces = 7, 32768, 7, b""
    while position + header <= len(content):
        if block - position % block < header:
            position += block - position % block
            continue
        _, length, kind = struct.unpack("<IHB", content[position : position + header])
        pieces += content[position + header : position + header + length]
        position += header + length
        if kind in (1, 4):  # whole, or the last piece
            yield pieces
            pieces = b""


@pytest.mark.full
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra `tracking`")
def test_an_offline_run_of_wandb_has_the_figures_and_the_trajectories(tracked: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    (file,) = tracked.glob("wandb/offline-run-*/run-*.wandb")
    history = []
    for data in log_records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            history.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    rollouts = [i for i, entry in enumerate(history) if "train/batch/reward" in entry]
    steps = [i for i, entry in enumerate(history) if "train/loss" in entry]
    assert len(rollouts) == len(steps) == 2
    assert rollouts[0] < steps[0] < rollouts[1] < steps[1]
    assert {"train/reward", "train/tools/valid_rate", "train/stop/answered"} <= history[steps[0]].keys()
    tables = sorted(tracked.glob("wandb/offline-run-*/files/media/table/completions*.table.json"))
    assert len(tables) >= 2  # one for each step, and one for the end
    table = json.loads(tables[0].read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == 8
    assert {"prompt", "completion", "exact_answer", "advantage", "task_id", "calls", "turns", "stop_reason"} <= set(
        rows[0]
    )
    called = [row for row in rows if row["calls"]]
    assert any(row["calls"] == 'add({"a": 2, "b": 3}) -> ok: 5' for row in called)
    assert [message["role"] for message in json.loads(called[0]["completion"])][:2] == ["assistant", "tool"]


@pytest.mark.full
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra `tracking`")
def test_with_nothing_configured_trackio_has_the_figures_on_this_machine(tracked: Path) -> None:
    with sqlite3.connect(tracked / "trackio" / "sums.db") as database:
        rows = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics ORDER BY id")]
    logged = [key for row in rows for key in row]
    assert logged.index("train/batch/reward") < logged.index("train/loss")
    assert logged.count("train/loss") == 2
    assert "completions" in logged
    assert [line["step"] for line in lines(tracked / "default") if "loss" in line] == [1, 2]
