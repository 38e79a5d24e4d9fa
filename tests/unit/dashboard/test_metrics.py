"""Metrics are read as their file grows, each line once; a file that was written anew is known as such."""

import json
from pathlib import Path

from helpers.recordings import write_metrics

from mcp_grpo.dashboard.metrics import MetricsTail


def test_only_what_is_new_is_told(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    nothing = tail.since(None, 0)
    assert (nothing["count"], nothing["series"]) == (0, {})
    write_metrics(tmp_path, {"step": 1, "reward": 0.5}, {"step": 2, "reward": None, "entropy": 1})
    first = tail.since(nothing["generation"], 0)
    assert first["series"] == {"reward": ([1, 2], [0.5, None]), "entropy": ([2], [1.0])}
    write_metrics(tmp_path, {"step": 3, "reward": 0.75, "note": "text", "flag": True})
    second = tail.since(first["generation"], first["count"])
    assert second["generation"] == first["generation"]
    assert second["series"] == {"reward": ([3], [0.75])}
    assert tail.latest() == {"step": 3, "reward": 0.75}


def test_a_line_is_read_when_it_is_whole_and_a_broken_one_is_left_out(tmp_path: Path) -> None:
    file, tail = tmp_path / "metrics.jsonl", MetricsTail(tmp_path / "metrics.jsonl")
    file.write_text('{"step": 1, "rew')
    assert tail.since(None, 0)["count"] == 0
    file.write_text('{"step": 1, "reward": 1.0}\n{"step": 2, "re\n[1]\n7\n{"reward": 3}\n{"step": 4, "reward": 4.0}\n')
    assert tail.since(None, 0)["series"] == {"reward": ([1, 4], [1.0, 4.0])}


def test_a_resumed_run_that_writes_its_file_anew_is_read_anew(tmp_path: Path) -> None:
    file, tail = tmp_path / "metrics.jsonl", MetricsTail(tmp_path / "metrics.jsonl")
    write_metrics(tmp_path, *({"step": step, "reward": 0.0} for step in range(1, 6)))
    before = tail.since(None, 0)
    file.write_text(
        "".join(json.dumps({"step": step, "reward": 1.0}) + "\n" for step in range(1, 9))
    )  # as long or longer
    after = tail.since(before["generation"], before["count"])
    assert after["generation"] != before["generation"]
    assert after["start"] == 0
    assert after["series"]["reward"] == (list(range(1, 9)), [1.0] * 8)
    file.unlink()
    assert tail.since(after["generation"], after["count"])["count"] == 0


def test_a_batch_that_is_not_trained_on_yet_is_kept_apart(tmp_path: Path) -> None:
    tail = MetricsTail(tmp_path / "metrics.jsonl")
    write_metrics(tmp_path, {"step": 1, "reward": 0.5}, {"step": 1, "batch/reward": 0.75})
    found = tail.since(None, 0)
    assert found["series"] == {"reward": ([1], [0.5])}
    assert found["ahead"] == {"step": 1, "metrics": {"reward": 0.75}}
    write_metrics(tmp_path, {"step": 2, "reward": 0.75})
    assert tail.since(None, 0)["ahead"] is None


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    write_metrics(tmp_path / "elsewhere", {"step": 1, "reward": 0.5})
    (tmp_path / "metrics.jsonl").symlink_to(tmp_path / "elsewhere" / "metrics.jsonl")
    assert MetricsTail(tmp_path / "metrics.jsonl").since(None, 0)["count"] == 0
