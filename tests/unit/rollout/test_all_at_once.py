"""Attempts of a whole evaluation: each batch gets its own, and one that nobody announced is attempted by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.collectors import make_collector

from mcp_grpo.rollout.collect import BatchCollector
from mcp_grpo.types import Task


def rows(names: str) -> list[dict[str, Any]]:
    return [{"task_id": name, "prompt": [{"role": "user", "content": name}]} for name in names]


class Attempts:
    """Stands for an engine, and counts what it rolls out."""

    def __init__(self) -> None:
        self.rolled_out: list[str] = []
        self.catalog = SimpleNamespace(check=lambda *tasks: None)

    def check_open(self) -> None:
        pass

    def prompt_ids(self, tasks: list[Task], renderer: Any) -> list[list[int]]:
        return []

    def roll_out(self, tasks: list[Task], **kwargs: Any) -> list[Any]:
        self.rolled_out.append("".join(task.task_id for task in tasks))
        return [SimpleNamespace(task=task, number=number) for number, task in enumerate(tasks)]


class Awake:
    """Stands for an engine that was woken."""

    num_times = 0

    def __enter__(self) -> None:
        Awake.num_times += 1

    def __exit__(self, *_: object) -> None:
        pass


def collector_of(engine: Any) -> BatchCollector:
    sampler = SimpleNamespace(sleeps=True, is_behind=False, awake=lambda held: Awake())
    return make_collector(engine=engine, sampler=sampler)


@pytest.fixture(autouse=True)
def asleep() -> None:
    Awake.num_times = 0


def judged(collector: BatchCollector, names: str) -> list[int]:
    """The places, among what was rolled out together, of the attempts that a batch gets."""
    unused: Any = None
    batch = collector.collect(rows(names), step=3, group_size=1, is_training=False, score=unused, flat=unused)
    assert "".join(each.task.task_id for each in batch.trajectories) == names
    return [each.number for each in batch.trajectories]  # pyright: ignore[reportAttributeAccessIssue]


def test_batches_get_their_own_attempts_of_those_that_were_made_at_once() -> None:
    engine = Attempts()
    collector = collector_of(engine)
    with collector.all_at_once([rows("ab"), rows("cd"), rows("e")]):
        assert engine.rolled_out == []  # the model may not be ready to sample before the first batch
        assert [judged(collector, names) for names in ("ab", "cd", "e")] == [[0, 1], [2, 3], [4]]
    assert engine.rolled_out == ["abcde"]
    assert Awake.num_times == 1


def test_a_batch_that_is_another_one_and_those_after_it_are_attempted_by_themselves(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Attempts()
    collector = collector_of(engine)
    with collector.all_at_once([rows("ab"), rows("cd"), rows("ef")]):
        assert [judged(collector, names) for names in ("ab", "dc", "ef")] == [[0, 1]] * 3
    assert engine.rolled_out == ["abcdef", "dc", "ef"]
    assert [record.message[:47] for record in caplog.records] == ["A batch of the evaluation has other tasks than "]


def test_what_was_left_is_gone_with_the_evaluation() -> None:
    engine = Attempts()
    collector = collector_of(engine)
    with collector.all_at_once([rows("ab"), rows("cd")]):
        judged(collector, "ab")
    judged(collector, "cd")
    assert engine.rolled_out == ["abcd", "cd"]


def test_a_task_is_known_again_whatever_its_columns_have() -> None:
    engine = Attempts()
    collector = collector_of(engine)

    def read(names: str) -> list[dict[str, Any]]:
        return [{**row, "weight": float("nan")} for row in rows(names)]

    unused: Any = None
    with collector.all_at_once([read("ab"), read("cd")]):
        for names in ("ab", "cd"):
            collector.collect(read(names), step=3, group_size=1, is_training=False, score=unused, flat=unused)
    assert engine.rolled_out == ["abcd"]


def test_no_batches_need_no_engine() -> None:
    engine = Attempts()
    with collector_of(engine).all_at_once([]):
        pass
    assert engine.rolled_out == []
