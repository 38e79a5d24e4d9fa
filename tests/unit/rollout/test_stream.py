"""Groups that are rolled out while the policy trains: which of them a batch takes, and for which it waits."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Any

import anyio
import pytest
import torch
from servers.sums import server

from mcp_grpo.errors import RolloutError, SamplerError
from mcp_grpo.metrics import staleness_metrics
from mcp_grpo.rollout import RolloutEngine, RolloutProgress
from mcp_grpo.rollout.stream import RolloutStream, StreamedGroup, choose
from mcp_grpo.types import StopReason, Task, Trajectory


TASKS = {name: Task(task_id=name, prompt=({"role": "user", "content": "2+3?"},)) for name in "abcdefgh"}


def attempt(name: str, staleness: int = 0) -> Trajectory:
    return Trajectory(
        task=TASKS[name],
        prompt_ids=(1,),
        segments=(),
        messages=(),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
        staleness=staleness,
    )


def group(name: str, begun: int, has_ended: bool) -> StreamedGroup:
    future: Future[list[Trajectory]] = Future()
    if has_ended:
        future.set_result([])
    return StreamedGroup(rows=[], tasks=[TASKS[name]], begun=begun, progress=RolloutProgress(), trajectories=future)


def names(groups: list[StreamedGroup] | None) -> str | None:
    return None if groups is None else "".join(group.tasks[0].task_id for group in groups)


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("a4+ b4+ c5+ d5+", "ab"),  # the first that were begun
        ("a4- b4+ c5- d5+", "bd"),  # or those that have ended
        ("a4- b4+ c5- d5-", None),  # there are not enough
        ("a3- b4+ c5+ d5+", "bc"),  # one that may wait for an update more
        ("a2- b4+ c5+ d5+", None),  # one that may not
        ("a2+ b4- c5+ d5-", "ac"),
    ],
)
def test_a_batch_takes_what_has_ended_and_waits_for_what_is_too_old(groups: str, expected: str | None) -> None:
    begun = [group(word[0], int(word[1]), word[2] == "+") for word in groups.split()]
    assert names(choose(begun, 2, step=5, max_staleness=3)) == expected


class Waiting:
    """A policy that somebody else samples from."""

    def __init__(self) -> None:
        self.threads: set[str] = set()
        self.error: Exception | None = None

    async def generate(self, prompt_ids: Any, sampling: Any) -> Any:
        raise NotImplementedError

    def serve(self, until: Future[Any]) -> None:
        self.threads.add(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        wait([until])


class Rollouts:
    """Groups that end when the test says so."""

    def __init__(self, engine: RolloutEngine, max_staleness: int) -> None:
        self.stream = RolloutStream(engine, torch.device("cpu"), max_staleness)
        self.policy = Waiting()
        self.ended: dict[str, threading.Event] = {}
        self.unwound: list[str] = []

    def begin(self, begun: str, step: int) -> None:
        for name in begun:
            self.ended[name] = threading.Event()

            async def attempts(name: str = name) -> list[Trajectory]:
                try:
                    while not self.ended[name].is_set():
                        await anyio.sleep(0.002)
                finally:
                    self.unwound.append(name)
                return [attempt(name)]

            self.stream.begin(
                [{"task_id": name}],
                [TASKS[name]],
                attempts,
                step=step,
                generator=self.policy,
                progress=RolloutProgress(),
            )

    def end(self, which: str) -> None:
        for name in which:
            self.ended[name].set()
        under_way = {g.tasks[0].task_id: g.trajectories for g in self.stream.groups}
        wait([under_way[name] for name in which], timeout=20)

    def take(self, num_groups: int, step: int) -> str | None:
        return names(self.stream.take(num_groups, step))

    @property
    def left(self) -> str | None:
        return names(self.stream.groups)


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    engine = RolloutEngine({"sums": server})
    yield engine
    engine.close()


def num_serving() -> int:
    return sum(thread.name == "mcp-grpo-stream" for thread in threading.enumerate())


def test_a_slow_group_is_passed_over_until_the_bound_and_every_group_is_taken_once(engine: RolloutEngine) -> None:
    rollouts = Rollouts(engine, max_staleness=2)
    rollouts.begin("abcd", 0)
    rollouts.end("bcd")
    assert rollouts.take(2, 0) == "bc"
    rollouts.begin("ef", 1)
    rollouts.end("ef")
    assert rollouts.take(2, 1) == "de"
    rollouts.begin("gh", 2)
    rollouts.end("gh")
    threading.Timer(0.2, rollouts.ended["a"].set).start()
    assert rollouts.take(2, 2) == "af"  # `a` was waited for
    assert rollouts.left == "gh"
    assert num_serving() <= 1
    rollouts.stream.drop()


def test_one_thread_serves_as_long_as_anything_is_under_way_and_no_longer(engine: RolloutEngine) -> None:
    rollouts = Rollouts(engine, max_staleness=3)
    for step, name in enumerate("ab"):
        rollouts.begin(name, step)
        assert num_serving() == 1
        rollouts.end(name)
        rollouts.stream.wait()
        rollouts.stream._thread.join(20)
        assert num_serving() == 0
    assert rollouts.policy.threads == {"mcp-grpo-stream"}


def test_what_is_dropped_ends_before_the_servers_do(engine: RolloutEngine) -> None:
    rollouts = Rollouts(engine, max_staleness=2)
    rollouts.begin("abc", 0)
    rollouts.end("b")
    rollouts.stream.drop()
    assert sorted(rollouts.unwound) == ["a", "b", "c"]
    assert rollouts.left == ""
    assert num_serving() == 0
    rollouts.begin("d", 0)  # and the stream can be used again
    rollouts.end("d")
    assert rollouts.take(1, 0) == "d"


def test_what_breaks_a_group_comes_out_where_groups_are_taken(engine: RolloutEngine) -> None:
    rollouts = Rollouts(engine, max_staleness=2)
    rollouts.begin("a", 0)

    async def broken() -> list[Trajectory]:
        raise LookupError("no such thing")

    rollouts.stream.begin([], [TASKS["b"]], broken, step=0, generator=rollouts.policy, progress=RolloutProgress())
    with pytest.raises(LookupError, match="no such thing"):
        rollouts.take(2, 0)
    rollouts.stream.drop()
    rollouts.begin("c", 0)
    rollouts.stream.groups[0].trajectories.cancel()
    with pytest.raises(RolloutError, match="ended from outside"):
        rollouts.take(1, 0)
    rollouts.stream.drop()


def test_a_sampler_that_fails_ends_what_waits_for_it(engine: RolloutEngine) -> None:
    rollouts = Rollouts(engine, max_staleness=2)
    rollouts.policy.error = SamplerError("The vLLM engine failed")
    rollouts.begin("a", 0)
    with pytest.raises(SamplerError, match="The vLLM engine failed"):
        rollouts.take(1, 0)
    rollouts.stream.drop()
    assert rollouts.unwound == ["a"]
    assert num_serving() == 0


def test_staleness_is_told_by_its_mean_its_maximum_and_what_was_carried_over() -> None:
    found = staleness_metrics([attempt("a"), attempt("b", 1), attempt("c", 3), attempt("d", 2)])
    assert found == {"rollout/staleness": 1.5, "rollout/staleness_max": 3.0, "rollout/carried_fraction": 0.5}
    assert staleness_metrics([]) == {}
