"""
Kill the process groups of servers, and single processes that others have started for us, when this process ends, however it ends,
and remove the homes that servers were given: a watchdog outlives it for a moment.

What left its group is for the server's guard to kill; see `guard`.
"""

import atexit
import logging
import os
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress


logger = logging.getLogger(__name__)

# Reads `+NAME` and `-NAME`, and at the end of its input kills what is left: a group by its id, a process by its id and the time it
# began at (`ID:TIME`), since its id may be another one's by then. The input ends however we die, even by SIGKILL, since the kernel
# closes the pipe. Guards are told first, and given time to do their work. It ignores the signals that are sent to whole jobs. No
# `--` before a group: dash and BusyBox take it for a process.
_SCRIPT = """
trap '' HUP INT TERM
begun() { read -r stat < "/proc/$1/stat"; set -- ${stat##*) }; echo "${20}"; }
names=' '
while read -r line; do
    name=${line#?}
    case $line in
        +*) names="$names$name " ;;
        -*) names="${names%% $name *} ${names#* $name }" ;;
    esac
done
groups=
for name in $names; do
    pid=${name%:*}
    case $name in
        "$pid") groups="$groups $pid"; kill -USR1 "$pid" ;;
        "$pid:$(begun "$pid")") kill -9 "$pid" ;;
    esac
done
sleep 1
for group in $groups; do kill -9 "-$group"; done
for _ in 1 2 3 4 5; do rm -rf "$HOMES" && break; sleep 1; done
"""
_REMOVE = ("/bin/rm", "-rf")  # `shutil.rmtree` recurses, and fails where a server has made folders in folders
_END_TIME = 1.0  # seconds for guards to end what they guard
_COMMAND = ("/bin/sh", "-c", _SCRIPT, "mcp_grpo watchdog")  # the last is shown in process lists


class _Watchdog:
    """The child process that kills what is left."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _COMMAND,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"HOMES": _homes},
            start_new_session=True,  # a signal to our group must not reach it
        )
        assert self._process.stdin
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def is_alive(self) -> bool:
        """Return whether it can be written to."""
        return not self._pipe.closed and self._process.poll() is None

    def tell(self, line: str) -> None:
        """Write one line, short enough to be written whole or not at all."""
        try:
            os.write(self._pipe.fileno(), line.encode() + b"\n")
        except (OSError, ValueError):  # dead, stuck or ended; the next name starts another
            self.end()

    def end(self) -> None:
        """Kill and reap it; the end of its input would make it kill what it knows."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def disown(self) -> None:
        """Forget it in a forked child, which is not its parent."""
        self._pipe.close()
        self._process.returncode = 0  # or `Popen` would warn of an unreaped child


def _new_homes() -> str:
    """Name a folder that is not there, and that nobody can guess."""
    return os.path.join(tempfile.gettempdir(), f"mcp_grpo_servers_{uuid.uuid4().hex}")


_lock = threading.Lock()  # pools may live on several threads
_homes = _new_homes()  # made when the first server in a sandbox is started
_groups: set[int] = set()
_processes: set[str] = set()  # by id and beginning
_watchdog: _Watchdog | None = None


def register(group: int) -> None:
    """Have a process group killed when this process ends."""
    with _lock:
        _groups.add(group)
        _tell_of(group)


def unregister(group: int) -> None:
    """Forget a process group that has ended; an unknown one is ignored."""
    with _lock:
        if group in _groups:
            _groups.remove(group)
            _tell_end_of(group)


def end_with_us(pids: Iterable[int]) -> Callable[[], None]:
    """Have single processes killed when this process ends; return what kills those that are left, and forgets them, before."""
    names = {f"{pid}:{_begun(pid)}" for pid in pids}
    with _lock:
        for name in names:
            _processes.add(name)
            _tell_of(name)

    def end() -> None:
        with _lock:
            for name in names & _processes:
                _kill_process(name)
                _processes.remove(name)
                _tell_end_of(name)

    return end


def _tell_of(new: int | str) -> None:
    """Tell the watchdog of a group or process, or start one that knows all."""
    global _watchdog
    if _watchdog is not None and _watchdog.is_alive:
        _watchdog.tell(f"+{new}")
        return
    _end_watchdog()
    try:
        _watchdog = _Watchdog()
    except OSError as error:  # out of processes or files; all can still be killed at exit
        logger.warning("The watchdog of the servers could not be started: %s. Servers may be left behind.", error)
        return
    for known in (*_groups, *_processes):
        _watchdog.tell(f"+{known}")


def _tell_end_of(old: int | str) -> None:
    if not _groups and not _processes:
        _end_watchdog()
    elif _watchdog is not None and _watchdog.is_alive:
        _watchdog.tell(f"-{old}")


def make_home() -> str:
    """Make a folder for a server in a sandbox, which is removed at the latest when this process ends."""
    with _lock:
        os.makedirs(_homes, mode=0o700, exist_ok=True)
        return tempfile.mkdtemp(dir=_homes)


def remove_home(home: str) -> None:
    """Remove a folder that [`make_home`] made, whatever is in it."""
    subprocess.run([*_REMOVE, home], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    with _lock, suppress(OSError):
        os.rmdir(_homes)  # unless others are in it


def kill_all() -> None:
    """Kill and forget every group and process, and remove the homes, at the end of this process."""
    with _lock:
        for name in _processes:
            _kill_process(name)
        _processes.clear()
        for group in _groups:
            end_guard(group)
        end = time.monotonic() + _END_TIME
        while any(map(_is_running, _groups)) and time.monotonic() < end:
            time.sleep(0.01)
        for group in _groups:
            signal_group(group, signal.SIGKILL)
        _groups.clear()
        _end_watchdog()
        if os.path.exists(_homes):
            subprocess.run([*_REMOVE, _homes], stderr=subprocess.DEVNULL, check=False)


def end_guard(pid: int) -> None:
    """Tell a guard to kill what it guards and to exit; a process without one is killed by the same signal."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGUSR1)


def _is_running(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _begun(pid: int) -> str:
    """Return when a process began, in ticks of the kernel; nothing if it has ended, or the system does not tell."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def _kill_process(name: str) -> None:
    """Kill a process, unless its id is another one's by now."""
    pid, _, begun = name.partition(":")
    if _begun(int(pid)) == begun:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(pid), signal.SIGKILL)


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to all processes of a group, if any are left."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_watchdog() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.end()
        _watchdog = None


def _disown() -> None:
    """Drop the table and the pipe in a forked child, which must not end the servers."""
    # A child not forked by Python keeps the pipe open: servers that a killed trainer leaves behind then live as long as it
    # does. `exec` closes the pipe.
    global _lock, _watchdog, _homes
    _homes = _new_homes()
    _lock = threading.Lock()  # another thread of the parent may have held it
    _groups.clear()
    _processes.clear()
    if _watchdog is not None:
        _watchdog.disown()
        _watchdog = None


atexit.register(kill_all)
os.register_at_fork(after_in_child=_disown)
