"""`run.json` of a run's folder: how far it goes, its bounds, and what was found wrong, for those who look on."""

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_grpo.monitor import RUN_FILE, HealthNote, RunFile


NOTE = HealthNote(step=3, name="no_calls", sentence="No tool was called.", is_fatal=False, since=2)
ARGS: Any = SimpleNamespace(beta=0.1, kl_target=0.4, ratio_gate=4.0)
STATE: Any = SimpleNamespace(max_steps=30)


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / RUN_FILE).read_text())


def test_it_says_how_far_a_run_goes_its_bounds_and_what_was_said(tmp_path: Path) -> None:
    notes: list[HealthNote] = []
    file = RunFile(tmp_path / RUN_FILE, (0.8, 1.2), lambda: notes)
    file.on_train_begin(ARGS, STATE, STATE)
    begun = read(tmp_path)
    assert (begun["state"], begun["max_steps"], begun["clip_limits"]) == ("running", 30, [0.8, 1.2])
    assert begun["settings"]["kl_target"] == 0.4
    assert begun["health"] == []
    notes.append(NOTE)
    file.write()
    assert read(tmp_path)["health"] == [
        {"step": 3, "name": "no_calls", "sentence": "No tool was called.", "is_fatal": False, "since": 2}
    ]
    file.note({"prompts": "Prompts are run once."})
    assert read(tmp_path)["chosen"] == {"prompts": "Prompts are run once."}
    file.on_train_end(ARGS, STATE, STATE)
    assert read(tmp_path)["state"] == "ended"
    file.on_train_begin(ARGS, STATE, STATE)  # a run after a run
    assert read(tmp_path)["state"] == "running"


def test_only_the_main_process_writes_it(tmp_path: Path) -> None:
    RunFile(tmp_path / RUN_FILE, (), list, is_main=False).write()
    assert not (tmp_path / RUN_FILE).exists()


def test_a_folder_that_cannot_be_written_to_does_not_end_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        RunFile(tmp_path / "file" / RUN_FILE, (), list).write()
    assert "Training goes on." in caplog.text
