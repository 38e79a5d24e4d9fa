import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from mcp.server.mcpserver import Context, MCPServer

from mcp_grpo.errors import CatalogError, ServerConfigError, ToolServerError
from mcp_grpo.tools import Lease, ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


pytestmark = pytest.mark.anyio

ROGUE = Path(__file__).parents[2] / "servers" / "rogue.py"
Rogue = Callable[..., ServerConfig]
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def say(lease: Lease | ToolPool, name: str, /, **arguments: Any) -> str:
    result = await lease.call(call(name, **arguments))
    assert result.kind is ResultKind.OK, result.text
    return result.text


async def until(condition: Callable[[], bool]) -> None:
    with anyio.fail_after(20):
        while not condition():
            await anyio.sleep(0.01)


def live(pool: ToolPool, name: str = "rogue") -> int:
    return sum(session.is_alive for session in pool._servers[name]._sessions)


class TestShared:
    async def test_calls_are_spread_over_as_many_processes_as_there_are_to_be(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(pool_size=3, max_inflight=1, read_only_tools=("whoami",))]) as pool:
            await until(lambda: live(pool) == 3)
            async with pool.lease(TASK) as lease:
                results = await lease.call_all([call("whoami")] * 6)
        assert len({result.text for result in results}) == 3

    async def test_the_others_go_on_while_one_is_started_anew(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(pool_size=2)]) as pool:
            await until(lambda: live(pool) == 2)
            await pool.call(call("exit"))
            await say(pool, "echo", text="hi")
            assert pool._servers["rogue"].num_starts == 2  # not yet
            await until(lambda: live(pool) == 2)
        assert pool._servers["rogue"].num_starts == 3

    @pytest.mark.full
    async def test_waiting_for_a_place_does_not_count_against_the_deadline(self, rogue: Rogue) -> None:
        config = rogue(call_timeout=1.0, max_inflight=1, read_only_tools=("mute", "echo"))
        async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
            results = await lease.call_all([call("mute"), call("mute"), call("echo", text="hi")])
        assert [r.kind for r in results] == [ResultKind.TIMEOUT, ResultKind.TIMEOUT, ResultKind.OK]
        assert all(1.0 <= r.seconds < 2.0 for r in results[:2])


class TestExclusive:
    async def test_each_trajectory_has_a_process_that_nobody_used_before(self, rogue: Rogue) -> None:
        seen: list[tuple[str, str]] = []

        async def trajectory(pool: ToolPool) -> None:
            async with pool.lease(TASK) as lease:
                seen.append((await say(lease, "whoami"), await say(lease, "count")))

        async with ToolPool([rogue(isolation="exclusive", pool_size=3)]) as pool, anyio.create_task_group() as tasks:
            for _ in range(9):
                tasks.start_soon(trajectory, pool)
        assert len({pid for pid, _ in seen}) == 9
        assert {count for _, count in seen} == {"2"}

    async def test_a_lease_of_a_spare_waits_for_no_start(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=2, spares=2)]) as pool:
            await until(lambda: live(pool) == 4)
            for _ in range(2):
                start = anyio.current_time()
                async with pool.lease(TASK):
                    (session,) = pool._servers["rogue"]._leased
                    assert session.opened_at < start

    async def test_no_more_trajectories_than_allowed_have_one_at_a_time(self, rogue: Rogue) -> None:
        under_way = most = 0

        async def trajectory(pool: ToolPool) -> None:
            nonlocal under_way, most
            async with pool.lease(TASK) as lease:
                under_way += 1
                most = max(most, under_way)
                await until(lambda: most == 2)
                await say(lease, "echo", text="hi")
                under_way -= 1

        async with (
            ToolPool([rogue(isolation="exclusive", pool_size=2, spares=1)]) as pool,
            anyio.create_task_group() as tasks,
        ):
            for _ in range(6):
                tasks.start_soon(trajectory, pool)
        assert most == 2

    async def test_a_reset_tool_makes_a_process_as_new(self, rogue: Rogue) -> None:
        config = rogue(isolation="exclusive", pool_size=1, spares=0, reset_tool="reset")
        seen = []
        async with ToolPool([config]) as pool:
            assert "reset" not in [tool.name for tool in pool.catalog.tools]
            for _ in range(3):
                async with pool.lease(TASK) as lease:
                    seen.append((await say(lease, "whoami"), await say(lease, "count")))
        assert len({pid for pid, _ in seen}) == 1
        assert {count for _, count in seen} == {"2"}

    async def test_a_reset_that_fails_costs_the_process_not_the_next_trajectory(
        self, rogue: Rogue, caplog: pytest.LogCaptureFixture
    ) -> None:
        config = rogue("bad_reset", isolation="exclusive", pool_size=1, spares=0, reset_tool="reset")
        pids = []
        with caplog.at_level(logging.WARNING):
            async with ToolPool([config]) as pool:
                for _ in range(2):
                    async with pool.lease(TASK) as lease:
                        pids.append(await say(lease, "whoami"))
        assert pids[0] != pids[1]
        assert "reset tool of server 'rogue' failed: cannot" in caplog.text

    async def test_a_trajectory_does_not_go_on_in_another_process_when_its_own_is_gone(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive")]) as pool, pool.lease(TASK) as lease:
            await say(lease, "echo", text="hi")
            results = [await lease.call(call(name)) for name in ("exit", "echo", "read_crash_once")]
        assert {result.kind for result in results} == {ResultKind.SERVER_ERROR}
        assert "what it did there is lost" in results[1].text
        assert "exit code is 3" in results[1].text

    @pytest.mark.full
    async def test_calls_that_wait_for_a_place_do_not_hang_when_the_process_goes(self, rogue: Rogue) -> None:
        config = rogue(isolation="exclusive", max_inflight=1, read_only_tools=("exit", "echo"))
        async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
            with anyio.fail_after(20):
                results = await lease.call_all([call("exit"), *[call("echo")] * 4])
        assert {result.kind for result in results} == {ResultKind.SERVER_ERROR}

    async def test_a_spare_that_dies_is_replaced(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=1, spares=1)]) as pool:
            server = pool._servers["rogue"]
            await until(lambda: live(pool) == 2)
            for session in list(server._sessions):
                os.kill(session._stdio.pid, signal.SIGKILL)
            await until(lambda: server.num_starts == 4 and live(pool) == 2)
            async with pool.lease(TASK) as lease:
                await say(lease, "echo", text="hi")

    async def test_a_lease_is_given_back_when_its_trajectory_fails_or_is_cancelled(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=1, spares=0)]) as pool:
            with pytest.raises(KeyError):
                async with pool.lease(TASK):
                    raise KeyError
            with anyio.move_on_after(0.1):
                async with pool.lease(TASK):
                    await anyio.sleep_forever()
            with anyio.fail_after(20):
                async with pool.lease(TASK) as lease:
                    await say(lease, "echo", text="hi")

    async def test_whoever_waits_for_a_lease_and_gives_up_leaves_it_to_the_others(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=1, spares=0)]) as pool:
            async with pool.lease(TASK):
                with anyio.move_on_after(0.1) as scope:
                    async with pool.lease(TASK):
                        pass
                assert scope.cancelled_caught
            with anyio.fail_after(20):
                async with pool.lease(TASK):
                    pass

    @pytest.mark.full
    async def test_trajectories_that_call_nothing_say_nothing_about_the_server(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=2)]) as pool:
            for _ in range(10):
                async with pool.lease(TASK):
                    pass
            assert pool._servers["rogue"].breaker.num_failures == 0

    async def test_a_session_that_dies_in_the_instant_it_is_asked_for_is_replaced(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="exclusive", pool_size=1, spares=0)]) as pool:
            (session,) = pool._servers["rogue"]._sessions
            os.kill(session._stdio.pid, signal.SIGKILL)
            while session.is_alive:
                await anyio.sleep(0)
            with anyio.fail_after(20):
                async with pool.lease(TASK) as lease:
                    await say(lease, "echo", text="hi")

    async def test_a_session_that_dies_before_it_is_used_costs_the_trajectory_nothing(self, rogue: Rogue) -> None:
        config = rogue(isolation="exclusive", pool_size=1, spares=1, read_only_tools=("echo",))
        async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
            (session,) = pool._servers["rogue"]._leased
            os.kill(session._stdio.pid, signal.SIGKILL)
            await until(lambda: not session.is_alive)
            results = await lease.call_all([call("echo", text="hi")] * 3)
        assert [result.text for result in results] == ["hi"] * 3

    async def test_a_session_with_a_call_that_was_given_up_is_not_used_again(self, rogue: Rogue) -> None:
        config = rogue(isolation="exclusive", pool_size=1, spares=0, reset_tool="reset", call_timeout=1.0)
        pids = []
        async with ToolPool([config]) as pool:
            for name in ("mute", "echo"):
                async with pool.lease(TASK) as lease:
                    pids.append(await say(lease, "whoami"))
                    await lease.call(call(name))
        assert pids[0] != pids[1]

    @pytest.mark.full
    async def test_trajectories_that_need_two_servers_do_not_wait_for_each_other(self, rogue: Rogue) -> None:
        configs = [rogue(name=name, isolation="exclusive", pool_size=1, spares=0) for name in ("one", "two")]

        async def trajectory(pool: ToolPool, task: Task) -> None:
            async with pool.lease(task) as lease:
                await say(lease, "two__echo", text="hi")

        there = Task(task_id="a", prompt=TASK.prompt, servers=("one", "two"))
        back = Task(task_id="b", prompt=TASK.prompt, servers=("two", "one"))
        async with ToolPool(configs) as pool:
            with anyio.fail_after(30):
                async with anyio.create_task_group() as tasks:
                    for task in (there, back) * 3:
                        tasks.start_soon(trajectory, pool, task)

    @pytest.mark.usefixtures("impatient")
    async def test_a_server_that_cannot_start_again_fails_leases_at_once(self, tmp_path: Path, rogue: Rogue) -> None:
        script = tmp_path / "server.py"
        config = replace(rogue(isolation="exclusive", pool_size=1, spares=0), args=(str(script),))
        script.write_text(ROGUE.read_text())
        async with ToolPool([config]) as pool:
            async with pool.lease(TASK):
                script.write_text("raise SystemExit('gone for good')")
            with pytest.raises(ToolServerError, match="gone for good"), anyio.fail_after(30):
                async with pool.lease(TASK):
                    pass

    async def test_over_http_each_trajectory_has_a_session_of_its_own(self, http_server: Any) -> None:
        sessions: list[str] = []

        async def trajectory(pool: ToolPool) -> None:
            async with pool.lease(TASK) as lease:
                sessions.append(await say(lease, "session"))
                assert await say(lease, "session") == sessions[-1]

        config = http_server.config(isolation="exclusive", pool_size=2, spares=0)
        async with ToolPool([config]) as pool:
            for _ in range(3):
                await trajectory(pool)
        assert len(set(sessions)) == 3

    @pytest.mark.full
    async def test_over_http_a_server_without_sessions_is_refused(self, stateless_http_server: Any) -> None:
        with pytest.raises(ToolServerError, match="over HTTP it has none"):
            async with ToolPool([stateless_http_server.config(isolation="exclusive")]):
                pass

    async def test_in_process_each_trajectory_enters_the_lifespan_of_the_server(self) -> None:
        entered: list[int] = []

        async def number(ctx: Context) -> int:
            """The number of the lifespan."""
            return ctx.request_context.lifespan_context["number"]

        @asynccontextmanager
        async def lifespan(server: MCPServer) -> Any:
            entered.append(len(entered))
            yield {"number": entered[-1]}

        server = MCPServer("s", lifespan=lifespan)
        server.tool()(number)
        config = ServerConfig(
            name="s", transport="in_process", server=server, isolation="exclusive", pool_size=1, spares=0
        )
        async with ToolPool([config]) as pool:
            for expected in "012":
                async with pool.lease(TASK) as lease:
                    assert await say(lease, "number") == expected


class TestMeta:
    async def test_the_server_can_tell_trajectories_apart(self, rogue: Rogue) -> None:
        said: list[str] = []

        async def trajectory(pool: ToolPool, word: str) -> None:
            async with pool.lease(TASK) as lease:
                await say(lease, "remember", text=word)
                said.append(await say(lease, "remember", text=word.upper()))

        async with ToolPool([rogue(isolation="meta", pool_size=2)]) as pool, anyio.create_task_group() as tasks:
            for word in "abcd":
                tasks.start_soon(trajectory, pool, word)
        assert sorted(said) == ["a A", "b B", "c C", "d D"]

    async def test_a_trajectory_stays_with_the_process_that_knows_it(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="meta", pool_size=3)]) as pool:
            await until(lambda: live(pool) == 3)
            async with pool.lease(TASK) as one, pool.lease(TASK) as other:
                pids = [{await say(lease, "whoami") for _ in range(4)} for lease in (one, other)]
        assert [len(own) for own in pids] == [1, 1]
        assert pids[0] != pids[1]

    async def test_a_trajectory_ends_with_the_process_that_knew_it_and_the_next_one_begins(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="meta")]) as pool:
            async with pool.lease(TASK) as lease:
                await say(lease, "remember", text="a")
                assert (await lease.call(call("exit"))).kind is ResultKind.SERVER_ERROR
                assert (await lease.call(call("remember", text="b"))).kind is ResultKind.SERVER_ERROR
            async with pool.lease(TASK) as lease:
                assert await say(lease, "remember", text="c") == "c"

    async def test_a_reset_tool_is_told_which_trajectory_is_over(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(isolation="meta", reset_tool="reset")]) as pool:
            async with pool.lease(TASK) as lease:
                await say(lease, "remember", text="a")
            with anyio.fail_after(20):
                while await say(pool, "count") != "1":  # the reset tool of this server zeroes the count, too
                    await anyio.sleep(0.01)


class TestRetries:
    async def test_a_tool_that_only_reads_is_called_again_when_its_server_breaks(
        self, rogue: Rogue, tmp_path: Path
    ) -> None:
        async with ToolPool([rogue()]) as pool:
            result = await pool.call(call("read_crash_once", text=str(tmp_path / "mark")))
        assert (result.kind, result.text, result.num_attempts) == (ResultKind.OK, "second time", 2)

    async def test_a_tool_that_may_change_something_is_not_called_again(self, rogue: Rogue, tmp_path: Path) -> None:
        async with ToolPool([rogue()]) as pool:
            result = await pool.call(call("crash_once", text=str(tmp_path / "mark")))
        assert (result.kind, result.num_attempts) == (ResultKind.SERVER_ERROR, 1)

    async def test_the_configuration_can_declare_a_tool_safe(self, rogue: Rogue, tmp_path: Path) -> None:
        async with ToolPool([rogue(idempotent_tools=("crash_once",))]) as pool:
            result = await pool.call(call("crash_once", text=str(tmp_path / "mark")))
        assert (result.kind, result.num_attempts) == (ResultKind.OK, 2)

    async def test_retries_can_be_turned_off(self, rogue: Rogue, tmp_path: Path) -> None:
        async with ToolPool([rogue(retries=0)]) as pool:
            result = await pool.call(call("read_crash_once", text=str(tmp_path / "mark")))
        assert result.kind is ResultKind.SERVER_ERROR

    async def test_a_tool_that_always_breaks_its_server_is_called_no_more_often_than_that(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(idempotent_tools=("exit",), retries=2)]) as pool:
            result = await pool.call(call("exit"))
        assert (result.kind, result.num_attempts) == (ResultKind.SERVER_ERROR, 3)

    async def test_a_deadline_that_passed_is_not_tried_again(self, rogue: Rogue) -> None:
        async with ToolPool([rogue(idempotent_tools=("mute",), call_timeout=0.2)]) as pool:
            result = await pool.call(call("mute"))
        assert (result.kind, result.num_attempts) == (ResultKind.TIMEOUT, 1)


@pytest.mark.usefixtures("impatient")
class TestOutage:
    async def test_a_server_that_breaks_at_every_first_call_is_left_alone_and_tried_again(self, rogue: Rogue) -> None:
        async with ToolPool([rogue()]) as pool:
            texts = []
            with anyio.fail_after(60):
                while "times in a row" not in (text := (await pool.call(call("exit"))).text):
                    texts.append(text)
                while (await pool.call(call("echo", text="hi"))).kind is not ResultKind.OK:
                    await anyio.sleep(0.05)
            assert 3 <= len(texts) <= 7
            assert pool._servers["rogue"].breaker.num_failures == 0

    async def test_an_outage_is_one_or_two_lines_in_the_log_not_one_for_each_call(
        self, rogue: Rogue, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        script = tmp_path / "server.py"
        config = replace(rogue(read_only_tools=("echo",)), args=(str(script),))
        script.write_text(ROGUE.read_text())
        with caplog.at_level(logging.WARNING):
            async with ToolPool([config]) as pool, pool.lease(TASK) as lease:
                script.write_text("raise SystemExit('gone for good')")
                await lease.call(call("exit"))
                results = await lease.call_all([call("echo")] * 50)
        assert {result.kind for result in results} == {ResultKind.SERVER_ERROR}
        assert 1 <= len([record for record in caplog.records if record.name.startswith("mcp_grpo")]) <= 4


async def test_a_change_of_the_tools_is_reported_and_the_catalog_stays(
    rogue: Rogue, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with ToolPool([rogue()]) as pool:
            before = pool.catalog.hash
            await say(pool, "change_tools")
            await until(lambda: "have changed" in caplog.text)
            assert pool.catalog.hash == before
    assert "'rogue' have changed" in caplog.text
    assert "`echo`" in caplog.text


@pytest.mark.full
async def test_a_server_that_ignores_the_probe_costs_ten_seconds_once_not_at_every_start(rogue: Rogue) -> None:
    async with ToolPool([rogue("ignore_unknown", protocol="auto")]) as pool:
        start = time.monotonic()
        await pool.call(call("exit"))
        await say(pool, "echo", text="hi")
        assert time.monotonic() - start < 8


async def test_a_reset_tool_that_is_not_there_is_refused(rogue: Rogue) -> None:
    with pytest.raises(CatalogError, match="reset_all"):
        async with ToolPool([rogue(isolation="exclusive", reset_tool="reset_all")]):
            pass


def test_a_reset_tool_makes_no_sense_for_a_shared_server(rogue: Rogue) -> None:
    with pytest.raises(ServerConfigError, match="has no effect with isolation 'shared'"):
        rogue(reset_tool="reset")


@pytest.mark.parametrize("isolation", ["shared", "exclusive", "meta"])
async def test_closing_leaves_nothing_behind_whatever_is_under_way(isolation: str, rogue: Rogue) -> None:
    process = psutil.Process()
    tasks_before, fds, threads = asyncio.all_tasks(), process.num_fds(), process.num_threads()
    results: list[ResultKind] = []
    config = rogue(isolation=isolation, pool_size=2, max_inflight=2, read_only_tools=("mute",))
    async with anyio.create_task_group() as tasks, ToolPool([config]) as pool:

        async def trajectory() -> None:
            try:
                async with pool.lease(TASK) as lease:
                    results.extend(r.kind for r in await lease.call_all([call("mute")] * 5))
            except ToolServerError:
                results.append(ResultKind.SERVER_ERROR)

        for _ in range(4):
            tasks.start_soon(trajectory)
        await anyio.sleep(0.3)
    assert set(results) == {ResultKind.SERVER_ERROR}
    assert asyncio.all_tasks() == tasks_before
    await until(lambda: process.num_fds() <= fds and process.num_threads() <= threads)
