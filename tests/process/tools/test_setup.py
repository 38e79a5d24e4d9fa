"""A start state for each task, and calls of a turn in the order in which they are written."""

import gc
import json
import sys
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers.marks import full
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool
from servers.drawer import server

from mcp_grpo.environments import function_server
from mcp_grpo.errors import CatalogError, ServerConfigError, TaskFormatError, ToolServerError
from mcp_grpo.rewards.checks import check_tasks
from mcp_grpo.tools import Cassette, Lease, ServerConfig, ToolPool, load_servers
from mcp_grpo.tools.functions import FunctionServer
from mcp_grpo.tools.setup import setup_problems, start_states
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

DRAWER = Path(__file__).parents[2] / "servers" / "drawer.py"
OPTIONS: dict[str, Any] = {"state_tool": "content", "reset_tool": "empty", "setup_tool": "fill"}


def drawer(**options: Any) -> ServerConfig:
    """The server in this process."""
    return ServerConfig(
        name="drawer", transport="in_process", server=server, **OPTIONS | {"isolation": "meta"} | options
    )


def drawer_process(**options: Any) -> ServerConfig:
    command = (str(DRAWER),)
    options = OPTIONS | {"isolation": "exclusive", "pool_size": 2, "spares": 0} | options
    return ServerConfig(name="drawer", transport="stdio", command=sys.executable, args=command, **options)


def task(name: str = "t", **setup: Any) -> Task:
    return Task(task_id=name, prompt=({"role": "user", "content": "?"},), metadata={"setup": setup} if setup else {})


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def use(pool: ToolPool, one: Task, *calls: ToolCall) -> tuple[list[str], dict[str, Any]]:
    async with pool.lease(one) as lease:
        results = [await lease.call(each) for each in calls]
        return [result.text for result in results], (await lease.states())["drawer"]


def made_drawer(**options: Any) -> ServerConfig:
    """One in this process for each trajectory."""
    return ServerConfig(name="drawer", transport="in_process", server=make_drawer, isolation="exclusive", **options)


def make_drawer(task: Task | None) -> MCPServer:
    files = {} if task is None else dict(task.metadata["setup"]["drawer"]["files"])
    made = MCPServer("made", log_level="ERROR")

    @made.tool()
    async def read(name: str) -> str:
        return files[name]

    @made.tool()
    async def write(name: str, text: str) -> str:
        files[name] = text
        return "written"

    @made.tool()
    async def content() -> str:
        return json.dumps(files)

    return made


def made_functions(**options: Any) -> ServerConfig:
    """The same of functions, which are called without a connection."""
    return ServerConfig(name="drawer", transport="in_process", server=make_functions, isolation="exclusive", **options)


TEXT = {"type": "string"}
TOOLS = [
    Tool(name="read", input_schema={"type": "object", "properties": {"name": TEXT}}),
    Tool(name="write", input_schema={"type": "object", "properties": {"name": TEXT, "text": TEXT}}),
    Tool(name="content", input_schema={"type": "object", "properties": {}}),
]


def make_functions(task: Task | None) -> FunctionServer:
    files = {} if task is None else dict(task.metadata["setup"]["drawer"]["files"])

    def answer(name: str, arguments: Mapping[str, Any]) -> str:
        if name == "read":
            return files[arguments["name"]]
        if name == "write":
            files[arguments["name"]] = arguments["text"]
        return "written" if name == "write" else json.dumps(files)

    return function_server("made", TOOLS, answer)


@pytest.mark.parametrize(
    ("make", "isolation"),
    [
        (drawer, "meta"),
        (made_drawer, "exclusive"),
        (made_functions, "exclusive"),
        full(drawer_process, "meta"),
        full(drawer_process, "exclusive"),
    ],
)
async def test_sixty_four_trajectories_begin_where_their_tasks_say(make: Any, isolation: str) -> None:
    """Each looks for files of the others, too."""
    states: dict[int, Any] = {}
    options: dict[str, Any] = {"isolation": isolation} | ({"pool_size": 8} if make is drawer_process else {})
    if make in (made_drawer, made_functions):
        options = {"state_tool": "content"}

    async def attempt(pool: ToolPool, number: int) -> None:
        begin = {f"{number}.txt": f"text {number}"}
        texts, states[number] = await use(
            pool,
            task(str(number), drawer={"files": begin}),
            call("read", name=f"{number}.txt"),
            call("read", name=f"{(number + 1) % 64}.txt"),
            call("write", name="own.txt", text=str(number)),
        )
        assert texts[0] == f"text {number}"
        assert "Error" in texts[1] or "error" in texts[1]

    async with ToolPool([make(**options)]) as pool, anyio.create_task_group() as group:
        for number in range(64):
            group.start_soon(attempt, pool, number)
    assert states == {n: {f"{n}.txt": f"text {n}", "own.txt": str(n)} for n in range(64)}


async def test_a_server_of_one_s_own_can_read_it_from_each_call() -> None:
    async with ToolPool([drawer(setup_tool=None)]) as pool:
        texts, state = await use(pool, task(drawer={"files": {"a": "A"}}), call("read", name="a"))
        assert (texts, state) == (["A"], {"a": "A"})
        _, state = await use(pool, task())
        assert state == {}


async def test_without_a_start_state_nothing_is_set_up() -> None:
    async with ToolPool([drawer()]) as pool:
        assert (await use(pool, task()))[1] == {}
        assert (await use(pool, task(drawer=None)))[1] == {}  # as a dataset writes it


async def test_the_policy_neither_sees_the_tool_nor_can_call_it() -> None:
    async with ToolPool([drawer()]) as pool:
        assert "fill" not in [tool.tool for tool in pool.catalog.tools]
        async with pool.lease(task()) as lease:
            assert (await lease.call(call("fill", files={}))).kind is ResultKind.UNKNOWN_TOOL


@pytest.mark.parametrize("files", [{}, "no object"])
async def test_a_set_up_that_fails_is_not_the_policy_s_fault(files: Any) -> None:
    async with ToolPool([drawer()]) as pool:
        with pytest.raises(ToolServerError, match="`setup_tool` 'fill' of server 'drawer' failed for task 't'"):
            await use(pool, task(drawer={"files": files}))
        assert (await use(pool, task(drawer={"files": {"a": "A"}})))[1] == {"a": "A"}  # others go on


@pytest.mark.parametrize("mode", ["replay", "match"])
async def test_a_recording_has_the_start_states(tmp_path: Path, mode: Any) -> None:
    path = tmp_path / "calls.jsonl"
    first, second = (task(name, drawer={"files": {"a": name}}) for name in "xy")
    async with ToolPool([drawer()], Cassette(path, "record")) as pool:
        recorded = [await use(pool, one, call("mv", name="a", to="b")) for one in (first, second)]
    assert [state for _, state in recorded] == [{"b": "x"}, {"b": "y"}]
    async with ToolPool(None, Cassette(path, mode)) as pool:
        assert [await use(pool, one, call("mv", name="a", to="b")) for one in (first, second)] == recorded
        assert pool.setup_servers == ("drawer",)
        with pytest.raises(ToolServerError, match="has no answer"):
            await use(pool, task("x", drawer={"files": {"a": "another"}}))


@pytest.mark.parametrize(
    "setup",
    [
        {"drawer": {"files": {"a": "A"}}},
        json.dumps({"drawer": {"files": {"a": "A"}}}),
        {"drawer": '{"files": {"a": "A"}}'},
    ],
)
def test_it_may_be_written_as_text(setup: Any) -> None:
    found = start_states(Task(task_id="t", prompt=task().prompt, metadata={"setup": setup}))
    assert found == {"drawer": {"files": {"a": "A"}}}


@pytest.mark.parametrize("setup", ["drawer", ["drawer"], {"drawer": 3}, 5])
def test_what_is_no_start_state_is_refused(setup: Any) -> None:
    with pytest.raises(TaskFormatError, match="must map names of servers to objects"):
        start_states(Task(task_id="t", prompt=task().prompt, metadata={"setup": setup}))


async def test_tasks_that_cannot_be_set_up_are_refused_before_the_first_step() -> None:
    tasks = [task("a", drawers={"files": {}}), task("b", drawers={"files": {}}), task("c", drawer={"files": {}})]
    (said,) = setup_problems(tasks, ("drawer",))
    assert "2 tasks ('a' and others) is for server 'drawers'" in said
    async with ToolPool([drawer()]) as pool:
        check_tasks(tasks[2:], [], pool.catalog, pool.state_servers, pool.setup_servers)
        with pytest.raises(TaskFormatError, match="Servers that can are `drawer`"):
            check_tasks(tasks, [], pool.catalog, pool.state_servers, pool.setup_servers)


async def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(
        ServerConfigError, match="`setup_tool` of server 'drawer' has no effect with isolation 'shared'"
    ):
        drawer(isolation="shared", state_tool=None, reset_tool=None)
    for option in ({"setup_tool": "fil"}, {"read_only_tools": ("wait", "wrote")}):
        with pytest.raises(CatalogError, match=f"`{next(iter(option))}` of server 'drawer' names"):
            async with ToolPool([drawer(**option)]):
                pass


@pytest.mark.parametrize("make_server", [make_drawer, make_functions])
async def test_a_server_is_made_for_each_trajectory_and_gone_after_it(make_server: Any) -> None:
    made: list[weakref.ref[Any]] = []

    def make(one: Task | None) -> Any:
        found = make_server(one)
        made.append(weakref.ref(found))
        return found

    servers = {"drawer": {"server": make, "x-mcp-grpo": {"state_tool": "content"}}}
    async with ToolPool(servers) as pool:
        assert pool.catalog.servers == ("drawer",)
        for name in "xyz":
            texts, state = await use(pool, task(name, drawer={"files": {"a": name}}), call("read", name="a"))
            assert (texts, state) == ([name], {"a": name})
    assert len(made) == 4  # one to list the tools
    gc.collect()
    assert [one() for one in made] == [None] * 4


@pytest.mark.parametrize("make_server", [make_drawer, make_functions])
async def test_what_cannot_be_made_is_not_the_policy_s_fault(make_server: Any) -> None:
    async with ToolPool({"drawer": make_server}) as pool:
        with pytest.raises(ToolServerError, match="Server 'drawer' could not be made for task 't': KeyError"):
            await use(pool, task())
    with pytest.raises(ToolServerError, match="could not be made without a task"):
        async with ToolPool({"drawer": lambda task: task.metadata}):
            pass
    with pytest.raises(ServerConfigError, match="its `isolation` must be 'exclusive', got 'meta'"):
        load_servers({"drawer": {"server": make_server, "x-mcp-grpo": {"isolation": "meta"}}})


async def seconds_of(lease: Lease, *calls: ToolCall) -> tuple[float, list[str]]:
    start = time.monotonic()
    results = await lease.call_all(calls)
    return time.monotonic() - start, [result.text for result in results]


@pytest.mark.parametrize("make", [drawer, drawer_process])
async def test_calls_of_a_turn_run_in_the_order_written(make: Any) -> None:
    """Were they sent at once, the first `mv` would find nothing."""
    async with ToolPool([make()]) as pool, pool.lease(task()) as lease:
        results = await lease.call_all(
            [
                call("write", name="a", text="A"),
                call("mv", name="a", to="b"),
                call("mv", name="b", to="c"),
                call("read", name="c"),
                call("nonsense"),
                call("write", name="c", text="C"),
                call("read", name="c"),
            ]
        )
        assert [result.text for result in results[:4]] == ["written", "moved", "moved", "A"]
        assert results[4].kind is ResultKind.UNKNOWN_TOOL
        assert [result.text for result in results[5:]] == ["written", "C"]


async def test_reads_stay_side_by_side_and_so_do_servers() -> None:
    other = ServerConfig(
        name="other", transport="in_process", server=server, isolation="meta", read_only_tools=("write",)
    )
    async with ToolPool([drawer(), other]) as pool, pool.lease(task()) as lease:
        seconds, _ = await seconds_of(lease, *[call("drawer__wait", seconds=0.5)] * 6)
        assert seconds < 1.5
        seconds, _ = await seconds_of(lease, call("drawer__wait", seconds=0.5), call("other__wait", seconds=0.5))
        assert seconds < 0.95
        # What the user declares to change nothing runs side by side, too.
        declared = {tool.name: tool.is_read_only for tool in pool.catalog.tools}
        assert (declared["other__write"], declared["drawer__write"], declared["drawer__read"]) == (True, False, True)


async def test_all_tools_of_a_server_can_be_declared_to_change_nothing() -> None:
    async with ToolPool([drawer(read_only_tools=("*",))]) as pool:
        assert all(tool.is_read_only for tool in pool.catalog.tools)
