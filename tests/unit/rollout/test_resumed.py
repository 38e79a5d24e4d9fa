"""What was under way when a run was stopped is attempted first, by as many processes as there are now."""

import logging
from typing import Any

import pytest
from helpers.collectors import make_collector


SIZE = 2  # attempts per group


def rows(names: str) -> list[dict[str, Any]]:
    return [{"task_id": name} for name in names for _ in range(SIZE)]


def first_batch(names: str, under_way: str, rank: int, num_processes: int) -> str:
    """Return the tasks of the first batch of a process, which would be `names`."""
    collector = make_collector(rank=rank, num_processes=num_processes, max_staleness=3)
    collector.resume(rows(under_way))
    found = collector._resumed_in_place_of(rows(names), step=5, size=SIZE)
    assert collector._resumed_in_place_of(rows(names), step=6, size=SIZE) == rows(names)  # only in the first one
    return "".join(row["task_id"] for row in found[::SIZE])


@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_each_group_is_attempted_by_one_process_however_many_there_are(num_processes: int) -> None:
    num_groups = 4 // num_processes
    found = [first_batch("xyzw"[:num_groups], "abcd", rank, num_processes) for rank in range(num_processes)]
    assert "".join(found) == "abcd"
    assert {len(share) for share in found} == {num_groups}


def test_batches_of_another_size_begin_with_the_next_one_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="mcp_grpo"):
        assert [first_batch("xy", "abcd", rank, 3) for rank in range(3)] == ["xy"] * 3
        assert first_batch("xy", "", 0, 1) == "xy"  # nothing was under way
    (record,) = caplog.records
    assert record.message.startswith("4 tasks were under way at the checkpoint, but batches have 6 tasks now")
    assert "together have 4 tasks" in record.message
