"""No server outlives this process: process groups are registered here, and a watchdog kills what is left when we die."""

import atexit
import logging
import os
import signal
import subprocess
import threading
from contextlib import suppress


logger = logging.getLogger(__name__)

# Reads `+GROUP` and `-GROUP`, and at the end of its input kills the groups that it still knows. The end comes however we
# die, also by SIGKILL, since it is the kernel that closes the pipe. The signals are those that are sent to whole jobs.
# There is no `--` before a group: dash and BusyBox take it for a process.
_SCRIPT = """
trap '' HUP INT TERM
groups=' '
while read -r line; do
    group=${line#?}
    case $line in
        +*) groups="$groups$group " ;;
        -*) groups="${groups%% $group *} ${groups#* $group }" ;;
    esac
done
for group in $groups; do kill -9 "-$group"; done
"""
_COMMAND = ("/bin/sh", "-c", _SCRIPT, "mcp_grpo watchdog")  # the last is for whoever reads a list of processes


class _Watchdog:
    """The child process that outlives us, for a moment."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            _COMMAND,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
            start_new_session=True,  # a signal to our group must not reach it
        )
        assert self._process.stdin
        self._pipe = self._process.stdin
        os.set_blocking(self._pipe.fileno(), False)

    @property
    def is_alive(self) -> bool:
        """Whether it can be told anything."""
        return not self._pipe.closed and self._process.poll() is None

    def tell(self, line: str) -> None:
        """Pass on one line, which is short enough for the pipe to take it whole or not at all."""
        try:
            os.write(self._pipe.fileno(), line.encode() + b"\n")
        except (OSError, ValueError):  # it is dead, does not read, or was ended here; the next group starts another
            self.end()

    def end(self) -> None:
        """Kill and reap it. Not by the end of its input: it would kill the groups, and might take its time."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def disown(self) -> None:
        """Let go of it in a forked child, which is not its parent."""
        self._pipe.close()
        self._process.returncode = 0  # or `Popen` would warn of a child that was not waited for


_lock = threading.Lock()  # pools may live on several threads
_groups: set[int] = set()
_watchdog: _Watchdog | None = None


def register(group: int) -> None:
    """
    Have a process group killed when this process ends, however it ends.

    What leaves the group, as a daemon does, is not found. Starts the watchdog with the first group.

    Args:
        group (`int`):
            Id of the group, led by a child of this process.
    """
    global _watchdog
    with _lock:
        _groups.add(group)
        if _watchdog is not None and _watchdog.is_alive:
            _watchdog.tell(f"+{group}")
            return
        _end_watchdog()
        try:
            _watchdog = _Watchdog()
        except OSError as error:  # no process or no file is to be had; the servers can still be killed at exit
            logger.warning(
                "The watchdog over the servers could not be started: %s. Servers may be left behind.", error
            )
            return
        for known in _groups:
            _watchdog.tell(f"+{known}")


def unregister(group: int) -> None:
    """
    Forget a process group, because it has ended. Ends the watchdog with the last group.

    Args:
        group (`int`):
            Id of the group. One that is not known is no mistake.
    """
    with _lock:
        if group not in _groups:
            return
        _groups.remove(group)
        if not _groups:
            _end_watchdog()
        elif _watchdog is not None and _watchdog.is_alive:
            _watchdog.tell(f"-{group}")


def kill_all() -> None:
    """Kill every group at once, and forget them. For the end of the process; closing a pool is the polite way."""
    with _lock:
        for group in _groups:
            signal_group(group, signal.SIGKILL)
        _groups.clear()
        _end_watchdog()


def signal_group(group: int, number: signal.Signals) -> None:
    """
    Send a signal to all processes of a group, if there are any left.

    Args:
        group (`int`):
            Id of the group.
        number (`signal.Signals`):
            The signal.
    """
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _end_watchdog() -> None:
    global _watchdog
    if _watchdog is not None:
        _watchdog.end()
        _watchdog = None


def _disown() -> None:
    """A forked child has the table and the pipe, but no right to end the servers; and it must not keep the pipe open."""
    # A child forked by other means than Python's does not come here. While it lives, the pipe has no end, so servers that
    # a killed trainer leaves behind live as long; `exec` closes the pipe.
    global _lock, _watchdog
    _lock = threading.Lock()  # another thread of the parent may have held it
    _groups.clear()
    if _watchdog is not None:
        _watchdog.disown()
        _watchdog = None


atexit.register(kill_all)
os.register_at_fork(after_in_child=_disown)
