"""The Python server as a policy meets it: over stdio and HTTP, through a pool."""

import os
import re
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import psutil
import pytest
from helpers.marks import full
from helpers.sandboxes import WALLED, each, sandbox_of

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.servers.python.process import Limits
from mcp_grpo.desk.servers.python.sandbox import open_sandbox
from mcp_grpo.desk.servers.python.server import python_server
from mcp_grpo.desk.servers.python.states import StateLostError, States, calls_at_once
from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools import Lease, ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="there are no walls for Python code on this system"),
]

ROOT = str(Path(__file__).parents[3])
TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module", autouse=True)
def no_process_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, f"processes left behind: {left}"


def config(*args: str, **options: Any) -> ServerConfig:
    environment = {"PYTHONPATH": ROOT, "MCP_GRPO_SECRET": "canary-77d0"}
    fixed: dict[str, Any] = {"command": sys.executable, "env": environment, "isolation": "meta"}
    fixed |= {"args": ("-m", "mcp_grpo.desk.servers.python", *args), "reset_tool": "python_reset"}
    return ServerConfig(name="python", transport="stdio", **fixed | options)


@pytest.mark.full
async def test_calls_that_sleep_do_not_use_up_the_time_of_others() -> None:
    servers = desk_servers()["mcpServers"]["python"]
    assert servers["x-mcp-grpo"]["max_inflight"] == calls_at_once()
    slots = calls_at_once()
    # As many as run at a time, three times over: the last would wait in the server for longer than a call may take.
    entry = config("--timeout", "4", max_inflight=slots, call_timeout=4.0)
    results: list[ToolResult] = []

    async def ask(code: str, number: int) -> None:
        async with pool.lease(Task(task_id=str(number), prompt=TASK.prompt)) as lease:
            results.append(await lease.call(ToolCall(name="run_python", arguments={"code": code})))

    async with ToolPool([entry]) as pool, anyio.create_task_group() as tasks:
        for number in range(3 * slots):
            tasks.start_soon(ask, "import time\ntime.sleep(1.5)", number)
    assert [one.kind for one in results] == [ResultKind.OK] * (3 * slots)


@pytest.fixture(scope="module", params=each(WALLED))
async def pool(no_process_is_left: None, request: pytest.FixtureRequest) -> AsyncGenerator[ToolPool, None]:
    """A server with all settings but the level as they are by default."""
    sandbox_of(request.param, Limits()).close()
    async with ToolPool([config("--sandbox", request.param)]) as pool:
        yield pool


@asynccontextmanager
async def leases(*args: str, number: int = 1) -> AsyncGenerator[list[Lease], None]:
    async with ToolPool([config(*args)]) as pool, AsyncExitStack() as stack:
        yield [await stack.enter_async_context(pool.lease(TASK)) for _ in range(number)]


async def run(lease: Lease | ToolPool, code: str) -> ToolResult:
    return await lease.call(ToolCall(name="run_python", arguments={"code": code}))


async def say(lease: Lease | ToolPool, code: str) -> str:
    result = await run(lease, code)
    assert result.kind is ResultKind.OK, result.text
    return result.text


async def fail(lease: Lease | ToolPool, code: str) -> str:
    result = await run(lease, code)
    assert result.kind is ResultKind.TOOL_ERROR, result.text
    return result.text


async def test_the_policy_sees_one_small_tool(pool: ToolPool) -> None:
    (tool,) = pool.catalog.tools
    assert tool.name == "run_python"
    function = tool.schema["function"]
    assert function["parameters"]["required"] == ["code"]
    assert list(function["parameters"]["properties"]) == ["code"]
    assert len(str(tool.schema)) < 500


async def test_results_are_what_is_printed_and_the_value_of_the_last_line(pool: ToolPool) -> None:
    async with pool.lease(TASK) as lease:
        assert await say(lease, "1 + 1") == "2"
        assert await say(lease, "print('a')\nprint('b')") == "a\nb"
        assert await say(lease, "print('a')\n'b'") == "a\n'b'"
        assert await say(lease, "x = 1") == "The code ran and printed nothing."
        assert await say(lease, "None") == "The code ran and printed nothing."
        assert await say(lease, "import sys\nprint('no', file=sys.stderr)\n1") == "1\nstderr:\nno"
        assert await say(lease, "print('ß\\ud800\\0')") == "ß\\ud800\0"
        assert await say(lease, "import os\n_ = os.write(1, b'\\xff{\"jsonrpc\": 1}\\n')") == '\ufffd{"jsonrpc": 1}'
        assert await say(lease, "raise SystemExit") == "The code ran and printed nothing."
        assert await say(lease, "{'a', 'b', 'c', 'd'}") == await say(lease, "set('abcd')")


async def test_errors_of_the_code_are_its_own_lines_and_the_error(pool: ToolPool) -> None:
    async with pool.lease(TASK) as lease:
        await say(lease, "def half(x):\n    return 1 / x")
        assert await fail(lease, "print('before')\nhalf(0)") == (
            "before\nTraceback (most recent call last):\n"
            '  File "<call 2>", line 2, in <module>\n    half(0)\n'
            '  File "<call 1>", line 2, in half\n    return 1 / x\n'
            "ZeroDivisionError: division by zero"
        )
        assert re.search(r"line 1\n    x = \n.*SyntaxError: invalid syntax", await fail(lease, "x = "), re.DOTALL)
        assert (await fail(lease, "raise SystemExit('no')")).endswith("SystemExit: no")
        assert "source code string cannot contain null bytes" in await fail(lease, "\0")
        assert "no network" in await fail(lease, "import socket\nsocket.socket()")
        assert "characters; 100,000 are the limit" in await fail(lease, "#" * 100_001)


@pytest.mark.full
async def test_output_is_cut_in_its_middle() -> None:
    async with leases("--max-output", "200") as (lease,):
        text = await say(lease, "for i in range(10**5): print(i)")
        assert text.startswith("0\n1\n2")
        assert text.endswith("99998\n99999")
        assert "left out" in text
        assert len(text) < 300
        text = await say(lease, "list(range(10**5))")
        assert text.startswith("[0, 1")
        assert text.endswith("99999]")
        assert len(text) < 300


async def test_what_a_trajectory_did_stays_and_others_do_not_see_it(pool: ToolPool) -> None:
    async with pool.lease(TASK) as first, pool.lease(TASK) as second:
        await say(first, "import math\nx = 5\nopen('f', 'w').write('hello')")
        assert "NameError" in await fail(second, "x")
        assert "NameError" in await fail(second, "math")
        assert "FileNotFoundError" in await fail(second, "open('f')")
        assert await say(first, "math.sqrt(x * 5), open('f').read()") == "(5.0, 'hello')"


@pytest.mark.full
async def test_calls_without_a_trajectory_share_one_state_until_it_is_reset() -> None:
    async with ToolPool([config(isolation="shared", reset_tool=None)]) as pool:
        await say(pool, "x = 5")
        assert await say(pool, "x") == "5"
        result = await pool.call(ToolCall(name="python_reset", arguments={}))
        assert result.text == "Forgotten."
        assert "NameError" in await fail(pool, "x")


async def test_calls_of_one_trajectory_wait_for_each_other(pool: ToolPool) -> None:
    async with pool.lease(TASK) as lease:
        await say(lease, "import time\nx = []")
        code = "x.append('in'); time.sleep(0.01); x.append('out')"
        await lease.call_all([ToolCall(name="run_python", arguments={"code": code})] * 5)
        assert await say(lease, "x == ['in', 'out'] * 5") == "True"


@pytest.mark.full
async def test_a_call_that_takes_too_long_ends_the_state_and_says_so() -> None:
    async with leases("--timeout", "0.3", number=2) as (first, second):
        await say(first, "x = 5")
        await say(second, "x = 6")
        text = await fail(first, "print('so far')\nwhile True: pass")
        assert text == (
            "so far\nStopped: a call may take 0.3 s. Do less in one call, or find a faster way. "
            "Variables, imports and files of earlier calls are gone; the next call starts anew."
        )
        assert "NameError" in await fail(first, "x")
        assert await say(second, "x") == "6"


async def test_neither_the_protocol_nor_the_servers_secrets_can_be_reached(pool: ToolPool) -> None:
    async with pool.lease(TASK) as first, pool.lease(TASK) as second:
        code = (
            "import os\nfound = []\n"
            'for i in range(1024):\n    try: os.write(i, b\'{"jsonrpc": "2.0", "id": 1, "result": {}}\\n\')\n'
            "    except OSError: pass\n"
        )
        await run(first, code)
        code = (
            "import os\nfor i in [os.getppid(), 1, *range(2, 40000)]:\n"
            "    try: print(open(f'/proc/{i}/environ').read())\n    except OSError: pass\n'done'"
        )
        assert await say(second, code) == "'done'"
        assert await say(second, "1 + 1") == "2"


async def test_many_trajectories_at_once_each_have_their_own(pool: ToolPool) -> None:
    texts: dict[int, str] = {}

    async def trajectory(number: int) -> None:
        async with pool.lease(TASK) as lease:
            await say(lease, f"x = {number}")
            texts[number] = await say(lease, "x")

    async with anyio.create_task_group() as tasks:
        for number in range(24):
            tasks.start_soon(trajectory, number)
    assert texts == {number: str(number) for number in range(24)}


@pytest.mark.full
async def test_a_trajectory_waits_until_another_makes_room_and_no_state_is_lost() -> None:
    server = config("--max-live", "2", max_trajectories=2)
    states: list[str] = []
    async with ToolPool([server]) as pool:

        async def trajectory(number: int) -> None:
            async with pool.lease(TASK) as lease:
                await say(lease, f"x = {number}")
                await anyio.sleep(0.1)
                states.append(await say(lease, "x"))

        async with anyio.create_task_group() as tasks:
            for number in range(6):
                tasks.start_soon(trajectory, number)
    assert sorted(states) == [str(number) for number in range(6)]


@pytest.mark.full
async def test_a_state_that_was_given_up_is_the_server_s_fault() -> None:
    async with ToolPool([config("--max-idle", "0.2")]) as pool, pool.lease(TASK) as lease:
        await say(lease, "x = 5")
        await anyio.sleep(1)
        result = await run(lease, "x")
    assert result.kind is ResultKind.SERVER_ERROR
    assert "was not run" in result.text
    assert "not used for 0.2 s" in result.text


@pytest.mark.full
async def test_over_http_too() -> None:
    command = [sys.executable, "-m", "mcp_grpo.desk.servers.python", "--transport", "http", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stderr
            assert server.stderr.readline().startswith("sandbox: ")
            url = server.stderr.readline().strip()
            options: dict[str, Any] = {"isolation": "meta", "reset_tool": "python_reset"}
            web = ServerConfig(name="python", transport="http", url=url, **options)
            async with ToolPool([web]) as pool, pool.lease(TASK) as first, pool.lease(TASK) as second:
                await say(first, "x = 5")
                assert "NameError" in await fail(second, "x")
                assert await say(first, "x") == "5"
                pids = [child.pid for child in psutil.Process(server.pid).children(recursive=True)]
                assert len(pids) >= 3
        finally:
            server.terminate()
            server.communicate()
    await all_gone(pids)


@pytest.mark.parametrize("level", each(WALLED))
@pytest.mark.full
async def test_processes_end_with_a_server_that_is_killed(level: str) -> None:
    sandbox_of(level, Limits()).close()
    async with ToolPool([config("--sandbox", level)]) as pool, pool.lease(TASK) as lease:
        await say(lease, "1")
        server = max(
            (child for child in psutil.Process().children() if "mcp_grpo.desk.servers.python" in child.cmdline()),
            key=lambda child: child.create_time(),
        )
        pids = [child.pid for child in server.children(recursive=True)]
        assert len(pids) >= 2
        server.kill()
        await all_gone(pids)


async def all_gone(pids: list[int]) -> None:
    with anyio.fail_after(60):
        while any(is_alive(pid) for pid in pids):
            await anyio.sleep(0.01)


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which is for whoever adopted it to reap
    return False


class TestStates:
    @pytest.fixture(params=each(WALLED))
    async def make(self, request: pytest.FixtureRequest) -> AsyncGenerator[Any, None]:
        sandbox = sandbox_of(request.param, Limits())
        yield lambda **options: States(sandbox, **options)
        sandbox.close()

    async def test_one_that_is_not_used_for_long_is_given_up(self, make: Any) -> None:
        async with make(max_idle=0.2) as states:
            await states.run("a", "x = 5")
            with anyio.fail_after(60):
                while states._states["a"].process is not None:
                    await anyio.sleep(0.01)
            with pytest.raises(StateLostError, match=r"not used for 0\.2 s"):
                await states.run("a", "x")
            assert "NameError" in ((await states.run("a", "x")).error or "")

    async def test_there_are_never_more_than_there_may_be_and_none_is_dropped_for_another(self, make: Any) -> None:
        async with make(max_live=4) as states:
            for name in "abc":
                await states.run(name, f"x = {name!r}")
            async with anyio.create_task_group() as tasks:
                for name in "defghijk":
                    tasks.start_soon(states.run, name, f"x = {name!r}")
                for name in "abcdefghijk":
                    with anyio.fail_after(60):
                        while not (state := states._states.get(name)) or state.process is None or state.is_running:
                            await anyio.sleep(0.01)
                    assert len([state for state in states._states.values() if state.process is not None]) <= 4
                    assert (await states.run(name, "x")).value == repr(name)
                    await states.reset(name)

    async def test_who_finds_no_room_in_time_is_told_whose_fault_it_is(self, make: Any) -> None:
        async with make(max_live=1, max_wait=0.2) as states:
            await states.run("a", "x = 5")
            with pytest.raises(ToolServerError, match="All places of the Python server, 1, are taken"):
                await states.run("b", "1")
            assert (await states.run("a", "x")).value == "5"
            await states.reset("a")
            assert (await states.run("b", "1")).value == "1"

    async def test_a_place_that_is_not_used_for_long_is_free_for_another(self, make: Any) -> None:
        async with make(max_live=1, max_idle=0.2) as states:
            await states.run("a", "import os; os._exit(1)")  # no process, but a place
            assert (await states.run("b", "1")).value == "1"

    async def test_a_reset_also_forgets_that_a_state_was_given_up(self, make: Any) -> None:
        async with make(max_live=1, max_idle=0.2) as states:
            await states.run("a", "x = 5")
            await states.run("b", "x = 5")
            await states.reset("a")
            await states.reset("b")
            assert (await states.run("a", "1")).value == "1"

    async def test_no_process_no_thread_and_no_file_is_left(self, make: Any) -> None:
        process = psutil.Process()
        async with make() as states:
            await states.run("a", "x = 5")
        num_fds = process.num_fds()
        children = process.children()
        async with make(max_live=2) as states:
            for name in "abcde":
                await states.run(name, "x = 5")
                if name != "e":
                    await states.reset(name)
            await states.run("f", "x = 5")
        assert process.num_fds() == num_fds
        assert process.children() == children

    async def test_a_trajectory_that_is_cancelled_keeps_a_state_that_works(self, make: Any) -> None:
        async with make() as states:
            await states.run("a", "import time\nx = 5")
            with anyio.move_on_after(0.05):
                await states.run("a", "time.sleep(0.3)")
            assert (await states.run("a", "x")).value == "5"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--timeout", "0"), "must be greater than 0"),
        full(("--timeout", "nan"), "must be greater than 0"),
        full(("--sandbox", "none"), "invalid choice"),
        full(("--sandbox", "bubblewrap"), "apt-get install bubblewrap"),
    ],
)
def test_what_cannot_be_is_refused_at_start(args: tuple[str, ...], message: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mcp_grpo.desk.servers.python", *args]
    environment = os.environ | {"PATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_it_says_at_start_what_keeps_the_code_in() -> None:
    command = [sys.executable, "-m", "mcp_grpo.desk.servers.python", "--sandbox", "rlimits"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, input="", check=False)
    assert re.match(r"sandbox: rlimits (\+ seccomp|only)\n", done.stderr)


async def test_a_sandbox_that_does_not_start_is_nobody_s_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*_: object) -> None:
        raise ToolServerError("The sandboxed process did not start: no room.")

    monkeypatch.setattr(States, "run", broken)
    async with ToolPool({"python": python_server(open_sandbox("auto", Limits()))}) as pool:
        result = await pool.call(ToolCall(name="run_python", arguments={"code": "1"}))
    assert result.kind is ResultKind.SERVER_ERROR
    assert "no room" in result.text
