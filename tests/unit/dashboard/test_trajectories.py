"""Trajectories are found by what is small of them, and read one by one."""

import math
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from helpers.recordings import attempt, call, write_batch

from mcp_grpo.dashboard import trajectories as module
from mcp_grpo.dashboard.trajectories import Filter, TrajectoryIndex


@pytest.fixture
def index(tmp_path: Path) -> TrajectoryIndex:
    """Two steps: at step 0 a group of three and another task, at step 1 the first task again, on two ranks."""
    write_batch(
        tmp_path,
        [
            attempt(0, 0, rewards={"exact": 1.0, "short": 0.5}),
            attempt(
                0, 1, rewards={"exact": 0.0}, answer="6", calls=[call("add"), call("sub", turn=1, kind="tool_error")]
            ),
            attempt(0, 2, rewards={"exact": math.nan}, stop_reason="max_turns", answer=None),
            attempt(0, 3, task_id="other", family="words", rewards={"exact": -1.0}, calls=[call("")]),
        ],
    )
    write_batch(tmp_path, [attempt(1, 0, answer="5"), attempt(1, 1, answer="5", calls=[call("mul")])])
    write_batch(tmp_path, [attempt(1, 0, rank=1, answer="7", rewards={"exact": 0.0})])
    return TrajectoryIndex(tmp_path / "trajectories")


def found(index: TrajectoryIndex, sort: str = "oldest", **wanted: Any) -> list[tuple[int, int, int]]:
    rows = index.find(Filter(**wanted), sort=sort)["rows"]
    return [(row["step"], row["rank"], row["row"]) for row in rows]


def test_each_filter_lets_through_what_it_names(index: TrajectoryIndex) -> None:
    everything = found(index)
    assert everything == [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3), (1, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert found(index, min_reward=1.0) == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]
    assert found(index, max_reward=0.0) == [(0, 0, 1), (0, 0, 3), (1, 1, 0)]
    assert found(index, family="words") == [(0, 0, 3)]
    assert found(index, tool="sub") == [(0, 0, 1)]
    assert found(index, stop_reason="max_turns") == [(0, 0, 2)]
    assert found(index, min_step=1) == [(1, 0, 0), (1, 0, 1), (1, 1, 0)]
    assert found(index, max_step=0, task="SUM") == [(0, 0, 0), (0, 0, 1), (0, 0, 2)]
    assert found(index, errors=True) == [(0, 0, 1)]
    assert found(index, tool="add", min_step=1, max_reward=0.5) == [(1, 1, 0)]
    assert found(index, family="no such family") == []


def test_orders_and_pages(index: TrajectoryIndex) -> None:
    assert found(index, "newest")[0] == (1, 0, 0)
    assert found(index, "-reward")[0] == (0, 0, 0)
    assert found(index, "reward")[0] == (0, 0, 3)
    assert found(index, "-seconds")[0] == (0, 0, 3)
    page = index.find(Filter(), sort="oldest", offset=2, limit=2)
    assert (page["total"], page["of"]) == (7, 7)
    assert [row["row"] for row in page["rows"]] == [2, 3]
    assert page["rows"][1]["rewards"] == {"exact": -1.0}
    facets = page["facets"]
    assert facets["steps"] == [0, 1]
    assert facets["rewards"] == [-1.0, 1.5]
    assert dict(facets["tools"]) == {"add": 5, "sub": 1, "": 1, "mul": 1}
    assert dict(facets["stop_reasons"]) == {"answered": 6, "max_turns": 1}


def test_one_is_read_with_every_quantity_of_its_tokens(index: TrajectoryIndex) -> None:
    one = index.open(0, 0, 1)
    assert one is not None
    assert one["task_id"] == "sum-1"
    assert one["prompt"] == [{"role": "user", "content": "What is 2 + 3?"}]
    assert one["calls"][1]["kind"] == "tool_error"
    tokens = one["tokens"]
    assert tokens["text"] == ["<call>", " add", "<end>", "\n5\n", "It", " is 5"]
    assert tokens["turn"] == [0, 0, 0, -1, 1, 1]
    assert tokens["ratio"][0] == pytest.approx(math.exp(0.05))
    assert all(len(tokens[name]) == 6 for name in module.TOKENS)
    assert index.open(0, 0, 9) is None
    assert index.open(9, 0, 0) is None


def test_a_character_of_several_tokens_is_whole(tmp_path: Path) -> None:
    euro = "€".encode()
    write_batch(tmp_path, [attempt(tokens=[euro[:1], euro[1:], b"\xff", b"x"], turns=[0, 0, 0, 0])])
    one = TrajectoryIndex(tmp_path / "trajectories").open(0, 0, 0)
    assert one is not None
    assert one["tokens"]["text"] == ["", "€", "\ufffd", "x"]


def test_a_group_is_all_attempts_at_a_task_in_one_step_on_all_ranks(index: TrajectoryIndex) -> None:
    assert [each["row"] for each in index.group(0, "sum-1")] == [0, 1, 2]
    assert [(each["rank"], each["answer"]) for each in index.group(1, "sum-1")] == [(0, "5"), (0, "5"), (1, "7")]
    assert "tokens" not in index.group(0, "other")[0]
    assert index.group(0, "sum") == []


def test_what_became_of_a_task_from_step_to_step(index: TrajectoryIndex) -> None:
    history = index.history("sum-1")
    assert history["num_steps"] == 2
    first, second = history["steps"]
    assert first["mean_reward"] == pytest.approx(0.75)  # one has none
    assert first["paths"] == [("add", 2), ("add → sub", 1)]
    assert second["answers"] == [("5", 2), ("7", 1)]
    assert [each["reward"] for each in second["attempts"]] == [1.0, 1.0, 0.0]


def test_files_are_read_once_and_only_the_small_columns(
    index: TrajectoryIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, Any]] = []
    read = module._read
    monkeypatch.setattr(
        module, "_read", lambda path, columns: asked.append((path.name, columns)) or read(path, columns)
    )
    assert len(found(index)) == 7
    assert sorted(name for name, _ in asked) == sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert all(columns == list(module.SMALL) for _, columns in asked)
    asked.clear()
    write_batch(tmp_path, [attempt(2, 0)])
    assert len(found(index)) == 8
    assert [name for name, _ in asked] == ["step-000002-rank-0.parquet"]
    asked.clear()
    assert index.open(1, 0, 1) is not None
    assert [name for name, _ in asked] == ["step-000001-rank-0.parquet"]


def test_what_a_new_run_removes_or_replaces_is_forgotten(index: TrajectoryIndex, tmp_path: Path) -> None:
    assert len(found(index)) == 7
    (tmp_path / "trajectories" / "step-000001-rank-1.parquet").unlink()
    write_batch(tmp_path, [attempt(0, 0, task_id="new")])
    assert found(index) == [(0, 0, 0), (1, 0, 0), (1, 0, 1)]


def test_many_files_are_read_a_few_at_a_time(index: TrajectoryIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_SECONDS", -1.0)
    assert index.find(Filter())["is_complete"] is False
    monkeypatch.setattr(module, "READ_SECONDS", 60.0)
    assert index.find(Filter())["is_complete"] is True


def test_a_file_that_is_broken_hides_no_other(index: TrajectoryIndex, tmp_path: Path) -> None:
    (tmp_path / "trajectories" / "step-000005-rank-0.parquet").write_bytes(b"no Parquet")
    assert len(found(index)) == 7
    assert index.open(5, 0, 0) is None


def test_a_recording_without_the_seconds_of_turns_is_shown(tmp_path: Path) -> None:
    path = write_batch(tmp_path, [attempt()])
    pq.write_table(pq.read_table(path).drop_columns(["generation_seconds", "tool_seconds"]), path)
    index = TrajectoryIndex(tmp_path / "trajectories")
    assert len(index.group(0, "sum-1")) == 1


def test_names_with_control_characters_are_found_by_what_is_shown_of_them(tmp_path: Path) -> None:
    write_batch(tmp_path, [attempt(task_id="a\x1b", family="b\u202e", calls=[call("c\x00")]), attempt(row=1)])
    index = TrajectoryIndex(tmp_path / "trajectories")
    for wanted in ({"task": "a␛"}, {"family": "b�"}, {"tool": "c␀"}):
        assert found(index, **wanted) == [(0, 0, 0)]
    assert len(index.group(0, "a␛")) == 1
    assert index.history("a␛")["num_steps"] == 1


def test_nothing_is_found_in_an_empty_folder(tmp_path: Path) -> None:
    empty = TrajectoryIndex(tmp_path / "trajectories").find(Filter(min_reward=0.0, tool="x", task="y", errors=True))
    assert (empty["total"], empty["rows"], empty["facets"]["steps"]) == (0, [], None)
