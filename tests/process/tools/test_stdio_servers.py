import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from helpers.marks import full

import mcp_grpo.types
from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.tools.transports.reaper import _groups, kill_all
from mcp_grpo.tools.transports.stdio import _death_guard
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.anyio

SERVERS = Path(__file__).parents[2] / "servers"
Rogue = Callable[..., ServerConfig]


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def pid_of(pool: ToolPool) -> int:
    return int((await pool.call(call("whoami"))).text)


async def wait_until_gone(pid: int) -> None:
    with anyio.fail_after(20), contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            await anyio.sleep(0.01)


async def opening_error(*configs: ServerConfig) -> str:
    with pytest.raises(ToolServerError) as caught:
        async with ToolPool(list(configs)):
            pass
    return str(caught.value)


async def test_a_real_server_is_listed_called_and_closed() -> None:
    config = ServerConfig(name="w", transport="stdio", command=sys.executable, args=(str(SERVERS / "weather.py"),))
    async with ToolPool([config]) as pool:
        assert "weather" in [tool.name for tool in pool.catalog.tools]
        good, bad, refused = [
            await pool.call(request)
            for request in (call("weather", city="Bern"), call("fail", reason="no bread"), call("weather", city=3))
        ]
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                for _ in range(3):
                    tasks.start_soon(pool.call, call("meet", people=3))
    assert (good.kind, good.text) == (ResultKind.OK, "Bern: sun for 1 d")
    assert (bad.kind, refused.kind) == (ResultKind.TOOL_ERROR, ResultKind.INVALID_ARGUMENTS)
    assert "no bread" in bad.text


async def test_all_pages_of_the_listing_are_read(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        names = [tool.name for tool in pool.catalog.tools]
    assert names[0] == "echo"
    assert names[-1] == "whoami"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("garbage", ResultKind.OK, "after the garbage"),
        ("bad_utf8", ResultKind.OK, "a�b"),
        ("huge", ResultKind.TOOL_ERROR, "larger than 100000 bytes and was dropped"),
        ("huge_id_last", ResultKind.TOOL_ERROR, "larger than 100000 bytes and was dropped"),
        ("error_reply", ResultKind.TOOL_ERROR, "no such thing: x"),
        ("not_a_result", ResultKind.SERVER_ERROR, "not a tool result"),
        ("malformed", ResultKind.SERVER_ERROR, "not a JSON-RPC message"),
    ],
)
async def test_what_a_server_sends_is_a_result_and_the_session_lives(
    name: str, kind: ResultKind, words: str, rogue: Rogue
) -> None:
    async with ToolPool([rogue()]) as pool:
        result = await pool.call(call(name, text="x"))
        count = await pool.call(call("count"))
    assert (result.kind, count.text) == (kind, "2")
    assert words in result.text


@pytest.mark.full
async def test_a_line_that_never_ends_fails_its_call_only_once_it_is_too_long(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        result = await pool.call(call("endless"))
    assert result.kind is ResultKind.TOOL_ERROR


async def test_a_crash_fails_the_call_in_flight_and_the_next_call_gets_a_new_process(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        before = await pid_of(pool)
        crashed = await pool.call(call("exit"))
        after = await pid_of(pool)
    assert crashed.kind is ResultKind.SERVER_ERROR
    assert "exit code is 3" in crashed.text
    assert "I am leaving" in crashed.text
    assert before != after


async def test_a_crash_between_calls_costs_no_call(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        pid = await pid_of(pool)
        os.kill(pid, signal.SIGKILL)
        (session,) = pool._servers["rogue"]._sessions
        with anyio.fail_after(20):  # the end of the stream reaches us some time after the death of the process
            while session.is_alive:
                await anyio.sleep(0.01)
        assert (await pool.call(call("echo", text="hi"))).text == "hi"


async def test_calls_that_queue_while_the_server_crashes_go_to_the_next_one(rogue: Rogue) -> None:
    kinds: dict[str, ResultKind] = {}
    async with ToolPool([rogue(max_inflight=1)]) as pool:

        async def one(name: str) -> None:
            kinds[name] = (await pool.call(call(name))).kind

        async with anyio.create_task_group() as tasks:
            for name in ("exit", "echo", "count"):
                tasks.start_soon(one, name)
    assert kinds == {"exit": ResultKind.SERVER_ERROR, "echo": ResultKind.OK, "count": ResultKind.OK}


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_cannot_come_back_fails_calls_not_the_pool(rogue: Rogue, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    script.write_text((SERVERS / "rogue.py").read_text())
    config = ServerConfig(name="r", transport="stdio", command=sys.executable, args=(str(script),), protocol="legacy")
    async with ToolPool([config]) as pool:
        await pool.call(call("exit"))
        script.write_text("raise SystemExit('gone for good')")
        results = [await pool.call(call("echo")) for _ in range(2)]
    assert {result.kind for result in results} == {ResultKind.SERVER_ERROR}
    assert "gone for good" in results[0].text


async def test_a_server_that_closes_its_output_is_replaced(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        assert (await pool.call(call("close_stdout"))).kind is ResultKind.SERVER_ERROR
        assert (await pool.call(call("echo", text="hi"))).text == "hi"


async def test_a_mute_server_costs_a_call_its_deadline(rogue: Rogue) -> None:
    async with ToolPool([rogue(call_timeout=1.0)]) as pool:
        result = await pool.call(call("mute"))
        assert result.kind is ResultKind.TIMEOUT
        assert 1.0 <= result.seconds < 5
        assert (await pool.call(call("count"))).text == "2"


@pytest.mark.full
async def test_a_server_that_stops_reading_is_replaced_and_holds_up_nothing(rogue: Rogue) -> None:
    async with ToolPool([rogue(call_timeout=1.0)]) as pool:
        assert (await pool.call(call("stop_reading"))).kind is ResultKind.TIMEOUT
        start = time.monotonic()
        full = await pool.call(call("echo", text="x" * 400_000))  # more than fits into the pipe
        assert time.monotonic() - start < 8
        assert full.kind is ResultKind.TIMEOUT
        assert (await pool.call(call("echo", text="hi"))).text == "hi"


@pytest.mark.full
async def test_a_server_that_answers_nothing_any_more_is_replaced(rogue: Rogue) -> None:
    async with ToolPool([rogue(call_timeout=0.7)]) as pool:
        kinds = [(await pool.call(call(name))).kind for name in ("stop_reading", "echo", "echo", "echo")]
    assert kinds == [ResultKind.TIMEOUT] * 3 + [ResultKind.OK]


async def test_a_server_that_answers_others_is_not_replaced_for_calls_that_hang(rogue: Rogue) -> None:
    async with ToolPool([rogue(call_timeout=1.5, max_inflight=16)]) as pool:
        pid = await pid_of(pool)
        async with anyio.create_task_group() as tasks:
            for _ in range(6):
                tasks.start_soon(pool.call, call("mute"))
            await anyio.sleep(0.5)
            await pool.call(call("echo", text="hi"))
        assert await pid_of(pool) == pid


@pytest.mark.full
async def test_a_pool_that_is_closed_while_a_server_starts_does_not_wait_for_it(rogue: Rogue, tmp_path: Path) -> None:
    script = tmp_path / "server.py"
    config = replace(rogue(pool_size=2), args=(str(script),))
    script.write_text((SERVERS / "rogue.py").read_text())
    async with ToolPool([config]) as pool:
        script.write_text("import time; time.sleep(60)")
        await pool.call(call("exit"))
        await anyio.sleep(0.3)
        start = time.monotonic()
    assert time.monotonic() - start < 5


async def test_a_server_that_ends_at_once_is_reported_with_command_exit_code_and_last_words(rogue: Rogue) -> None:
    message = await opening_error(rogue("crash", env={"API_KEY": "s3cret-value"}))
    for words in ("'rogue'", "rogue.py crash", "exit code is 5", "cannot find my ***", "by hand"):
        assert words in message
    assert "s3cret-value" not in message


async def test_a_server_that_refuses_is_not_reported_as_one_that_ended(rogue: Rogue) -> None:
    message = await opening_error(rogue("refuse"))
    assert "could not be opened: not today" in message
    assert "exit code" not in message


async def test_secrets_stay_out_of_results(rogue: Rogue) -> None:
    async with ToolPool([rogue(env={"API_KEY": "s3cret-value"})]) as pool:
        result = await pool.call(call("print_secret"))
    assert "key is ***" in result.text


@pytest.mark.parametrize("length", [8192 - 4, 2 * 8192 - 4])
async def test_half_a_secret_does_not_show_where_the_error_output_is_cut(rogue: Rogue, length: int) -> None:
    async with ToolPool([rogue(env={"API_KEY": "s3cret-value"})]) as pool:
        result = await pool.call(call("print_secret", text=str(length)))
    assert "yyyy" in result.text
    assert "lue" not in result.text


async def test_a_program_that_is_not_there_is_reported() -> None:
    config = ServerConfig(name="x", transport="stdio", command="no-such-program", args=("--flag",))
    message = await opening_error(config)
    assert "no program 'no-such-program'" in message
    assert "`no-such-program --flag`" in message


async def test_a_folder_that_is_not_there_is_reported(rogue: Rogue) -> None:
    message = await opening_error(rogue(cwd="/no/such/folder"))
    assert "'/no/such/folder'" in message


async def test_a_command_may_be_relative_to_its_folder(tmp_path: Path, rogue: Rogue) -> None:
    script = tmp_path / "run"
    script.write_text(f"#!/bin/sh\nexec {sys.executable} {SERVERS / 'rogue.py'}\n")
    script.chmod(0o755)
    config = ServerConfig(name="r", transport="stdio", command="./run", cwd=str(tmp_path), protocol="legacy")
    async with ToolPool([config]) as pool:
        assert (await pool.call(call("echo", text="hi"))).text == "hi"


async def test_a_server_that_never_answers_is_given_up_in_time(rogue: Rogue) -> None:
    start = time.monotonic()
    message = await opening_error(rogue("silent", connect_timeout=0.3))
    assert "within 0.3 s" in message
    assert "connect_timeout" in message
    assert time.monotonic() - start < 8


@pytest.mark.parametrize("listing", ["circles", "forever"])
async def test_a_listing_without_end_is_refused(listing: str, rogue: Rogue) -> None:
    message = await opening_error(rogue(listing))
    assert "'rogue' lists its tools" in message


async def test_all_servers_that_cannot_start_are_reported_together(rogue: Rogue) -> None:
    message = await opening_error(rogue("crash", name="one"), rogue(name="fine"), rogue("crash", name="two"))
    assert message.startswith("2 of 3 servers")
    assert "'one'" in message
    assert "'two'" in message
    assert "'fine'" not in message


async def test_what_a_server_started_does_not_outlive_it(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        child = int((await pool.call(call("grandchild"))).text)
        assert psutil.pid_exists(child)
    await wait_until_gone(child)


async def test_a_child_that_left_the_group_and_holds_the_pipe_does_not_hold_up_closing(rogue: Rogue) -> None:
    start = time.monotonic()
    async with ToolPool([rogue()]) as pool:
        child = int((await pool.call(call("escaped_child"))).text)
    assert time.monotonic() - start < 8
    await wait_until_gone(child)


@pytest.mark.parametrize("ends", ["closed", "exit", full("suspend")])
async def test_a_daemon_of_a_server_does_not_outlive_it(rogue: Rogue, ends: str) -> None:
    async with ToolPool([rogue(call_timeout=1.0)]) as pool:
        daemon = int((await pool.call(call("daemon"))).text)
        assert psutil.pid_exists(daemon)
        if ends == "exit":
            await pool.call(call("exit"))
            await wait_until_gone(daemon)
        elif ends == "suspend":
            await pool.call(call("suspend"))
    await wait_until_gone(daemon)


async def test_a_daemon_dies_with_a_pool_of_which_all_servers_are_killed_at_once(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        daemon = int((await pool.call(call("daemon"))).text)
        kill_all()
        await wait_until_gone(daemon)


def test_a_guard_ends_as_its_server_does() -> None:
    command = [*_death_guard(), "/bin/sh", "-c"]
    assert command[0] == sys.executable
    for script, code in (("exit 7", 7), ("kill -9 $$", -9), ("kill -TERM $$", -15)):
        assert subprocess.run([*command, script], check=False).returncode == code


def test_a_guard_kills_its_cgroup_where_it_can_have_one() -> None:
    command = [*_death_guard(), "/bin/sh", "-c", "cat /proc/self/cgroup; kill -9 $$"]
    shown = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    (own,) = (line[3:] for line in shown.splitlines() if line.startswith("0::"))
    if "mcp_grpo-" not in own:
        pytest.skip("no cgroup can be made here")
    mounted = next(p.mountpoint for p in psutil.disk_partitions(all=True) if p.fstype == "cgroup2")
    assert not Path(f"{mounted}{own}").exists()


async def test_no_process_is_left_after_an_error(rogue: Rogue) -> None:
    with pytest.raises(KeyError, match="mine"):
        async with ToolPool([rogue()]):
            raise KeyError("mine")
    assert not _groups


async def test_no_process_and_no_task_is_left_after_cancellation(rogue: Rogue) -> None:
    before = asyncio.all_tasks()
    with anyio.CancelScope() as scope:
        async with ToolPool([rogue()]) as pool, anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(pool.call, call("mute"))
            await pool.call(call("count"))
            scope.cancel()
    assert scope.cancelled_caught
    assert not _groups
    assert asyncio.all_tasks() == before


async def test_no_process_is_left_when_opening_is_cancelled(rogue: Rogue) -> None:
    with anyio.move_on_after(0.3) as scope:
        async with ToolPool([rogue("silent")]):
            pass
    assert scope.cancelled_caught
    assert not _groups


async def test_servers_can_be_killed_at_once(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        pid = await pid_of(pool)
        kill_all()
        await wait_until_gone(pid)


async def test_a_closed_pool_answers_that_it_is_closed(rogue: Rogue) -> None:
    async with ToolPool([rogue()]) as pool:
        pass
    result = await pool.call(call("echo"))
    assert result.kind is ResultKind.SERVER_ERROR
    assert "closed" in result.text


def test_servers_die_with_a_trainer_that_is_killed() -> None:
    program = f"""
import anyio, sys, types
package = types.ModuleType("mcp_grpo")  # in place of the real one, which takes long to import
package.__path__ = [{str(Path(mcp_grpo.types.__file__).parent)!r}]
sys.modules["mcp_grpo"] = package
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import ToolCall

async def main():
    entry = {{"command": sys.executable, "args": [{str(SERVERS / "rogue.py")!r}], "x-mcp-grpo": {{"protocol": "legacy"}}}}
    async with ToolPool({{"r": entry}}) as pool:
        print((await pool.call(ToolCall(name="whoami", arguments={{}}))).text, flush=True)
        print((await pool.call(ToolCall(name="stop_reading", arguments={{}}))).text, flush=True)

anyio.run(main)
"""
    trainer = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert trainer.stdout
    pid = int(trainer.stdout.readline())
    trainer.kill()
    trainer.communicate()
    anyio.run(wait_until_gone, pid)


@pytest.mark.anyio
async def test_a_server_of_this_library_at_its_old_place_is_told_its_new_one() -> None:
    server = {"command": sys.executable, "args": ["-m", "mcp_grpo.servers.finance"]}
    with pytest.raises(ToolServerError, match=r"write `mcp_grpo\.desk\.servers\.finance` for `mcp_grpo\.servers\.fin"):
        async with ToolPool({"finance": server}):
            pass
