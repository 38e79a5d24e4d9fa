"""What a trajectory has left behind at a server, read when it has ended."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp.server.mcpserver import MCPServer

from mcp_grpo.errors import CassetteError, ToolServerError
from mcp_grpo.tools import Cassette, Lease, ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

Rogue = Callable[..., ServerConfig]
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))


async def remember(lease: Lease, *words: str) -> None:
    for word in words:
        result = await lease.call(ToolCall(name="remember", arguments={"text": word}))
        assert result.kind is ResultKind.OK


async def state_after(pool: ToolPool, *words: str) -> dict[str, Any]:
    async with pool.lease(TASK) as lease:
        await remember(lease, *words)
        return (await lease.states())["rogue"]


@pytest.mark.parametrize("isolation", ["exclusive", "meta"])
async def test_each_trajectory_has_its_own_state(isolation: str, rogue: Rogue) -> None:
    states: dict[str, Any] = {}

    async def trajectory(pool: ToolPool, word: str) -> None:
        states[word] = await state_after(pool, word, word.upper())

    config = rogue(isolation=isolation, pool_size=2, spares=0, state_tool="state")
    async with ToolPool([config]) as pool, anyio.create_task_group() as tasks:
        for word in "abc":
            tasks.start_soon(trajectory, pool, word)
    assert {word: state["remembered"] for word, state in states.items()} == {
        word: [word, word.upper()] for word in "abc"
    }


async def test_the_state_is_read_before_the_session_is_reset(rogue: Rogue) -> None:
    config = rogue(isolation="exclusive", pool_size=1, spares=0, state_tool="state", reset_tool="reset")
    async with ToolPool([config]) as pool:
        first, second = [await state_after(pool, word) for word in "ab"]
    assert first["pid"] == second["pid"]
    assert (first["remembered"], second["remembered"]) == (["a"], ["b"])
    assert second["num_calls"] == 2


async def test_the_policy_neither_sees_the_tool_nor_can_call_it(rogue: Rogue) -> None:
    async with ToolPool([rogue(isolation="meta", state_tool="state")]) as pool:
        assert "state" not in [tool.tool for tool in pool.catalog.tools]
        async with pool.lease(TASK) as lease:
            result = await lease.call(ToolCall(name="state", arguments={}))
    assert result.kind is ResultKind.UNKNOWN_TOOL


async def test_only_servers_that_the_task_uses_are_asked(rogue: Rogue) -> None:
    configs = [rogue(name=name, isolation="meta", state_tool="state") for name in ("one", "two")]
    task = Task(task_id="t", prompt=TASK.prompt, servers=("two",))
    async with ToolPool([*configs, rogue(name="three")]) as pool:
        async with pool.lease(task) as lease:
            assert list(await lease.states()) == ["two"]
        async with pool.lease(TASK) as lease:
            assert list(await lease.states()) == ["one", "two"]


@pytest.mark.parametrize(
    ("state_tool", "reason"),
    [
        ("error_reply", "no such thing"),
        ("mute", "did not answer within"),
        ("exit", "ended the connection"),
        ("count", None),
        ("echo", "must answer with JSON, got ''"),
    ],
)
async def test_a_state_that_cannot_be_read_is_an_error_of_the_server(
    state_tool: str, reason: str | None, rogue: Rogue
) -> None:
    config = rogue(isolation="meta", state_tool=state_tool, call_timeout=0.5, retries=0)
    async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
        await remember(lease, "a")
        if reason is None:
            assert await lease.states() == {"rogue": 2}  # any JSON will do
            return
        with pytest.raises(ToolServerError, match=reason) as error:
            await lease.states()
    assert repr(state_tool) in str(error.value)


async def test_a_state_that_quotes_an_error_of_the_policy_is_no_error() -> None:
    server = MCPServer("desk", log_level="ERROR")

    @server.tool()
    async def state() -> str:
        """What was posted."""
        return json.dumps({"posts": ["Error: none"]})

    server.tool(name="post")(lambda: "posted")
    config = ServerConfig(
        name="desk",
        transport="in_process",
        server=server,
        isolation="meta",
        state_tool="state",
        error_patterns=("Error",),
    )
    async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
        assert await lease.states() == {"desk": {"posts": ["Error: none"]}}


class TestCassettes:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "calls.jsonl"

    async def record(self, path: Path, config: ServerConfig, *attempts: str) -> list[dict[str, Any]]:
        async with ToolPool([config], cassette=Cassette(path, "record")) as pool:
            return [await state_after(pool, *words) for words in attempts]

    async def test_a_replayed_run_has_the_same_states_without_servers(self, path: Path, rogue: Rogue) -> None:
        first = await self.record(path, rogue(isolation="meta", state_tool="state"), "ab", "c", "")
        async with ToolPool(None, cassette=Cassette(path, "replay")) as pool:
            assert [await state_after(pool, *words) for words in ("ab", "c", "")] == first
        assert [state["remembered"] for state in first] == [["a", "b"], ["c"], []]

    async def test_a_matched_state_is_that_of_a_trajectory_with_the_same_calls(self, path: Path, rogue: Rogue) -> None:
        first = await self.record(path, rogue(isolation="meta", state_tool="state"), "ab", "c", "")
        async with ToolPool(None, cassette=Cassette(path, "match")) as pool:
            assert [await state_after(pool, *words) for words in ("", "c", "ab", "c")] == [
                first[2], first[1], first[0], first[1]
            ]  # fmt: skip
            async with pool.lease(TASK) as lease:
                await remember(lease, "b", "a")
                with pytest.raises(ToolServerError, match="no trajectory in it made the same calls"):
                    await lease.states()

    async def test_a_call_that_only_reads_does_not_change_which_state_matches(
        self, path: Path, rogue: Rogue, tmp_path: Path
    ) -> None:
        mark = tmp_path / "mark"
        mark.touch()
        reads = ToolCall(name="read_crash_once", arguments={"text": str(mark)})
        config = rogue(isolation="meta", state_tool="state")
        async with ToolPool([config], cassette=Cassette(path, "record")) as pool, pool.lease(TASK) as lease:
            await lease.call(reads)
            await remember(lease, "a")
            first = await lease.states()
        async with ToolPool(None, cassette=Cassette(path, "match")) as pool:
            assert await state_after(pool, "a") == first["rogue"]

    async def test_a_cache_asks_every_time(self, path: Path, rogue: Rogue) -> None:
        config = rogue(isolation="meta", state_tool="state")
        async with ToolPool([config], cassette=Cassette(path, "cache")) as pool:
            states = [await state_after(pool, word) for word in "ab"]
        assert [state["remembered"] for state in states] == [["a"], ["b"]]

    async def test_a_recording_without_states_is_refused_where_they_are_asked_for(
        self, path: Path, rogue: Rogue
    ) -> None:
        async with ToolPool([rogue(isolation="meta")], cassette=Cassette(path, "record")):
            pass
        with pytest.raises(CassetteError, match="without the `state_tool` 'state'"):
            async with ToolPool([rogue(isolation="meta", state_tool="state")], cassette=Cassette(path, "replay")):
                pass

    async def test_a_state_that_failed_fails_in_the_replay(self, path: Path, rogue: Rogue) -> None:
        config = rogue(isolation="meta", state_tool="error_reply")
        async with ToolPool([config], cassette=Cassette(path, "record")) as pool, pool.lease(TASK) as lease:
            with pytest.raises(ToolServerError, match="no such thing"):
                await lease.states()
        async with ToolPool(None, cassette=Cassette(path, "replay")) as pool, pool.lease(TASK) as lease:
            with pytest.raises(ToolServerError, match="no such thing"):
                await lease.states()
