import contextlib

import anyio
import pytest

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.sessions import breaker
from mcp_grpo.tools.sessions.breaker import MAX_FAILURES, Breaker


pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("impatient")]


async def fail(guard: Breaker, reason: str = "no", seconds: float = 0.0) -> None:
    with contextlib.suppress(ToolServerError):
        async with guard.attempt():
            await anyio.sleep(seconds)
            raise ToolServerError(reason)


async def test_a_server_in_good_health_is_started_at_once_and_many_times_together() -> None:
    guard = Breaker("s")
    with anyio.fail_after(30):
        async with guard.attempt(), guard.attempt():
            pass
    assert guard.error is None


async def test_it_opens_after_many_failures_in_a_row_and_says_why() -> None:
    guard = Breaker("s")
    for _ in range(MAX_FAILURES - 1):
        await fail(guard)
    assert guard.error is None
    await fail(guard, "out of memory")
    assert "'s' has failed 7 times in a row" in str(guard.error)
    assert "out of memory" in str(guard.error)


async def test_each_failure_is_followed_by_a_longer_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker.random, "uniform", lambda low, high: high)
    guard, pauses = Breaker("s"), []
    for _ in range(4):
        await fail(guard)
        pauses.append(guard._not_before - anyio.current_time())
    assert pauses == pytest.approx([0.01, 0.02, 0.04, 0.08], abs=0.005)


async def test_pauses_are_jittered() -> None:
    guards = [Breaker("s") for _ in range(20)]
    for guard in guards:
        await fail(guard)
    assert len({round(guard._not_before, 6) for guard in guards}) > 10


async def test_an_open_breaker_lets_one_probe_through_at_a_time() -> None:
    guard, under_way, most = Breaker("s"), 0, 0
    for _ in range(MAX_FAILURES):
        await fail(guard)

    async def probe() -> None:
        nonlocal under_way, most
        async with guard.attempt():
            under_way += 1
            most = max(most, under_way)
            await anyio.sleep(0.01)
            under_way -= 1

    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(probe)
    assert most == 1


async def test_a_probe_that_fails_keeps_it_open() -> None:
    guard = Breaker("s")
    for _ in range(MAX_FAILURES + 1):
        await fail(guard)
    assert guard.error is not None


async def test_a_start_that_works_does_not_make_up_for_sessions_that_never_answered() -> None:
    guard = Breaker("s")
    for _ in range(MAX_FAILURES):
        async with guard.attempt():
            pass
        guard.broke(ToolServerError("crashed"), since=anyio.current_time())
    assert guard.error is not None


async def test_the_first_answer_closes_it() -> None:
    guard = Breaker("s")
    for _ in range(MAX_FAILURES):
        await fail(guard)
    guard.answered()
    assert guard.error is None
    assert guard.num_failures == 0


async def test_a_start_that_took_long_to_fail_opens_it_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "SLOW_START", 0.01)
    guard = Breaker("s")
    await fail(guard, seconds=0.02)
    assert guard.error is not None


async def test_what_goes_down_together_is_one_failure() -> None:
    guard = Breaker("s")
    async with anyio.create_task_group() as tasks:
        for _ in range(MAX_FAILURES):
            tasks.start_soon(fail, guard, "down", 0.01)
    assert guard.num_failures == 1


async def test_whoever_waits_out_a_pause_is_woken_by_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker, "FIRST_DELAY", 60.0)
    guard = Breaker("s")
    await fail(guard)

    async def probe() -> None:
        async with guard.attempt():
            pass

    with anyio.fail_after(30):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(probe)
            await anyio.sleep(0.05)
            guard.answered()
