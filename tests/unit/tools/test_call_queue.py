from typing import Any

import anyio
import pytest

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.sessions.call_queue import CallQueue
from mcp_grpo.tools.sessions.session import Session


pytestmark = pytest.mark.anyio


def sessions(count: int) -> list[Session]:
    return [object() for _ in range(count)]  # type: ignore[misc]  (a queue only hands them out)


async def settled() -> None:
    for _ in range(5):
        await anyio.sleep(0)


async def test_the_least_loaded_session_comes_first() -> None:
    first, second = sessions(2)
    queue = CallQueue(3)
    queue.add(first)
    queue.add(second)
    given = [await queue.acquire("t") for _ in range(4)]
    assert given == [first, second, first, second]
    queue.release(second)
    queue.release(second)
    assert await queue.acquire("t") is second


async def test_no_session_gets_more_than_its_places_and_whoever_waits_is_served_when_one_is_given_back() -> None:
    (session,) = sessions(1)
    queue, served = CallQueue(2), []
    queue.add(session)

    async def one(name: str) -> None:
        await queue.acquire(name)
        served.append(name)

    async with anyio.create_task_group() as tasks:
        for name in "abc":
            tasks.start_soon(one, name)
        await settled()
        assert served == ["a", "b"]
        queue.release(session)
        await settled()
        assert served == ["a", "b", "c"]


async def test_a_trajectory_with_many_calls_does_not_hold_up_the_others() -> None:
    (session,) = sessions(1)
    queue, served = CallQueue(1), []
    queue.add(session)

    async def one(name: str) -> None:
        await queue.acquire(name)
        served.append(name)
        queue.release(session)

    await queue.acquire("first")
    async with anyio.create_task_group() as tasks:
        for name in ["greedy"] * 5 + ["modest", "shy"]:
            tasks.start_soon(one, name)
        await settled()
        queue.release(session)
    assert served[:3] == ["greedy", "modest", "shy"]
    assert len(served) == 7


async def test_whoever_waits_gets_a_session_that_comes_later() -> None:
    (session,) = sessions(1)
    queue, given = CallQueue(1), []

    async def one() -> None:
        given.append(await queue.acquire("t"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await settled()
        queue.add(session)
    assert given == [session]


async def test_without_a_session_all_who_wait_and_all_who_come_fail_until_there_is_one() -> None:
    (session,) = sessions(1)
    queue, errors = CallQueue(1), []

    async def one() -> None:
        with pytest.raises(ToolServerError, match="out of order"):
            await queue.acquire("t")
        errors.append(1)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
        await settled()
        queue.fail(ToolServerError("out of order"))
    await one()
    assert len(errors) == 3
    queue.add(session)
    assert await queue.acquire("t") is session


async def test_a_failure_is_no_matter_while_another_session_is_there() -> None:
    (session,) = sessions(1)
    queue = CallQueue(1)
    queue.add(session)
    queue.fail(ToolServerError("out of order"))
    assert await queue.acquire("t") is session


@pytest.mark.parametrize("is_served", [False, True])
async def test_a_place_is_not_lost_when_whoever_waits_for_it_is_cancelled(is_served: bool) -> None:
    (session,) = sessions(1)
    queue = CallQueue(1)
    queue.add(session)
    await queue.acquire("a")
    scope = anyio.CancelScope()

    async def one() -> None:
        with scope:
            queue.release(await queue.acquire("b"))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        await settled()
        if is_served:  # in the same instant as it is cancelled
            queue.release(session)
        scope.cancel()
    if not is_served:
        queue.release(session)
    with anyio.fail_after(30):
        assert await queue.acquire("c") is session


def test_nothing_is_handed_out_that_was_removed() -> None:
    first, second = sessions(2)
    queue = CallQueue(1)
    queue.add(first)
    queue.add(second)
    queue.remove(first)
    queue.remove(first)

    async def one() -> Any:
        return await queue.acquire("t")

    assert anyio.run(one) is second
