"""A server that floods its reader holds up no other, and does not eat the memory."""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from helpers.stalls import longest_stall

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

SERVERS = Path(__file__).parents[2] / "servers"
Rogue = Callable[..., ServerConfig]


def hostile(*args: str, **options: Any) -> ServerConfig:
    options = {"protocol": "legacy", "call_timeout": 5.0, "max_result_bytes": 8_000_000} | options
    command = (str(SERVERS / "hostile.py"), *args)
    return ServerConfig(name="hostile", transport="stdio", command=sys.executable, args=command, **options)


def do(how: str) -> ToolCall:
    return ToolCall(name="do", arguments={"how": how})


ECHO = ToolCall(name="echo", arguments={"text": "hi"})


async def median_call(pool: ToolPool, seconds: float) -> float:
    """How long a call takes, by the calls of some seconds."""
    taken: list[float] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end or not taken:
        start = time.perf_counter()
        assert (await pool.call(ECHO)).text == "hi"
        taken.append(time.perf_counter() - start)
        await anyio.sleep(0.01)
    return statistics.median(taken)


@pytest.mark.parametrize(
    "how",
    ["lines", "empty lines", "objects", "logs", "replies", "notes", "pings", "unread pings", "long line", "stderr"],
)
@pytest.mark.full
async def test_a_flood_holds_up_nobody_and_is_not_kept(how: str, rogue: Rogue) -> None:
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    async with ToolPool([hostile(call_timeout=2.0), rogue()]) as pool, longest_stall() as stall:
        quiet = await median_call(pool, 0.2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.call, do(how))
            await anyio.sleep(0.5)
            median = await median_call(pool, 1.0)
            grown = process.memory_info().rss - before
            tasks.cancel_scope.cancel()
        assert stall() < 0.6
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert median < max(0.1, 10 * quiet)  # it was 400 times as long
    assert grown < 50e6


@pytest.mark.full
async def test_the_pings_of_a_server_that_does_not_read_the_replies_are_not_read_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_grpo.tools.transports.share.CREDIT", 1e9)  # not even when it is not slowed down
    count = tmp_path / "count"
    async with (
        ToolPool([hostile("0", str(count), call_timeout=60.0)]) as pool,
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(pool.call, do("unread pings"))
        await anyio.sleep(1)
        with anyio.fail_after(30):
            before = -1
            while before != (before := int(count.read_text())):
                await anyio.sleep(1)
        tasks.cancel_scope.cancel()


async def test_very_many_parts_are_read_as_one_and_very_many_values_are_too_much() -> None:
    async with ToolPool([hostile()]) as pool, longest_stall() as stall:
        parts = await pool.call(do("parts"))
        more = await pool.call(do("many parts"))
        values = await pool.call(do("values"))
        assert stall() < 0.5
    assert parts.text == "\n".join(map(str, range(5_000)))
    for result in (more, values):
        assert result.kind is ResultKind.TOOL_ERROR
        assert "more than 50000 values" in result.text


async def test_a_log_in_json_with_an_id_is_nobodys_reply() -> None:
    async with ToolPool([hostile()]) as pool:
        result = await pool.call(do("logs with an id"))
    assert (result.kind, result.text) == (ResultKind.OK, "hello")


async def test_half_a_surrogate_pair_is_replaced() -> None:
    async with ToolPool([hostile()]) as pool:
        result = await pool.call(do("half a pair"))
    assert (result.kind, result.text) == (ResultKind.OK, "a\ufffd b")


async def test_five_thousand_tools_hold_up_nobody(make_task: Callable[..., Task]) -> None:
    async with longest_stall() as stall:
        start = time.monotonic()
        async with ToolPool([hostile("5000")]) as pool:
            assert time.monotonic() - start < 10
            assert len(pool.catalog.tools) == 5001
            async with pool.lease(make_task()) as lease:
                assert (await lease.call(do("well"))).text == "hello"
        assert stall() < 1.0


async def test_a_server_that_lists_too_much_is_refused() -> None:
    with pytest.raises(ToolServerError, match="the result has more than 50000 values"):
        async with ToolPool([hostile("20000")]):
            pass
    with pytest.raises(ToolServerError, match="'hostile' lists more than 10000 tools"):
        async with ToolPool([hostile("2000", "endless")]):
            pass
    with pytest.raises(ToolServerError, match="lists tools of more than 100000 bytes"):
        async with ToolPool([hostile("300", "endless", max_result_bytes=100_000)]):
            pass
