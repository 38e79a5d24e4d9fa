"""However a process ends, its servers end with it, and so does what they started, daemons too."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import psutil
import pytest
from helpers.marks import full
from helpers.processes import left_behind

from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.tools.transports import reaper
from mcp_grpo.types import ToolCall


SCRIPT = Path(__file__).parents[2] / "servers" / "use_pool.py"
Rogue = Callable[..., ServerConfig]


def is_there(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # it ended between the two
        return False


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 30
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def watchdogs(pid: int | None = None) -> list[psutil.Process]:
    children = psutil.Process(pid).children()
    return [child for child in children if child.cmdline()[-1:] == ["mcp_grpo watchdog"]]


@contextmanager
def pool_user(how: str) -> Iterator[tuple["subprocess.Popen[str]", list[psutil.Process]]]:
    """A process with an open pool, and what it has started: a server, its guard, what it has started, and a watchdog."""
    command = [sys.executable, str(SCRIPT), how]
    user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started: list[psutil.Process] = []
    try:
        assert user.stdout
        assert user.stdout.readline() == "ready\n"
        started = psutil.Process(user.pid).children(recursive=True)
        yield user, started
    finally:
        user.kill()
        for process in filter(is_there, started):
            process.kill()
        user.communicate()


@pytest.mark.parametrize("signum", [signal.SIGKILL, full(signal.SIGTERM), full(signal.SIGINT), full(signal.SIGHUP)])
def test_servers_and_what_they_started_die_with_a_process_that_is_sent(signum: signal.Signals) -> None:
    with pool_user("wait") as (user, started):
        assert len(started) == 5
        user.send_signal(signum)
        assert eventually(lambda: not any(map(is_there, started))), started


@pytest.mark.parametrize("how", [full("raise"), full("exit"), "_exit"])
def test_servers_and_what_they_started_end_with_a_process_that_ends_by(how: str) -> None:
    with pool_user(how) as (user, started):
        assert len(started) == 5
        _, errors = user.communicate("go on\n", timeout=10)
        assert eventually(lambda: not any(map(is_there, started))), started
    assert user.returncode == (1 if how == "raise" else 3)
    assert ("KeyError: 'mine'" in errors) == (how == "raise")
    assert "Warning" not in errors


@pytest.mark.full
def test_a_forked_child_that_lives_on_does_not_keep_the_servers_alive() -> None:
    with pool_user("fork") as (user, started):
        (forked,) = (p for p in started if p.ppid() == user.pid and p.cmdline()[-1] == "fork")
        user.kill()
        assert eventually(lambda: [p for p in started if is_there(p)] == [forked]), started


@pytest.mark.full
def test_a_watchdog_that_was_killed_is_replaced_and_told_what_the_first_one_knew() -> None:
    with pool_user("restart") as (user, started):
        assert len(started) == 9  # two servers, their guards, what they started, and one watchdog
        user.kill()
        assert eventually(lambda: not any(map(is_there, started))), started


@pytest.mark.anyio
async def test_a_closed_pool_leaves_no_watchdog_no_thread_and_no_file(rogue: Rogue) -> None:
    def held() -> tuple[set[threading.Thread], int]:
        return set(threading.enumerate()), psutil.Process().num_fds()

    async with ToolPool([rogue()]):  # whatever is made once and kept
        pass
    before = held()
    async with ToolPool([rogue(name="a"), rogue(name="b")]):
        assert len(watchdogs()) == 1
        assert held()[1] > before[1]
    with anyio.move_on_after(30):
        while held() != before:
            await anyio.sleep(0.02)
    assert held() == before
    assert not left_behind()


@pytest.mark.anyio
async def test_the_watchdog_does_not_hear_signals_to_our_group_nor_those_to_whole_jobs(rogue: Rogue) -> None:
    async with ToolPool([rogue()]):
        (watchdog,) = watchdogs()
        assert os.getpgid(watchdog.pid) == watchdog.pid
        for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            watchdog.send_signal(signum)
        await anyio.sleep(0.1)
        assert is_there(watchdog)


@pytest.mark.anyio
async def test_a_watchdog_that_cannot_be_started_does_not_hold_up_a_server(
    rogue: Rogue, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reaper, "_COMMAND", ("/no/such/shell",))
    async with ToolPool([rogue()]) as pool:
        assert (await pool.call(ToolCall(name="echo", arguments={"text": "hi"}))).text == "hi"
    assert "could not be started" in caplog.text


def test_a_group_that_was_unregistered_is_left_alone_and_a_forked_child_kills_nothing() -> None:
    program = f"""
import importlib.util, os, signal, subprocess
spec = importlib.util.spec_from_file_location("reaper", {reaper.__file__!r})
reaper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reaper)
sleepers = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(4)]
for sleeper in sleepers:
    reaper.register(sleeper.pid)
if os.fork() == 0:
    raise SystemExit  # through `atexit`
os.wait()
assert all(sleeper.poll() is None for sleeper in sleepers)
for sleeper in sleepers[::2]:
    reaper.unregister(sleeper.pid)
print(*(sleeper.pid for sleeper in sleepers), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    # Its output goes to a pipe that the sleepers hold open too, so it is read by the line.
    user = subprocess.Popen([sys.executable, "-W", "error", "-c", program], stdout=subprocess.PIPE, text=True)
    assert user.stdout
    sleepers = [psutil.Process(int(pid)) for pid in user.stdout.readline().split()]
    try:
        assert len(sleepers) == 4
        assert eventually(lambda: not any(map(is_there, sleepers[1::2])))
        assert all(map(is_there, sleepers[::2]))
    finally:
        for sleeper in filter(is_there, sleepers):
            sleeper.kill()
        user.communicate()


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", full("os._exit(3)"), "raise SystemExit(3)"])
def test_single_processes_end_with_us_but_not_one_that_has_their_id_by_then(end: str) -> None:
    program = f"""
import importlib.util, os, signal, subprocess
spec = importlib.util.spec_from_file_location("reaper", {reaper.__file__!r})
reaper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reaper)
sleepers = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
reaper.end_with_us([sleepers[0].pid])
begun, reaper._begun = reaper._begun, lambda pid: "17"  # that of a process which had this id
reaper.end_with_us([sleepers[1].pid])
reaper._begun = begun
print(*(sleeper.pid for sleeper in sleepers), flush=True)
input()
{end}
"""
    command = [sys.executable, "-c", program]
    user = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert user.stdin
    assert user.stdout
    sleepers = [psutil.Process(int(pid)) for pid in user.stdout.readline().split()]
    try:
        print(file=user.stdin, flush=True)  # they are known: it may end
        assert len(sleepers) == 3
        assert eventually(lambda: not is_there(sleepers[0]))
        time.sleep(0.3)  # the others would have been killed just after it
        assert all(map(is_there, sleepers[1:]))
    finally:
        for sleeper in filter(is_there, sleepers):
            sleeper.kill()
        user.communicate()


def test_single_processes_can_be_ended_before_and_are_forgotten_then() -> None:
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(3)]
    try:
        end = reaper.end_with_us(child.pid for child in children[:2])
        assert len(watchdogs()) == 1
        children[1].kill()
        children[1].wait()  # it has ended by itself
        end()
        end()
        assert children[0].wait(30) == -signal.SIGKILL
        assert children[2].poll() is None
        assert not watchdogs()
    finally:
        for child in children:
            child.kill()
            child.wait()


def test_a_watchdog_that_does_not_read_holds_up_nothing_and_is_replaced() -> None:
    child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    try:
        reaper.register(child.pid)
        (stopped,) = watchdogs()
        stopped.suspend()
        start = time.monotonic()
        for _ in range(20_000):  # more than fits into the pipe
            reaper.register(child.pid)
        assert time.monotonic() - start < 5
        assert not is_there(stopped)
        assert len(watchdogs()) == 1
        assert child.poll() is None
    finally:
        reaper.unregister(child.pid)
        child.kill()
        child.wait()
    assert not watchdogs()


def test_many_threads_register_and_unregister_at_once() -> None:
    def use(child: "subprocess.Popen[bytes]") -> None:
        for _ in range(50):
            reaper.register(child.pid)
            reaper.unregister(child.pid)

    children = [subprocess.Popen(["sleep", "1000"], start_new_session=True) for _ in range(4)]
    threads = [threading.Thread(target=use, args=(child,)) for child in children]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not watchdogs()
        assert all(child.poll() is None for child in children)
    finally:
        for child in children:
            child.kill()
            child.wait()
