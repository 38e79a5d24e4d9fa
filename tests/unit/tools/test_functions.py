"""
A server of functions is called without a connection where a trajectory has it to itself, and nobody can tell: results, blame, deadlines
and recordings are those of the same server over the SDK's client.
"""

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.types import Tool

from mcp_grpo.environments import function_server
from mcp_grpo.errors import CatalogError, ToolServerError
from mcp_grpo.tools import Cassette, ToolPool
from mcp_grpo.tools.setup import start_states
from mcp_grpo.tools.users import UserTools
from mcp_grpo.types import ResultKind, Segment, StopReason, Task, ToolCall, Trajectory


pytestmark = pytest.mark.anyio

NAMES = ("echo", "fail", "break", "wait", "number", "keep", "late", "state", "stubborn")
ANY = {"type": "object", "properties": {}}
TOOLS = [Tool(name=name, description="", input_schema=ANY) for name in NAMES]


def answers(task: Task | None) -> Callable[[str, Mapping[str, Any]], Any]:
    """Functions of all kinds, with a state of their own."""
    kept: list[Any] = [start_states(task).get("f", {}).get("first", "")]

    async def wait(seconds: float, *, is_stubborn: bool = False) -> str:
        with anyio.CancelScope(shield=is_stubborn):
            await anyio.sleep(seconds)
        return "waited"

    def call(name: str, arguments: Any) -> Any:
        match name:
            case "echo":
                return str(arguments)
            case "fail":
                raise ValueError("No such thing.")
            case "break":
                raise ToolServerError("The warehouse is down.")
            case "number":
                return 5
            case "keep":
                kept.append(arguments["thing"])
                arguments["thing"].append("changed")
                return str(kept)
            case "state":
                return f'{{"kept": {len(kept)}, "first": "{kept[0]}"}}'
            case _:
                return wait(arguments.get("seconds", 0.0), is_stubborn=name == "stubborn")

    return call


def direct(task: Task | None) -> Any:
    return function_server("f", TOOLS, answers(task))


def connected(task: Task | None) -> Any:
    return function_server("f", TOOLS, answers(task)).connectable()


BOTH = pytest.mark.parametrize("make", [direct, connected])


def entry(make: Any, **options: Any) -> dict[str, Any]:
    return {"f": {"server": make, "x-mcp-grpo": options}}


def task(**columns: Any) -> Task:
    return Task(task_id="t", prompt=({"role": "user", "content": "?"},), metadata=columns)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


@BOTH
async def test_results_and_who_is_to_blame(make: Any) -> None:
    async with ToolPool(entry(make, error_patterns=["^\\{'odd"])) as pool, pool.lease(task()) as lease:
        assert (await lease.call(call("echo", a=[1, {"b": None}]))).text == "{'a': [1, {'b': None}]}"
        kinds = {
            "fail": (ResultKind.TOOL_ERROR, "ValueError: No such thing."),
            "break": (ResultKind.SERVER_ERROR, "The warehouse is down."),
            "wait": (ResultKind.OK, "waited"),
            "number": (ResultKind.SERVER_ERROR, "The function of a tool must return text, got int."),
        }
        for name, (kind, text) in kinds.items():
            result = await lease.call(call(name))
            assert (result.kind, result.text, result.server, result.num_attempts) == (kind, text, "f", 1)
        assert (await lease.call(call("echo", odd=1))).kind is ResultKind.TOOL_ERROR
        assert (await lease.call(call("nothing"))).kind is ResultKind.UNKNOWN_TOOL


@BOTH
async def test_a_deadline_is_kept_and_the_next_call_answered(make: Any) -> None:
    async with ToolPool(entry(make, call_timeout=0.3)) as pool, pool.lease(task()) as lease:
        for name in ("wait", "stubborn"):
            start = time.monotonic()
            result = await lease.call(call(name, seconds=3.0 if name == "wait" else 1.0))
            assert (result.kind, result.text) == (ResultKind.TIMEOUT, "The server did not answer within 0.3 s.")
            assert time.monotonic() - start < 0.9
        assert (await lease.call(call("echo"))).kind is ResultKind.OK


@BOTH
async def test_what_the_policy_wrote_stays_as_it_was(make: Any) -> None:
    written = call("keep", thing=["a"])
    async with ToolPool(entry(make)) as pool, pool.lease(task()) as lease:
        assert (await lease.call(written)).text == "['', ['a', 'changed']]"
        assert written.arguments == {"thing": ["a"]}


@BOTH
async def test_start_states_are_kept_apart_and_recorded(make: Any, tmp_path: Path) -> None:
    path, options = tmp_path / "calls.jsonl", {"state_tool": "state"}

    async def run(pool: ToolPool, first: str) -> tuple[str, Any]:
        async with pool.lease(task(setup={"f": {"first": first}})) as lease:
            said = await lease.call(call("keep", thing=[first]))
            return said.text, (await lease.states())["f"]

    async with ToolPool(entry(make, **options), Cassette(path, "record")) as pool:
        assert pool.setup_servers == ("f",)
        recorded = [await run(pool, "x"), await run(pool, "y")]
    assert [state for _, state in recorded] == [{"kept": 2, "first": "x"}, {"kept": 2, "first": "y"}]
    async with ToolPool(None, Cassette(path, "replay")) as pool:
        assert [await run(pool, "x"), await run(pool, "y")] == recorded


@BOTH
async def test_the_user_has_tools_of_its_own(make: Any) -> None:
    async def user(trajectory: Trajectory, tools: UserTools) -> str:
        return (await tools.call("echo", {"by": "the user"})).text

    so_far = Trajectory(
        task=task(),
        prompt_ids=(0,),
        segments=(Segment(token_ids=(0,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": "!"},),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
    )
    async with ToolPool(entry(make, user_tools=["echo"]), user=user) as pool, pool.lease(task()) as lease:
        assert "echo" not in [tool.name for tool in lease.tools]
        said = await lease.next_user_turn(lambda: so_far)
        assert said is not None
        assert said[0].content == "{'by': 'the user'}"


@BOTH
async def test_calls_under_way_end_with_their_trajectory(make: Any) -> None:
    async with ToolPool(entry(make, call_timeout=30.0)) as pool, anyio.create_task_group() as group:
        results: list[Any] = []
        start = time.monotonic()
        async with pool.lease(task()) as lease:

            async def wait() -> None:
                results.append(await lease.call(call("wait", seconds=20.0)))

            group.start_soon(wait)
            await anyio.sleep(0.2)
        with anyio.move_on_after(5):
            while not results:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert [result.kind for result in results] == [ResultKind.SERVER_ERROR]
    assert "was closed" in results[0].text
    assert time.monotonic() - start < 5


@BOTH
async def test_places_are_limited(make: Any) -> None:
    at_once = most = 0

    async with ToolPool(entry(make, pool_size=2)) as pool, anyio.create_task_group() as group:

        async def run() -> None:
            nonlocal at_once, most
            async with pool.lease(task()) as lease:
                at_once += 1
                most = max(most, at_once)
                await lease.call(call("wait", seconds=0.01))
                at_once -= 1

        for _ in range(8):
            group.start_soon(run)
    assert most == 2


@BOTH
async def test_tools_are_checked_once_and_changes_are_told(make: Any, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(CatalogError, match="`state_tool` of server 'f' names 'stat'"):
        async with ToolPool(entry(make, state_tool="stat")):
            pass

    def changing(one: Task | None) -> Any:
        made = function_server("f", TOOLS if one is None else TOOLS[1:], answers(one))
        return made if make is direct else made.connectable()

    with caplog.at_level(logging.WARNING):
        async with ToolPool(entry(changing)) as pool:
            for _ in range(2):
                async with pool.lease(task()) as lease:
                    await lease.call(call("wait"))
    assert [record.message for record in caplog.records if "have changed" in record.message] == [
        "The tools of server 'f' have changed: `echo` was removed. The run continues with those it began with."
    ]


async def test_it_is_a_server_like_any_other() -> None:
    made = direct(None)
    async with Client(made.connectable()) as client:
        assert [tool.name for tool in (await client.list_tools()).tools] == list(NAMES)
    async with ToolPool({"f": made}) as pool, pool.lease(task()) as lease:  # one for all
        assert (await lease.call(call("echo", a=1))).text == "{'a': 1}"


async def test_too_many_tools_are_refused() -> None:
    many = [Tool(name="a", description="b" * 5000, input_schema=ANY)]
    for make in (function_server("f", many, answers(None)), function_server("f", many, answers(None)).connectable()):
        with pytest.raises(ToolServerError, match="lists tools of more than 4096 bytes"):
            async with ToolPool(entry(lambda task, made=make: made, max_result_bytes=4096)):
                pass
