"""The order and the end of trajectories that share a batch: nobody waits for ever, and nothing is left behind."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.marks import full
from helpers.processes import left_behind
from servers.slow import server

from mcp_grpo.learning import rollout_columns, token_columns
from mcp_grpo.metrics import trajectory_metrics
from mcp_grpo.rollout import Limits, Renderer, RolloutEngine, RolloutProgress, TurnHistory, progress, progress_bar
from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.types import Segment, StopReason, Task, Trajectory


TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER))
LIMITS = Limits(max_turns=6, max_completion_length=8000)
HERE = {"server": server}  # in this process, where it starts at once
SERVER = {"command": sys.executable, "args": [str(Path(__file__).parents[2] / "servers" / "slow.py")]}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call><|im_end|>"


class Told:
    """Does what the task says: `add 3` adds in each of 3 turns and answers; `wait` calls that; `muse` never says a word."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.seeds: dict[tuple[str, int], int] = {}
        self.most_under_way = 0
        self._under_way: set[str] = set()

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        text = TOKENIZER.decode(prompt_ids)
        name = text.split("<|im_start|>user\n")[1].split("<|im_end|>")[0]
        task, turn = name.split(" as ")[0], text.count("<tool_response>")
        self.seeds[name, turn] = sampling.seed
        if turn == 0:
            self.started.append(name)
        self._under_way.add(name)
        self.most_under_way = max(self.most_under_way, len(self._under_way))
        if task == "muse":
            await anyio.sleep_forever()
        said = call("wait") if task == "wait" else "done<|im_end|>"
        if task.startswith("add") and turn < int(task.split()[1]):
            said = call("add", a=1, b=turn)
        if said.startswith("done"):
            self._under_way.discard(name)
        ids = tuple(TOKENIZER(said, add_special_tokens=False)["input_ids"])
        return Generation(token_ids=ids, logprobs=(-0.5,) * len(ids), finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        until.result(timeout=200)


def tasks(*contents: str) -> list[Task]:
    """One task each; attempts at the same one are told apart by what follows `as`."""
    return [
        Task(task_id=content, prompt=({"role": "user", "content": f"{content} as {index}"},))
        for index, content in enumerate(contents)
    ]


@contextmanager
def opened(of: dict[str, Any] = SERVER, **extension: Any) -> Iterator[RolloutEngine]:
    engine = RolloutEngine({"slow": {**of, "x-mcp-grpo": extension}})
    try:
        yield engine
    finally:
        engine.close()
    assert not left_behind()


def rolled_out(
    engine: RolloutEngine,
    attempts: Sequence[Task],
    told: Told | None = None,
    limits: Limits = LIMITS,
    max_concurrent: int | None = None,
) -> list[Trajectory]:
    return engine.roll_out(
        attempts,
        renderer=RENDERER,
        generator=told or Told(),
        limits=limits,
        room=None if max_concurrent is None else anyio.Semaphore(max_concurrent),
    )


def stops(trajectories: Sequence[Trajectory]) -> list[StopReason]:
    return [trajectory.stop_reason for trajectory in trajectories]


def num_tasks(engine: RolloutEngine) -> int:
    """Coroutines on the engine's loop."""

    async def count() -> int:
        return len(anyio.get_running_tasks())

    return engine._portal.call(count)


def made(task_id: str, num_turns: int, stop_reason: StopReason = StopReason.ANSWERED) -> Trajectory:
    return Trajectory(
        task=Task(task_id=task_id, prompt=()),
        prompt_ids=(1,),
        segments=(Segment(token_ids=(1,), logprobs=(-1.0,)),) * num_turns,
        messages=({"role": "assistant", "content": ""},),
        exchanges=(),
        stop_reason=stop_reason,
    )


def test_those_that_took_most_turns_before_start_first_and_are_sampled_as_in_any_order() -> None:
    batch = tasks("add 0", "add 1", "add 5", "add 1", "add 3")
    first, second = Told(), Told()
    with opened() as engine:
        in_order = rolled_out(engine, batch, first, max_concurrent=1)
        unknown = replace(batch[3], task_id="unknown")  # counts as the mean of the known, 13 / 4 turns
        sorted_batch = [*batch[:3], unknown, batch[4]]
        by_length = rolled_out(engine, sorted_batch, second, max_concurrent=1)
    assert first.started == [f"{task.task_id} as {index}" for index, task in enumerate(batch)]
    assert second.started == ["add 5 as 2", "add 3 as 4", "add 1 as 3", "add 1 as 1", "add 0 as 0"]
    assert second.seeds == first.seeds
    assert [t.segments for t in by_length] == [t.segments for t in in_order]
    assert [t.task for t in by_length] == sorted_batch


def test_tasks_of_equal_length_keep_the_order_of_the_batch() -> None:
    history = TurnHistory()
    for task_id in "ab":
        history.add(made(task_id, 2))
    batch = [made(task_id, 1).task for task_id in ("b", "new", "a", "b")]
    assert history.longest_first(batch) == TurnHistory().longest_first(batch) == [0, 1, 2, 3]


def test_the_turns_of_a_task_are_averaged_and_recent_ones_count_more() -> None:
    history = TurnHistory(decay=0.5)
    for num_turns in (8, 4, 2):
        history.add(made("a", num_turns))
    assert history.expected("a") == pytest.approx(4.0)
    assert history.expected("unknown") == pytest.approx(4.0)
    restored = TurnHistory()
    restored.load_state_dict(history.state_dict())
    assert restored.expected("a") == history.expected("a")


@pytest.mark.parametrize("reason", [StopReason.DEADLINE, StopReason.SERVER_FAILED])
def test_an_attempt_that_was_broken_off_never_makes_a_task_look_shorter(reason: StopReason) -> None:
    history = TurnHistory(decay=0.5)
    history.add(made("never started", 0, reason))
    assert history.state_dict() == {}
    history.add(made("a", 4))
    history.add(made("a", 1, reason))
    assert history.expected("a") == 4
    history.add(made("a", 8, reason))
    assert history.expected("a") == 6


def test_no_more_trajectories_are_under_way_than_allowed_and_waiting_is_counted() -> None:
    told, everyone = Told(), Told()
    with opened(HERE) as engine:
        few = rolled_out(engine, tasks(*["add 2"] * 12), told, max_concurrent=3)
        rolled_out(engine, tasks(*["add 2"] * 12), everyone)
    assert told.most_under_way == 3
    assert everyone.most_under_way > 3
    assert set(stops(few)) == {StopReason.ANSWERED}
    waited = [trajectory.queue_seconds for trajectory in few]
    assert waited == sorted(waited)
    assert waited[-1] > few[0].seconds
    assert trajectory_metrics(few)["rollout/queue_seconds"].total == pytest.approx(sum(waited))


def test_rollouts_at_the_same_time_share_the_places_they_are_given() -> None:
    told, room = Told(), anyio.Semaphore(3)
    how: dict[str, Any] = {"renderer": RENDERER, "generator": told, "limits": LIMITS, "room": room}
    with opened(HERE) as engine:
        beside = engine.start(partial(engine.attempt_all, tasks(*["add 2"] * 6), **how))
        done = engine.roll_out(tasks(*["add 1"] * 6), **how)
        done += beside.result(timeout=60)
    assert told.most_under_way == 3
    assert stops(done) == [StopReason.ANSWERED] * 12


@pytest.mark.full
@pytest.mark.parametrize("isolation", ["shared", "meta"])
def test_two_thousand_trajectories_come_back_in_order_and_leave_nothing(isolation: str) -> None:
    number = 2048
    batch = tasks(*(f"add {index % 3 + 1}" for index in range(number)))
    with opened(isolation=isolation, pool_size=2) as engine:
        rolled_out(engine, batch[:8])  # opens what stays open
        before, processes = num_tasks(engine), len(left_behind())
        done = rolled_out(engine, batch)
        assert num_tasks(engine) <= before + 2  # each session may have begun to be watched
        assert len(left_behind()) == processes
    assert [trajectory.task for trajectory in done] == batch
    assert stops(done) == [StopReason.ANSWERED] * number
    for index, trajectory in enumerate(done):
        sums = [exchange.result.text for exchange in trajectory.exchanges]
        assert sums == [str(1 + turn) for turn in range(index % 3 + 1)]


@pytest.mark.parametrize("kind", ["wait", full("muse")], ids=["in a tool call", "while it is sampled"])
@pytest.mark.parametrize("isolation", ["shared", full("meta")])
@pytest.mark.full
def test_trajectories_that_run_out_of_time_are_left_out_and_the_next_batch_is_fine(kind: str, isolation: str) -> None:
    progress = RolloutProgress()
    with opened(isolation=isolation) as engine:
        before = num_tasks(engine)
        done = engine.roll_out(
            tasks(kind, *["add 1"] * 8, kind),
            renderer=RENDERER,
            generator=Told(),
            limits=replace(LIMITS, timeout=3.0),
            progress=progress,
        )
        again = rolled_out(engine, tasks(*["add 2"] * 10))
        assert num_tasks(engine) == before
    late, others = [done[0], done[-1]], done[1:-1]
    assert stops(late) == [StopReason.DEADLINE] * 2
    assert stops(others) == [StopReason.ANSWERED] * 8
    assert not any(trajectory.is_learnt_from or any(trajectory.loss_mask) for trajectory in late)
    assert progress.num_calls == 0
    assert progress.num_done == progress.num_trajectories == 10
    metrics = trajectory_metrics(done)
    assert metrics["rollout/failed_fraction"].total == metrics["rollout/left_out_fraction"].total == 2
    columns = rollout_columns(done, filler_id=7)
    assert all(columns["completion_ids"])
    assert [any(mask) for mask in columns["env_mask"]] == [False, *[True] * 8, False]
    assert stops(again) == [StopReason.ANSWERED] * 10


@pytest.mark.full
def test_the_session_that_a_late_trajectory_had_to_itself_is_replaced_and_waiting_for_it_does_not_count() -> None:
    with opened(isolation="exclusive", pool_size=1, spares=0) as engine:
        done = rolled_out(engine, tasks("wait", "add 1", "add 1"), limits=replace(LIMITS, timeout=3.0))
        again = rolled_out(engine, tasks("add 1"))
    assert stops(done) == [StopReason.DEADLINE, StopReason.ANSWERED, StopReason.ANSWERED]
    assert stops(again) == [StopReason.ANSWERED]


def test_progress_counts_what_was_done_over_several_rollouts() -> None:
    progress = RolloutProgress()
    assert progress.seconds_left is None
    assert progress.tokens_per_second == 0
    with opened(HERE) as engine:
        for _ in range(2):
            done = engine.roll_out(
                tasks("add 1", "add 2"), renderer=RENDERER, generator=Told(), limits=LIMITS, progress=progress
            )
    done_after = progress.seconds
    num_tokens = sum(sum(trajectory.sampled_mask) for trajectory in done)
    assert (progress.num_trajectories, progress.num_done, progress.num_turns) == (4, 4, 10)
    assert progress.num_tokens == 2 * num_tokens
    assert progress.seconds == done_after  # the clock stands still
    assert progress.seconds_left == 0
    figures = progress.metrics()
    assert figures["rollout/tokens_per_second"].total / figures["rollout/tokens_per_second"].count == pytest.approx(
        progress.tokens_per_second
    )
    assert figures["rollout/seconds"].total == progress.seconds > 0


def test_what_is_left_is_estimated_from_what_is_done() -> None:
    progress = RolloutProgress()
    with progress.rolling_out(8), progress.calling(3):
        progress.num_done = 2
        assert re.fullmatch(r"0 turns, 0 tokens/s, 3 tools in flight, \d+ s left", str(progress))
    assert progress.seconds_left == pytest.approx(3 * progress.seconds)
    assert progress.num_calls == 0


def test_the_bar_shows_how_far_it_is_and_goes_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "REFRESH_SECONDS", 0.01)
    figures = RolloutProgress()
    shown, deadline = "", time.monotonic() + 10
    with figures.rolling_out(8), progress_bar(figures, total=8):
        figures.num_done, figures.num_turns = 3, 5
        while not ("3/8" in shown and "5 turns" in shown) and time.monotonic() < deadline:
            time.sleep(0.01)
            shown += capsys.readouterr().err
    assert "Rolling out: 3/8" in shown
    assert "5 turns, 0 tokens/s, 0 tools in flight" in shown
    left = capsys.readouterr().err.removesuffix("\x1b[A")  # back up, where a bar of another test is above
    assert left.rstrip(" ").endswith("\r")
    assert "mcp-grpo-progress" not in {thread.name for thread in threading.enumerate()}


def test_no_bar_is_drawn_where_there_is_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(RolloutProgress(), total=8, disable=True):
        assert "mcp-grpo-progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr().err == ""


def test_columns_of_a_failed_trajectory_hold_nothing_to_learn_from() -> None:
    columns = token_columns([made("a", 2), made("a", 2, StopReason.DEADLINE)], torch.zeros(2, 2))
    assert columns["turn_ids"].tolist() == [[0, 1], [-1, -1]]
