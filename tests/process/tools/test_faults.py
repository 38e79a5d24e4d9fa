"""Real processes that misbehave on purpose: each call comes back, typed and in time; the pool recovers; nothing is left."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import psutil
import pytest
from helpers.marks import full

from mcp_grpo.tools import Lease, ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


pytestmark = pytest.mark.anyio

Rogue = Callable[..., ServerConfig]
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))

DEADLINE = 1.0
GRACE = 1.0  # beyond its deadline that a call may take to come back
OK, TOOL, LATE, BROKEN = ResultKind.OK, ResultKind.TOOL_ERROR, ResultKind.TIMEOUT, ResultKind.SERVER_ERROR

FAULTS = {
    "exit": BROKEN,
    "partial_line": BROKEN,
    "close_stdout": BROKEN,
    "not_a_result": BROKEN,
    "no_content": BROKEN,
    "unknown_content": BROKEN,
    "malformed": BROKEN,
    "mute": LATE,
    "wrong_id": LATE,
    "progress": LATE,
    "stop_reading": LATE,
    "suspend": LATE,
    "error_reply": TOOL,
    "huge": TOOL,
    "huge_id_last": TOOL,
    "endless": TOOL,
    "garbage": OK,
    "bad_utf8": OK,
    "string_id": OK,
    "bad_structured": OK,
    "ask_client": OK,
    "stderr_flood": OK,
    "grandchild": OK,
    "change_tools": OK,
}


@asynccontextmanager
async def nothing_left() -> AsyncGenerator[None, None]:
    """Processes, file descriptors, threads and tasks are counted before and after."""
    process = psutil.Process()
    tasks, fds, threads = asyncio.all_tasks(), process.num_fds(), process.num_threads()
    children = {child.pid for child in process.children(recursive=True)}
    yield
    assert asyncio.all_tasks() == tasks
    with anyio.fail_after(30):  # the thread that waits for a child ends a moment after it
        while process.num_fds() > fds or process.num_threads() > threads:
            await anyio.sleep(0.01)
    assert {child.pid for child in process.children(recursive=True)} <= children


async def timed(lease: Lease, name: str, **arguments: Any) -> tuple[ToolResult, float]:
    start = time.monotonic()
    result = await lease.call(ToolCall(name=name, arguments=arguments))
    return result, time.monotonic() - start


async def recovered(pool: ToolPool) -> None:
    """The trajectories that come after succeed, maybe after one or two that find a process that does not react."""
    kind = None
    with anyio.fail_after(20):
        while kind is not OK:
            async with pool.lease(TASK) as lease:
                kind = (await timed(lease, "echo", text="hi"))[0].kind


SLOW = ("progress", "stop_reading", "suspend", "endless")  # others show as soon that a deadline holds


@pytest.mark.parametrize("fault", [full(each) if each in SLOW else each for each in FAULTS])
async def test_a_call_comes_back_typed_and_in_time_the_pool_recovers_and_nothing_is_left(
    fault: str, rogue: Rogue
) -> None:
    results: dict[str, tuple[ToolResult, float]] = {}

    async def call(isolation: Any) -> None:
        config = rogue(isolation=isolation, pool_size=1, spares=0, call_timeout=DEADLINE)
        async with ToolPool([config]) as pool:
            async with pool.lease(TASK) as lease:
                results[isolation] = await timed(lease, fault, text="x")
            await recovered(pool)

    async with nothing_left(), anyio.create_task_group() as pools:  # side by side, since most of it is waiting
        for isolation in ("shared", "exclusive", "meta"):
            pools.start_soon(call, isolation)
    assert {isolation: result.kind for isolation, (result, _) in results.items()} == dict.fromkeys(
        ("shared", "exclusive", "meta"), FAULTS[fault]
    )
    assert all(result.text for result, _ in results.values())
    assert max(seconds for _, seconds in results.values()) < DEADLINE + GRACE


@pytest.mark.full
async def test_calls_in_flight_come_back_when_their_process_is_killed_at_any_time(rogue: Rogue) -> None:
    """kill -9 at random moments, while forty trajectories call: no call is lost, mixed up or late."""
    chance = random.Random(0)
    config = rogue(pool_size=4, max_inflight=4, call_timeout=5.0)
    kinds: list[ResultKind] = []
    slowest, num_kills = 0.0, 0
    async with nothing_left(), ToolPool([config]) as pool:
        server = pool._servers["rogue"]

        async def trajectory(number: int) -> None:
            nonlocal slowest
            async with pool.lease(TASK) as lease:
                for index in range(25):
                    text = f"{number}-{index}"
                    result, _ = await timed(lease, "echo", text=text)
                    kinds.append(result.kind)
                    slowest = max(slowest, result.seconds)
                    assert result.text == text or result.kind is BROKEN

        async def kill() -> None:
            nonlocal num_kills
            while True:
                await anyio.sleep(chance.uniform(0.01, 0.1))
                alive = [session for session in server._sessions if session.is_alive]
                if alive:
                    with suppress(ProcessLookupError):  # it may be gone, and not be missed yet
                        os.kill(chance.choice(alive)._stdio.pid, signal.SIGKILL)
                        num_kills += 1

        with anyio.fail_after(100):
            async with anyio.create_task_group() as killing:
                killing.start_soon(kill)
                async with anyio.create_task_group() as tasks:
                    for number in range(40):
                        tasks.start_soon(trajectory, number)
                killing.cancel_scope.cancel()
        await recovered(pool)
    assert len(kinds) == 40 * 25
    assert set(kinds) <= {OK, BROKEN}
    assert kinds.count(OK) > 500
    assert num_kills >= 5
    assert slowest < 5.0 + GRACE


async def test_a_hundred_and_twenty_eight_calls_at_once_over_http_all_come_back(http_server: Any) -> None:
    config = http_server.config(max_inflight=128, read_only_tools=("meet",))
    async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
        with anyio.fail_after(60):
            results = await lease.call_all([ToolCall(name="meet", arguments={"people": 128})] * 128)
    assert {result.kind for result in results} == {OK}


async def test_twenty_megabytes_do_not_hold_up_the_event_loop(rogue: Rogue) -> None:
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            start = time.monotonic()
            await anyio.sleep(0.01)
            longest = max(longest, time.monotonic() - start)

    config = rogue(max_result_bytes=50_000_000)
    async with ToolPool([config]) as pool, pool.lease(TASK) as lease, anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        result, seconds = await timed(lease, "echo", text="x" * 20_000_000)
        tasks.cancel_scope.cancel()
    assert len(result.text) == 20_000_000
    assert seconds < 15  # in quadratic time it is half a minute
    assert longest < 5


@pytest.mark.full
async def test_a_process_that_is_suspended_is_ended_all_the_same(rogue: Rogue) -> None:
    async with nothing_left():
        start = time.monotonic()
        async with ToolPool([rogue(call_timeout=0.2)]) as pool, pool.lease(TASK) as lease:
            await timed(lease, "suspend")
            start = time.monotonic()
        assert time.monotonic() - start < 8
