"""
Run a server, and end with it all that it started: `python guard.py PROGRAM ARGUMENT...`.

A process of its own, between us and the server. What the server leaves behind, daemons in sessions of their own too, falls to the
guard (`PR_SET_CHILD_SUBREAPER`), which kills it when the server exits, when it is told to (`SIGUSR1`), or when our process dies.
Where a cgroup can be made (version 2, and the right to), that is killed as a whole first, which no fork escapes.

Not stopped: a server that kills its guard dies with it, but its daemons live on, if there was no cgroup.
"""

import ctypes
import os
import signal
import sys


_SET_PDEATHSIG, _SET_CHILD_SUBREAPER = 1, 36
END = signal.SIGUSR1
_KEPT_FROM_GUARD = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)  # meant for the server


def main() -> None:
    """Start the server, wait for its end, end what is left, and exit as the server did."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    if libc.prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        os.execv(sys.argv[1], sys.argv[1:])
    for number in _KEPT_FROM_GUARD:
        signal.signal(number, signal.SIG_IGN)
    group = _own_cgroup()
    signal.signal(END, lambda _number, _frame: _end(group, signal.SIGKILL))
    libc.prctl(_SET_PDEATHSIG, END, 0, 0, 0)
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        for number in (*_KEPT_FROM_GUARD, END, signal.SIGPIPE):
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if group is not None:
            _write(f"{group}/cgroup.procs", "0")
        if os.getppid() == guard:
            os.execv(sys.argv[1], sys.argv[1:])
        os._exit(127)
    _let_go_of_streams()
    if os.getppid() != parent:  # it died before we asked to be told
        _end(group, signal.SIGKILL)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == server:
            break
    _end(group, status)


def _let_go_of_streams() -> None:
    """Leave the standard streams to the server, so that their end is seen."""
    null = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(null, file)


def _end(group: str | None, status: int) -> None:
    """Kill all that is left, and exit with the status of the server."""
    signal.signal(END, signal.SIG_IGN)
    if group is not None:
        _write(f"{group}/cgroup.kill", "1")
    while True:
        for pid in _children():
            _kill(pid)
        try:
            os.waitpid(-1, 0)  # its own children fall to us, and are killed in the next round
        except ChildProcessError:
            break
    if group is not None:
        _remove(group)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:  # a kernel without that file
        return [int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and _parent(pid) == os.getpid()]


def _parent(pid: str) -> int | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return None


def _own_cgroup() -> str | None:
    """Make a cgroup below our own, and return its folder; `None` where that is not possible."""
    try:
        with open("/proc/self/cgroup") as file:
            (own,) = (line[3:].rstrip("\n") for line in file if line.startswith("0::"))
        with open("/proc/self/mounts") as file:
            mounted = next(fields[1] for line in file if (fields := line.split())[2] == "cgroup2")
        group = f"{mounted}{own.rstrip('/')}/mcp_grpo-{os.getpid()}"
        os.mkdir(group)
    except (OSError, ValueError, StopIteration):
        return None
    if not os.path.exists(f"{group}/cgroup.kill"):
        os.rmdir(group)
        return None
    return group


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _remove(folder: str) -> None:
    try:
        os.rmdir(folder)
    except OSError:
        return


def _write(path: str, text: str) -> None:
    try:
        with open(path, "w") as file:
            file.write(text)
    except OSError:
        return


if __name__ == "__main__":
    main()
