"""An evaluation arrives at trackers as they are without a network: its summary, and every attempt."""

import json
import os
import sqlite3
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from helpers.attempts import attempt

from mcp_grpo.cli import main
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Evaluation, attempt_of
from mcp_grpo.evaluation.trackers import attempt_rows, check_trackers, send_evaluation, summary_of
from mcp_grpo.types import ResultKind


# In a process of its own, as trackers keep state in theirs.
SCRIPT = """
import sys
sys.path[:0] = sys.argv[2:]
from process.training.test_evaluation_trackers import EVALUATION, ATTEMPTS
from mcp_grpo.evaluation.trackers import send_evaluation
send_evaluation([sys.argv[1]], "outputs run", EVALUATION, ATTEMPTS, project="sums", baselines={"doing nothing": 0.25})
"""
EVIL = "\x1b[2J evil"
ATTEMPTS = [
    attempt_of(attempt(f"{answer} {EVIL}", answer="5", task_id=f"t{i}", kinds=[[ResultKind.OK]]), 0, is_solved=i == 0)
    for i, answer in enumerate("56")
]
EVALUATION = Evaluation.of(ATTEMPTS)


def test_the_summary_and_the_rows_are_plain() -> None:
    metrics = summary_of(EVALUATION, {"doing nothing": 0.25})
    assert metrics["success"] == 0.5
    assert metrics["success_low"] < 0.5 < metrics["success_high"]
    assert metrics["baseline/doing nothing"] == 0.25
    assert metrics["tools/look/calls"] == 2
    rows = attempt_rows(ATTEMPTS)
    assert [(row["task_id"], row["solved"], row["calls"]) for row in rows] == [("t0", True, 1), ("t1", False, 1)]
    assert "\x1b" not in json.dumps(rows)
    assert "look({}) -> ok:" in rows[0]["tool_calls"]


def test_what_cannot_be_used_is_said_before_anything_is_attempted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SettingsError, match="must be some of"):
        check_trackers("tensorboard")
    monkeypatch.setattr("mcp_grpo.evaluation.trackers.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"mcp-grpo\[weave\]"):
        check_trackers(["weave"])
    fixed = ["eval", "no-tasks.jsonl", "--servers", "none.json", "--model", "none", "--out", "none"]
    assert main([*fixed, "--report_to", "wandb"]) == 1
    assert "mcp-grpo[tracking]" in capsys.readouterr().err


def test_a_tracker_that_fails_does_not_lose_the_evaluation(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*args: Any) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr("mcp_grpo.evaluation.trackers.find_spec", lambda name: True)
    monkeypatch.setattr("mcp_grpo.evaluation.trackers._to_wandb", fails)
    send_evaluation(["wandb"], "policy", EVALUATION, ATTEMPTS)
    assert "could not be sent to wandb: ConnectionError: no network" in caplog.text


def send(tracker: str, folder: Path, script: str = SCRIPT, **environment: str) -> str:
    tests = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script, tracker, str(tests), str(tests.parent)],
        env={**os.environ, "HOME": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "could not be sent" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra `tracking`")
def test_wandb_has_a_table_of_attempts(tmp_path: Path) -> None:
    send("wandb", tmp_path, WANDB_MODE="offline", WANDB_DIR=str(tmp_path), WANDB_SILENT="true")
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/eval/attempts*.table.json")
    table = json.loads(file.read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [(row["task_id"], row["solved"]) for row in rows] == [("t0", True), ("t1", False)]
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"success_low" in content
    assert b"baseline/doing nothing" in content


@pytest.mark.full
@pytest.mark.skipif(find_spec("trackio") is None, reason="needs the extra `tracking`")
def test_trackio_has_a_table_of_attempts_on_this_machine(tmp_path: Path) -> None:
    send("trackio", tmp_path, TRACKIO_DIR=str(tmp_path / "trackio"))
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        (logged,) = [json.loads(row) for (row,) in database.execute("SELECT metrics FROM metrics")]
    assert logged["eval/success"] == 0.5
    assert logged["eval/baseline/doing nothing"] == 0.25
    assert "eval/attempts" in logged


# Weave has no mode without a server: what it is asked to log is seen with its own functions, sending nothing.
WEAVE = """
import json, weave
seen = []
begin, log_summary = weave.EvaluationLogger.log_prediction, weave.EvaluationLogger.log_summary
def prediction(self, inputs, *args, **how):
    seen.append(["attempt", inputs])
    return begin(self, inputs, *args, **how)
def summary(self, found, *args, **how):
    seen.append(["summary", found])
    return log_summary(self, found, *args, **how)
weave.EvaluationLogger.log_prediction, weave.EvaluationLogger.log_summary = prediction, summary
"""


@pytest.mark.full
@pytest.mark.skipif(find_spec("weave") is None, reason="needs the extra `weave`")
def test_weave_is_given_an_evaluation_with_every_attempt(tmp_path: Path) -> None:
    script = f"{WEAVE}{SCRIPT}\nprint('SEEN', json.dumps(seen))"
    said = send("weave", tmp_path, script, WEAVE_DISABLED="true")
    (line,) = [line for line in said.splitlines() if line.startswith("SEEN ")]
    first, second, (kind, metrics) = json.loads(line.removeprefix("SEEN "))
    assert [first[1]["task_id"], second[1]["task_id"]] == ["t0", "t1"]
    assert kind == "summary"
    assert metrics["success"] == 0.5
