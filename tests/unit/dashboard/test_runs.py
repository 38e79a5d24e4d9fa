"""Runs are found below a folder and nowhere else."""

from pathlib import Path

import pytest
from helpers.recordings import attempt, write_about, write_batch, write_metrics

from mcp_grpo.dashboard import runs as module
from mcp_grpo.dashboard.runs import Runs
from mcp_grpo.monitor import METRICS_FILE, RUN_FILE
from mcp_grpo.monitor.recorder import FOLDER, SCHEMA


@pytest.fixture(autouse=True)
def _scan_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SCAN_SECONDS", -1.0)


def names(folder: Path) -> list[str]:
    return [run.name for run in Runs(folder).all()]


def test_runs_are_found_by_what_they_write_as_soon_as_they_write_it(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    assert runs.all() == []
    write_metrics(tmp_path / "first", {"step": 1, "reward": 0.5})
    write_batch(tmp_path / "sweep" / "second", [attempt()])
    write_about(tmp_path / "third")
    (tmp_path / "nothing" / "checkpoint-1").mkdir(parents=True)
    assert [run.name for run in runs.all()] == ["first", "sweep/second", "third"]
    assert names(tmp_path / "first") == ["first"]  # the folder of one run
    about = {run.name: run.about() for run in runs.all()}
    assert (about["first"]["step"], about["first"]["reward"]) == (1, 0.5)
    assert about["sweep/second"]["num_files"] == 1
    assert (about["third"]["state"], about["third"]["clip_limits"]) == ("running", [0.8, 1.2])


def test_nothing_outside_of_the_folder_is_read(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "inside"
    write_metrics(outside, {"step": 1, "reward": 0.5})
    write_about(outside)
    write_batch(outside, [attempt()])
    (inside / "run").mkdir(parents=True)
    (inside / "linked").symlink_to(outside)
    for name in (METRICS_FILE, RUN_FILE, FOLDER):
        (inside / "run" / name).symlink_to(outside / name)
    assert names(inside) == []
    (inside / "run" / METRICS_FILE).unlink()
    write_metrics(inside / "run", {"step": 1, "reward": 0.25})
    (run,) = Runs(inside).all()
    assert run.about()["state"] is None
    assert run.about()["num_files"] == 0
    (inside / "run" / FOLDER).unlink()
    (inside / "run" / FOLDER).mkdir()
    (file,) = (outside / FOLDER).iterdir()
    (inside / "run" / FOLDER / file.name).symlink_to(file)
    assert run.about()["num_files"] == 0
    assert run.trajectories.open(0, 0, 0) is None
    for name in ("../outside", "/etc", "linked", "..", ".", "", "run/../../outside", str(outside)):
        assert Runs(inside).get(name) is None


def test_a_run_file_that_cannot_be_read_is_no_obstacle(tmp_path: Path) -> None:
    write_metrics(tmp_path / "run", {"step": 1, "reward": 0.5})
    for content in ("{", "[]", '"text"', "[" * 100_000):
        (tmp_path / "run" / RUN_FILE).write_text(content)
        assert Runs(tmp_path).all()[0].about()["health"] == []


def test_the_names_are_those_that_a_training_writes() -> None:
    assert (module.METRICS_FILE, module.RUN_FILE, module.FOLDER) == (METRICS_FILE, RUN_FILE, FOLDER)
    from mcp_grpo.dashboard.trajectories import SMALL, TOKENS, UNSHOWN

    assert {name.split(".")[0] for name in SMALL} | set(TOKENS) | UNSHOWN <= set(SCHEMA.names)
