import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import anyio
import anyio.from_thread
import pytest
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.errors import CatalogError, ToolServerError
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def in_process(server: MCPServer, **options: Any) -> list[ServerConfig]:
    return [ServerConfig(name="s", transport="in_process", server=server, **options)]


def make_server(*tools: Callable[..., Any]) -> MCPServer:
    server = MCPServer("s")
    for tool in tools:
        server.tool()(tool)
    return server


async def double(number: int) -> int:
    """Twice a number."""
    return 2 * number


async def fail(reason: str) -> str:
    """Fails."""
    raise ToolError(reason)


async def hang() -> str:
    """Never returns."""
    await anyio.sleep_forever()
    return "?"


async def test_a_tool_in_process_is_listed_and_called() -> None:
    async with ToolPool({"s": make_server(double)}) as pool:
        result = await pool.call(call("double", number=21))
        (tool,) = pool.catalog.tools
    assert (tool.name, tool.server, tool.description) == ("double", "s", "Twice a number.")
    assert (result.kind, result.text, result.structured, result.server) == (ResultKind.OK, "42", {"result": 42}, "s")


async def test_the_old_protocol_works_too() -> None:
    async with ToolPool(in_process(make_server(double), protocol="legacy")) as pool:
        assert (await pool.call(call("double", number=21))).text == "42"


async def test_a_failing_tool_is_an_observation() -> None:
    async with ToolPool({"s": make_server(fail)}) as pool:
        result = await pool.call(call("fail", reason="no bread"))
    assert result.kind is ResultKind.TOOL_ERROR
    assert "no bread" in result.text


async def test_an_unknown_tool_is_answered_with_the_names_of_the_others_nearest_first() -> None:
    async with ToolPool({"s": make_server(fail, hang, double)}) as pool:
        result = await pool.call(call("duble"))
    assert result.kind is ResultKind.UNKNOWN_TOOL
    assert result.text.startswith("There is no tool `duble`. The tools are: `double`,")


@pytest.mark.parametrize("arguments", [{"number": "three"}, {}, [1], None, "x"])
async def test_arguments_that_do_not_fit_never_reach_the_server(arguments: Any) -> None:
    seen: list[Any] = []

    async def record(number: int) -> str:
        """Remembers what it was called with."""
        seen.append(number)
        return "ok"

    async with ToolPool({"s": make_server(record)}) as pool:
        result = await pool.call(ToolCall(name="record", arguments=arguments))
    assert result.kind is ResultKind.INVALID_ARGUMENTS
    assert "number (integer, required)" in result.text
    assert seen == []


async def test_calls_that_change_nothing_run_at_the_same_time_and_come_back_in_order(
    make_task: Callable[..., Task],
) -> None:
    everyone = asyncio.Barrier(3)

    async def meet(name: str) -> str:
        """Returns once three are here."""
        await everyone.wait()
        return name

    servers = {"s": {"server": make_server(meet), "x-mcp-grpo": {"read_only_tools": ["meet"]}}}
    async with ToolPool(servers) as pool, pool.lease(make_task()) as lease:
        with anyio.fail_after(20):
            results = await lease.call_all([call("meet", name=name) for name in "abc"])
    assert [result.text for result in results] == ["a", "b", "c"]


async def test_no_more_calls_than_allowed_are_under_way_and_waiting_does_not_count() -> None:
    running = peak = 0

    async def work() -> str:
        """Takes most of its deadline."""
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await anyio.sleep(0.4)
        running -= 1
        return "done"

    async with ToolPool(in_process(make_server(work), max_inflight=2, call_timeout=1.5)) as pool:
        results: list[ResultKind] = []

        async def one() -> None:
            results.append((await pool.call(call("work"))).kind)

        async with anyio.create_task_group() as tasks:
            for _ in range(8):  # four times 0.4 s, in all more than one deadline
                tasks.start_soon(one)
    assert (peak, set(results)) == (2, {ResultKind.OK})


async def test_a_call_ends_at_its_deadline_and_the_server_stays_usable() -> None:
    async with ToolPool(in_process(make_server(hang, double), call_timeout=0.5)) as pool:
        result = await pool.call(call("hang"))
        after = await pool.call(call("double", number=1))
    assert (result.kind, after.kind) == (ResultKind.TIMEOUT, ResultKind.OK)
    assert "0.5 s" in result.text
    assert 0.5 <= result.seconds < 5


async def test_a_deadline_holds_even_for_a_function_that_blocks_its_thread() -> None:
    release = threading.Event()

    def block() -> str:
        """Blocks."""
        release.wait(60)
        return "?"

    async with ToolPool(in_process(make_server(block), call_timeout=0.1)) as pool:
        result = await pool.call(call("block"))
        assert not release.is_set()
        release.set()
    assert result.kind is ResultKind.TIMEOUT


async def test_a_cancelled_call_raises_and_leaves_the_session_usable() -> None:
    async with ToolPool({"s": make_server(hang, double)}) as pool:
        with anyio.move_on_after(0.1) as scope:
            await pool.call(call("hang"))
        assert scope.cancelled_caught
        assert (await pool.call(call("double", number=1))).text == "2"


async def test_only_the_tools_of_the_task_can_be_called(make_task: Callable[..., Task]) -> None:
    async with ToolPool({"s": make_server(double, fail)}) as pool, pool.lease(make_task(tools=("fail",))) as lease:
        assert [tool.name for tool in lease.tools] == ["fail"]
        result = await lease.call(call("double", number=1))
    assert result.kind is ResultKind.UNKNOWN_TOOL
    assert "double`." in result.text  # named as what was asked for, and not as what there is
    assert "`fail`" in result.text


async def test_tools_that_the_configuration_does_not_allow_are_not_there() -> None:
    async with ToolPool(in_process(make_server(double, fail), allowed_tools=("double",))) as pool:
        assert [tool.name for tool in pool.catalog.tools] == ["double"]
        assert (await pool.call(call("fail", reason="x"))).kind is ResultKind.UNKNOWN_TOOL


async def test_allowing_a_tool_that_is_not_offered_is_refused() -> None:
    with pytest.raises(CatalogError, match="`double`"):
        async with ToolPool(in_process(make_server(double), allowed_tools=("doubel",))):
            pass


async def test_a_lease_for_a_task_that_names_an_unknown_tool_is_refused(make_task: Callable[..., Task]) -> None:
    async with ToolPool({"s": make_server(double)}) as pool:
        with pytest.raises(CatalogError, match="'triple'"):
            async with pool.lease(make_task(tools=("triple",))):
                pass


async def test_two_servers_with_the_same_tool_are_told_apart() -> None:
    async def name_a() -> str:
        """a"""
        return "a"

    async def name_b() -> str:
        """b"""
        return "b"

    a, b = MCPServer("a"), MCPServer("b")
    a.tool(name="name")(name_a)
    b.tool(name="name")(name_b)
    async with ToolPool({"a": a, "b": b}) as pool:
        assert [(await pool.call(call(name))).text for name in ("a__name", "b__name")] == ["a", "b"]
        assert (await pool.call(call("name"))).kind is ResultKind.UNKNOWN_TOOL


async def test_an_error_of_the_user_leaves_the_pool_as_it_is() -> None:
    with pytest.raises(KeyError, match="mine"):
        async with ToolPool({"s": make_server(double)}):
            raise KeyError("mine")


async def test_no_task_is_left_after_closing() -> None:
    before = asyncio.all_tasks()
    async with ToolPool(in_process(make_server(hang, double), call_timeout=0.1)) as pool:
        await pool.call(call("hang"))
    assert asyncio.all_tasks() == before


async def test_a_call_in_flight_when_the_pool_closes_comes_back_as_the_servers_fault() -> None:
    started = anyio.Event()
    results: list[ResultKind] = []

    async def wait() -> str:
        """Says that it runs, and never returns."""
        started.set()
        await anyio.sleep_forever()
        return "?"

    async with anyio.create_task_group() as tasks, ToolPool({"s": make_server(wait)}) as pool:

        async def one() -> None:
            results.append((await pool.call(call("wait"))).kind)

        tasks.start_soon(one)
        await started.wait()
    assert results == [ResultKind.SERVER_ERROR]


async def test_a_pool_is_opened_once() -> None:
    pool = ToolPool({"s": make_server(double)})
    with pytest.raises(RuntimeError, match="not open"):
        _ = pool.catalog
    async with pool:
        with pytest.raises(RuntimeError, match="opened only once"):
            await pool.__aenter__()


def test_a_pool_runs_in_a_thread_of_its_own(rogue: Callable[..., ServerConfig]) -> None:
    with (
        anyio.from_thread.start_blocking_portal() as portal,
        portal.wrap_async_context_manager(ToolPool([rogue(), *in_process(make_server(double))])) as pool,
    ):
        assert portal.call(pool.call, call("double", number=2)).text == "4"
        assert portal.call(pool.call, call("echo", text="hi")).text == "hi"


async def test_a_server_object_that_cannot_start_is_named() -> None:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(server: MCPServer) -> Any:
        raise OSError("disk full")
        yield

    with pytest.raises(ToolServerError, match=r"'s' could not be opened: OSError: disk full"):
        async with ToolPool({"s": MCPServer("s", lifespan=lifespan)}):
            pass


async def test_a_server_that_is_late_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    from contextlib import asynccontextmanager

    @asynccontextmanager
    async def lifespan(server: MCPServer) -> Any:
        await anyio.sleep_forever()
        yield

    server = MCPServer("s", lifespan=lifespan)
    start = time.monotonic()
    with caplog.at_level(logging.WARNING), pytest.raises(ToolServerError, match=r"within 0\.1 s"):
        async with ToolPool(in_process(server, connect_timeout=0.1)):
            pass
    assert time.monotonic() - start < 5
    assert caplog.text == ""
