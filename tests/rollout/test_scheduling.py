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
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.processes import left_behind
from helpers.runs import settings

from mcp_grpo.config import check_without_servers
from mcp_grpo.errors import SettingsError
from mcp_grpo.learning import pace_metrics, rollout_columns, token_columns, trajectory_metrics
from mcp_grpo.rollout import (
    Generation,
    Limits,
    Renderer,
    RolloutEngine,
    RolloutProgress,
    Sampling,
    Schedule,
    TurnHistory,
    progress,
    progress_bar,
)
from mcp_grpo.types import Segment, StopReason, Task, Trajectory


TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER))
LIMITS = Limits(max_turns=6, max_completion_length=8000)
SERVER = {"command": sys.executable, "args": [str(Path(__file__).parent.parent / "servers" / "slow.py")]}


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
        until.result(timeout=60)


def tasks(*contents: str) -> list[Task]:
    """One task each; attempts at the same one are told apart by what follows `as`."""
    return [
        Task(task_id=content, prompt=({"role": "user", "content": f"{content} as {index}"},))
        for index, content in enumerate(contents)
    ]


@contextmanager
def opened(**extension: Any) -> Iterator[RolloutEngine]:
    engine = RolloutEngine({"slow": {**SERVER, "x-mcp-grpo": extension}})
    try:
        yield engine
    finally:
        engine.close()
    assert not left_behind()


def rolled_out(
    engine: RolloutEngine, attempts: Sequence[Task], told: Told | None = None, **schedule: Any
) -> list[Trajectory]:
    return engine.roll_out(
        attempts, renderer=RENDERER, generator=told or Told(), limits=LIMITS, schedule=Schedule(**schedule)
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


@pytest.mark.parametrize("reason", [StopReason.DEADLINE, StopReason.STRAGGLER, StopReason.SERVER_FAILED])
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
    with opened() as engine:
        few = rolled_out(engine, tasks(*["add 2"] * 12), told, max_concurrent=3)
        rolled_out(engine, tasks(*["add 2"] * 12), everyone)
    assert told.most_under_way == 3
    assert everyone.most_under_way > 3
    assert set(stops(few)) == {StopReason.ANSWERED}
    waited = [trajectory.queue_seconds for trajectory in few]
    assert waited == sorted(waited)
    assert waited[-1] > few[0].seconds
    assert trajectory_metrics(few)["rollout/queue_seconds"].total == pytest.approx(sum(waited))


@pytest.mark.parametrize("isolation", ["shared", "meta"])
def test_a_batch_that_runs_out_of_time_gives_whole_trajectories_and_the_next_one_is_fine(isolation: str) -> None:
    with opened(isolation=isolation) as engine:
        done = rolled_out(engine, tasks("add 1", "wait", "add 0", "muse"), max_concurrent=1, batch_timeout=2.0)
        again = rolled_out(engine, tasks("add 1", "add 2"), batch_timeout=30.0)
    # There is one place, and the second has it to the end.
    assert stops(done) == [StopReason.ANSWERED, *[StopReason.DEADLINE] * 3]
    assert [trajectory.num_turns for trajectory in done] == [2, 1, 0, 0]
    assert {trajectory.error for trajectory in done[1:]} == {done[1].error}
    assert "`batch_timeout`" in (done[1].error or "")
    assert "2 s" in (done[1].error or "")
    assert all(trajectory.prompt_ids for trajectory in done)
    assert trajectory_metrics(done)["rollout/failed_fraction"].total == 3
    columns = rollout_columns(done, filler_id=7)
    assert all(columns["completion_ids"])
    assert [any(mask) for mask in columns["env_mask"]] == [True, False, False, False]
    assert stops(again) == [StopReason.ANSWERED] * 2


def test_waiting_for_a_session_ends_with_the_batch() -> None:
    with opened(isolation="exclusive", pool_size=1, spares=0) as engine:
        done = rolled_out(engine, tasks("wait", "add 1", "add 1"), batch_timeout=1.0)
        again = rolled_out(engine, tasks("add 1"))
    assert stops(done) == [StopReason.DEADLINE] * 3
    assert [trajectory.num_turns for trajectory in done] == [1, 0, 0]
    assert stops(again) == [StopReason.ANSWERED]


@pytest.mark.parametrize("straggler", ["wait", "muse"], ids=["in a tool call", "while it is sampled"])
@pytest.mark.parametrize("isolation", ["shared", "meta"])
def test_stragglers_are_cut_and_left_out_and_the_next_batch_is_fine(straggler: str, isolation: str) -> None:
    progress = RolloutProgress()
    with opened(isolation=isolation) as engine:
        before = num_tasks(engine)
        done = engine.roll_out(
            tasks(straggler, *["add 1"] * 8, straggler),
            renderer=RENDERER,
            generator=Told(),
            limits=LIMITS,
            schedule=Schedule(straggler_quantile=0.8),
            progress=progress,
        )
        again = rolled_out(engine, tasks(*["add 2"] * 10))
        assert num_tasks(engine) == before
    cut, others = [done[0], done[-1]], done[1:-1]
    assert stops(cut) == [StopReason.STRAGGLER] * 2
    assert stops(others) == [StopReason.ANSWERED] * 8
    assert not any(trajectory.is_failed or trajectory.is_learnt_from or trajectory.error for trajectory in cut)
    assert not any(any(trajectory.loss_mask) for trajectory in cut)
    assert progress.num_calls == 0
    assert progress.num_done == progress.num_trajectories == 10
    figures = trajectory_metrics(done)
    assert figures["rollout/straggler_fraction"].total == figures["stop/straggler"].total == 2
    assert figures["rollout/left_out_fraction"].total == 2
    assert figures["rollout/failed_fraction"].total == 0
    assert stops(again) == [StopReason.ANSWERED] * 10


def test_the_session_that_a_straggler_had_to_itself_is_replaced() -> None:
    with opened(isolation="exclusive", pool_size=2, spares=0) as engine:
        done = rolled_out(engine, tasks("wait", "add 1"), straggler_quantile=0.5)
        again = rolled_out(engine, tasks("add 1", "add 1"))
    assert stops(done) == [StopReason.STRAGGLER, StopReason.ANSWERED]
    assert stops(again) == [StopReason.ANSWERED] * 2


def test_what_is_still_in_the_queue_when_stragglers_are_cut_does_not_start() -> None:
    told = Told()
    with opened() as engine:
        done = rolled_out(
            engine, tasks("add 1", "add 1", "wait", "add 1"), told, max_concurrent=1, straggler_quantile=0.5
        )
    assert stops(done) == [StopReason.ANSWERED] * 2 + [StopReason.STRAGGLER] * 2
    assert told.started == ["add 1 as 0", "add 1 as 1"]
    assert done[-1].prompt_ids
    like = rollout_columns(done, filler_id=7)["completion_ids"][-1]
    assert like == [7]


def test_out_of_time_comes_before_being_cut() -> None:
    with opened() as engine:
        done = rolled_out(engine, tasks("wait", "wait", "wait"), batch_timeout=0.5, straggler_quantile=0.3)
    assert stops(done) == [StopReason.DEADLINE] * 3


@pytest.mark.parametrize(
    ("quantile", "num_done", "num_all", "expected"),
    [(0.9, 9, 10, True), (0.9, 8, 10, False), (0.55, 55, 100, True), (1.0, 99, 100, False), (None, 10, 10, False)],
)
def test_the_share_that_must_have_ended_is_exact(
    quantile: float | None, num_done: int, num_all: int, expected: bool
) -> None:
    assert Schedule(straggler_quantile=quantile).has_stragglers(num_done, num_all) == expected


def test_progress_counts_what_was_done_over_several_rollouts() -> None:
    progress = RolloutProgress()
    assert progress.seconds_left is None
    assert progress.tokens_per_second == 0
    with opened() as engine:
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
    figures = pace_metrics(progress)
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
    assert capsys.readouterr().err.rstrip(" ").endswith("\r")
    assert "mcp-grpo-progress" not in {thread.name for thread in threading.enumerate()}


def test_no_bar_is_drawn_where_there_is_to_be_none(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar(RolloutProgress(), total=8, disable=True):
        assert "mcp-grpo-progress" not in {thread.name for thread in threading.enumerate()}
    assert capsys.readouterr().err == ""


def test_columns_of_a_straggler_hold_nothing_to_learn_from() -> None:
    columns = token_columns([made("a", 2), made("a", 2, StopReason.STRAGGLER)], torch.zeros(2, 2))
    assert columns["turn_ids"].tolist() == [[0, 1], [-1, -1]]


@pytest.mark.parametrize(
    "setting",
    [
        {"max_concurrent_trajectories": 0},
        {"batch_timeout": 0.0},
        {"straggler_policy": "drop"},
        {"straggler_quantile": 0.0},
        {"straggler_quantile": 1.1},
    ],
    ids=str,
)
def test_a_schedule_that_cannot_be_is_refused(tmp_path: Path, setting: dict) -> None:
    with pytest.raises(SettingsError, match=next(iter(setting))):
        settings(tmp_path, **setting)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_concurrent_trajectories": 4},
        {"batch_timeout": 60.0},
        {"straggler_policy": "cut"},
        {"straggler_quantile": 0.5},
    ],
    ids=str,
)
def test_a_schedule_is_refused_where_there_are_no_servers(tmp_path: Path, setting: dict) -> None:
    with pytest.raises(SettingsError, match=next(iter(setting))):
        check_without_servers(settings(tmp_path, **setting))


def test_only_batches_have_a_deadline_and_only_what_is_trained_on_is_cut(tmp_path: Path) -> None:
    args = settings(tmp_path, batch_timeout=60.0, straggler_policy="cut", straggler_quantile=0.5)
    trained = args.schedule(is_batch=True, is_training=True)
    assert trained == Schedule(max_concurrent=8, batch_timeout=60.0, straggler_quantile=0.5)
    assert args.schedule(is_batch=True, is_training=False) == replace(trained, straggler_quantile=None)
    assert args.schedule(is_batch=False, is_training=True) == Schedule(max_concurrent=8)
    waiting = settings(tmp_path, max_concurrent_trajectories=3)
    assert waiting.schedule(is_batch=True, is_training=True) == Schedule(max_concurrent=3)
