"""Attacks on the sandbox of the Python server: what each level promises, and that nothing got through."""

import ctypes
import ctypes.util
import errno
import os
import platform
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

import mcp
import psutil
import pytest
from helpers import sandboxes
from helpers.bpf import judge
from helpers.sandboxes import STRONGEST, WALLED, each

from mcp_grpo.desk.servers.python import sandbox as sandbox_module
from mcp_grpo.desk.servers.python import seccomp
from mcp_grpo.desk.servers.python.process import Excerpt, Limits, Process, Reply
from mcp_grpo.desk.servers.python.sandbox import Rlimits, Sandbox, Visible, open_sandbox
from mcp_grpo.errors import SettingsError, ToolServerError


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there is no such server on Windows")

LIMITS = Limits(timeout=10.0)  # more than what ends by itself needs
SHORT = Limits(timeout=0.2)
FILTERED = (*WALLED, "rlimits")  # with seccomp
SECRET = "canary-4f1c"


@dataclass(frozen=True)
class Attack:
    """Code that tries something, and what the reply to it has to look like."""

    name: str
    code: str
    expected: str
    levels: tuple[str, ...] = FILTERED


REFUSED = r"(?s)(PermissionError|FileNotFoundError|BlockingIOError|Read-only file system|not permitted)"
TIME = "Stopped: a call may take 0.2 s"
# Without the descriptor that Python's own keeps. Shared: 1, private: 2.
MAP = (
    "import ctypes, os, time\nmap = lambda f, kind: ctypes.CDLL(None).mmap(None, 4096, 1, kind, f, ctypes.c_long(0))\n"
)
FILES = [
    Attack("read_a_file", "open('@CANARY@').read()", REFUSED, WALLED),
    Attack("read_passwd", "open('/etc/passwd').read()", REFUSED, WALLED),
    Attack("list_a_folder", "import os\nos.listdir(os.path.dirname('@CANARY@'))", REFUSED, WALLED),
    Attack("climb_out", "open('../' * 20 + '@CANARY@'.lstrip('/')).read()", REFUSED, WALLED),
    Attack("symbolic_link", "import os\nos.symlink('@CANARY@', 'l')\nopen('l').read()", REFUSED, WALLED),
    Attack(
        "symbolic_link_to_a_folder",
        "import os\nos.symlink('/', 'm')\nopen('m@CANARY@').read()",
        r"PermissionError|FileNotFoundError",
        WALLED,
    ),
    Attack("hard_link", "import os\nos.link('@CANARY@', 'h')\nopen('h').read()", REFUSED + "|OSError", WALLED),
    Attack("environment_of_the_parent", "open('/proc/@PARENT@/environ').read()", REFUSED, WALLED),
    Attack("environment_of_pid_1", "print(open('/proc/1/environ').read()[:0])", REFUSED, WALLED),
    Attack("proc_self_root", "open('/proc/self/root@CANARY@').read()", REFUSED, WALLED),
    Attack("proc_parent_cwd", "import os\nos.listdir('/proc/@PARENT@/cwd')", REFUSED, WALLED),
    Attack("files_of_the_parent", "import os\nos.listdir('/proc/@PARENT@/fd')", REFUSED, WALLED),
    Attack("memory_of_the_parent", "open('/proc/@PARENT@/mem', 'rb')", REFUSED, WALLED),
    Attack("list_processes", "import os\nos.listdir('/proc')", REFUSED, WALLED),
    Attack("own_memory_through_proc", "open('/proc/self/mem', 'r+b')", REFUSED, WALLED),
    Attack("write_a_file", "open('@CANARY@', 'w').write('x')", REFUSED, WALLED),
    Attack("append_to_a_file", "open('@CANARY@', 'a').write('x')", REFUSED, WALLED),
    Attack("make_a_file", "open('@CANARY@.new', 'w')", REFUSED, WALLED),
    Attack("make_a_file_beside_its_folder", "open('/evil', 'w')", REFUSED, WALLED),
    Attack(
        "make_a_file_beside_the_library",
        "import os\nopen(os.path.dirname(os.__file__) + '/../evil', 'w')",
        REFUSED,
        WALLED,
    ),
    Attack("empty_a_file", "import os\nos.truncate('@CANARY@', 0)", REFUSED),
    Attack("empty_a_file_by_reading_it", "import os\nos.open('@CANARY@', os.O_RDONLY | os.O_TRUNC)", REFUSED),
    Attack("empty_a_file_by_no_access", "import os\nos.open('@CANARY@', 3 | os.O_TRUNC)", REFUSED),
    Attack("change_a_mode", "import os\nos.chmod('@CANARY@', 0o777)", REFUSED),
    Attack("change_times", "import os\nos.utime('@CANARY@', (0, 0))", REFUSED),
    Attack("change_an_attribute", "import os\nos.setxattr('@CANARY@', 'user.a', b'')", REFUSED),
    Attack("rename_a_file", "import os\nos.rename('@CANARY@', 'mine')", REFUSED + "|OSError", WALLED),
    Attack("remove_a_file", "import os\nos.remove('@CANARY@')", REFUSED, WALLED),
    Attack("write_into_the_library", "import os\nopen(os.__file__, 'a')", REFUSED, WALLED),
    Attack("add_to_the_library", "import os\nopen(os.path.dirname(os.__file__) + '/evil.py', 'w')", REFUSED, WALLED),
    Attack("empty_the_library", "import os\nos.open(os.__file__, os.O_RDONLY | os.O_TRUNC)", REFUSED),
    Attack("change_a_mode_in_the_library", "import os\nos.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777)", REFUSED),
    Attack("installed_packages", "open('@INSTALLED@').read()", REFUSED, WALLED),
    Attack("source_of_the_server", "open('@SOURCE@').read()", REFUSED, WALLED),
    Attack("shared_memory_folder", "open('/dev/shm/mcp_grpo', 'w')", REFUSED, WALLED),
    Attack("devices", "open('/dev/kmsg', 'rb')", REFUSED, WALLED),
    Attack("device_that_is_neither_read_nor_written", "import os\nos.open('/dev/ptmx', 3)", REFUSED),
    Attack("make_a_device", "import os, stat\nos.mknod('d', 0o600 | stat.S_IFCHR, os.makedev(1, 1))", REFUSED),
]
NETWORK = [
    Attack("tcp", "import socket\nsocket.create_connection(('127.0.0.1', @TCP@), 1)", REFUSED),
    Attack(
        "udp",
        "import socket\ns = socket.socket(type=socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', @UDP@))",
        REFUSED,
    ),
    Attack("unix_socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('@UNIX@')", REFUSED),
    Attack("abstract_socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0@ABSTRACT@')", REFUSED),
    Attack(
        "datagram_from_a_pair",
        "import socket\na, b = socket.socketpair(type=socket.SOCK_DGRAM)\na.sendto(b'x', '@DATAGRAM@')",
        REFUSED,
    ),
    Attack("address_on_a_pair", "import socket\na, b = socket.socketpair()\na.sendto(b'x', '@DATAGRAM@')", REFUSED),
    Attack(
        "message_on_a_pair",
        "import socket\na, b = socket.socketpair()\na.sendmsg([b'x'], [], 0, '@DATAGRAM@')",
        REFUSED,
    ),
    Attack("connect_a_pair", "import socket\na, b = socket.socketpair()\na.connect('@UNIX@')", REFUSED),
    Attack("dns", "import socket\nsocket.getaddrinfo('example.com', 80)", "gaierror"),
    Attack("url", "import urllib.request\nurllib.request.urlopen('http://127.0.0.1:@TCP@/', timeout=1)", "URLError"),
    Attack("listen", "import socket\nsocket.create_server(('127.0.0.1', 0))", REFUSED),
    Attack("netlink", "import socket\nsocket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", REFUSED),
]
PROCESSES = [
    Attack("fork", "import os\nos.fork()", REFUSED),
    Attack("program", "import subprocess\nsubprocess.run(['/bin/true'])", REFUSED),
    Attack("exec", "import os, sys\nos.execv(sys.executable, ['python', '-c', ''])", REFUSED),
    Attack("spawn", "import os, sys\nos.posix_spawn(sys.executable, ['python'], {})", REFUSED),
    Attack(
        "multiprocessing", "import multiprocessing as m\nm.get_context('fork').Process(target=print).start()", REFUSED
    ),
    Attack(
        "signal_to_the_parent", "import os, signal\nos.kill(@PARENT@, signal.SIGUSR1)", REFUSED + "|ProcessLookupError"
    ),
    Attack("kill_another_process", "import os\nos.kill(@DECOY@, 9)", REFUSED + "|ProcessLookupError"),
    Attack("kill_a_group", "import os\nos.killpg(@DECOY@, 9)", REFUSED + "|ProcessLookupError"),
    Attack("kill_all", "import os\nos.kill(-1, 9)", REFUSED),
    Attack(
        "kill_by_file_descriptor", "import os, signal\nsignal.pidfd_send_signal(os.pidfd_open(@DECOY@), 9)", REFUSED
    ),
    Attack(
        "kill_by_owning_a_pipe",  # F_SETOWN and F_SETSIG: the kernel sends the signal when the pipe can be read
        "import fcntl, os\nr, w = os.pipe()\nfcntl.fcntl(r, fcntl.F_SETOWN, @DECOY@)\nfcntl.fcntl(r, 10, 9)\n"
        "fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC)\nos.write(w, b'x')",
        REFUSED,
    ),
    Attack("priority", "import os\nos.setpriority(os.PRIO_PROCESS, @DECOY@, 19)", REFUSED + "|ProcessLookupError"),
    Attack(
        "limits_of_another",
        "import resource\nresource.prlimit(@DECOY@, resource.RLIMIT_CPU, (0, 0))",
        REFUSED + "|ProcessLookupError",
    ),
    Attack("a_session_of_its_own", "import os\nos.setsid()", REFUSED),
    Attack("another_user", "import os\nos.setuid(1)", REFUSED),
]
LASTING = [
    Attack(
        "fork_bomb", "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", TIME
    ),
    Attack("loop", "while True: pass", TIME),
    Attack("loop_in_c", "pow(7, 10**9)", TIME),
    Attack("loop_without_end_in_c", "import itertools\nsum(itertools.repeat(1))", TIME),
    Attack("sleep", "import time\ntime.sleep(100)", TIME),
    Attack(
        "catch_everything",
        "import time\nwhile True:\n    try:\n        time.sleep(9)\n    except BaseException:\n        pass",
        TIME,
    ),
    Attack(
        "ignore_signals",
        "import signal\nfor s in set(signal.Signals) - {9, 19}:\n    signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        TIME,
    ),
    Attack("regular_expression", "import re\nre.match('(a+)+$', 'a' * 60 + 'b')", TIME),
    Attack(
        "both_outputs_bit_by_bit",
        "import os\nwhile True:\n    os.write(1, b'x')\n    os.write(2, b'x')",
        "(" + TIME + "|8 MiB)",
    ),
    Attack("stop_itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass", TIME),
    Attack("finalizer", "class A:\n    def __del__(self):\n        while True: pass\na = A()\ndel a", TIME),
]
ENDING = [
    Attack(
        "thread_bomb",
        "import threading, time\nthreading.stack_size(1 << 18)\nfor _ in range(100_000):\n    threading.Thread(target=time.sleep, args=(9,)).start()",
        r"Stopped: \d+ threads|can't start new thread",
    ),
    Attack("memory", "bytearray(10**9)", "MemoryError\nThe limit is 256 MiB"),
    Attack("memory_bit_by_bit", "a = []\nwhile True: a.append(bytearray(10**6))", "MemoryError\nThe limit is 256 MiB"),
    Attack("memory_map", "import mmap\n[mmap.mmap(-1, 10**8) for _ in range(9)]", "Cannot allocate memory"),
    Attack(
        "shared_memory_map",
        "import mmap\n[mmap.mmap(-1, 10**8, mmap.MAP_SHARED) for _ in range(9)]",
        "Cannot allocate memory",
    ),
    Attack("memory_file", "import os\nos.memfd_create('m')", REFUSED),
    Attack(
        "shared_memory",
        "from multiprocessing.shared_memory import SharedMemory\nSharedMemory(create=True, size=10**8)",
        REFUSED,
        WALLED,
    ),
    Attack(
        "large_file",
        "with open('f', 'wb') as f:\n    while True: f.write(bytes(10**6))",
        r"File too large|No space left(?s:.*)16 MiB",
    ),
    Attack(
        "large_files", "for i in range(99):\n    open(f'f{i}', 'wb').write(bytes(8 << 20))", r"No space left|16 MiB"
    ),
    Attack(
        "deleted_files",
        "import os\na = []\nfor i in range(50):\n    a.append(open('f', 'wb'))\n    a[-1].write(bytes(8 << 20))\n    os.remove('f')\nimport time\ntime.sleep(0.2)",
        r"No space left|16 MiB",
    ),
    Attack(
        "deleted_files_that_are_mapped",  # a page of each, and closed
        MAP + "for i in range(50):\n    f = os.open('f', os.O_CREAT | os.O_RDWR)\n"
        "    os.write(f, bytes(8 << 20))\n    map(f, 1)\n    os.close(f)\n    os.remove('f')\ntime.sleep(0.2)",
        r"No space left|16 MiB",
    ),
    Attack(
        "nameless_files_that_are_mapped",
        MAP + "for i in range(50):\n    f = os.open('.', os.O_TMPFILE | os.O_RDWR)\n"
        "    os.write(f, bytes(8 << 20))\n    map(f, 2)\n    os.close(f)\ntime.sleep(0.2)",
        r"No space left|16 MiB|not supported",
    ),
    Attack(
        "reserved_files",
        "import os\nfor i in range(99):\n    os.posix_fallocate(os.open(f'f{i}', os.O_CREAT | os.O_RDWR), 0, 8 << 20)",
        REFUSED + "|No space left",
    ),
    Attack("many_files", "for i in range(10**6):\n    open(f'f{i}', 'w').close()", r"more than 1,000 files"),
    Attack(
        "many_folders",
        "import os\nfor i in range(10**6):\n    os.mkdir('d')\n    os.chdir('d')",
        r"more than 1,000 files|too long",
    ),
    Attack(
        "folders_with_long_names",
        "import os\nfor i in range(40):\n    os.mkdir('d' * 200)\n    os.chdir('d' * 200)\nimport time\ntime.sleep(0.2)",
        "more than 1,000 files|None",
    ),
    Attack(
        "folders_that_cannot_be_listed",
        "import os\nfor i in range(5):\n    os.mkdir('d', 0o300)\n    os.chdir('d')",
        "more than 1,000 files|None",
    ),
    Attack("open_files", "a = [open('/dev/null') for _ in range(99)]", "Too many open files(?s:.*)64 open files"),
    Attack(
        "raise_a_limit",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
        "not permitted|ValueError",
    ),
    Attack("output", "while True: print('x' * 1000)", "more than 8 MiB of output"),
    Attack("errors", "import os\nwhile True: os.write(2, b'x' * 1000)", "more than 8 MiB of output"),
    Attack("large_value", "'x' * 10**8", "MemoryError|characters left out"),
    Attack("large_number", "10**10**5", "ValueError"),
    Attack("large_error", "raise Exception('x' * 10**7)", "characters left out"),
    Attack("value_that_is_not_shown", "class A:\n    def __repr__(self): 1/0\nA()", "ZeroDivisionError"),
    Attack(
        "error_that_is_not_shown", "class A(Exception):\n    def __str__(self): 1/0\nraise A()", "A: <exception str"
    ),
    Attack("recursion", "def f(): return f()\nf()", "RecursionError"),
    Attack(
        "recursion_that_crashes",
        "import sys\nsys.setrecursionlimit(10**9)\nclass A:\n    def __getattr__(self, n): return getattr(self, n)\nA().x",
        r"crashed \(SIGSEGV\)|RecursionError|MemoryError|killed",
    ),
    Attack("nested_code", "(" * 10000 + ")" * 10000, "MemoryError|SyntaxError|too many nested"),
    Attack("crash", "import ctypes\nctypes.string_at(0)", r"crashed \(SIGSEGV\)"),
    Attack("abort", "import os\nos.abort()", r"crashed \(SIG(ABRT|SEGV|ILL|TRAP)\)"),
    Attack("exit", "import os\nos._exit(7)", r"ended its process \(exit code 7\)"),
    Attack(
        "at_exit",
        "import atexit, os\natexit.register(lambda: print('@SECRET@'))\nos.kill(os.getpid(), 15)\n1/0",
        "SIGTERM|ZeroDivisionError",
    ),
]
MEDDLING = [
    Attack("no_output", "import sys\nsys.stdout = sys.stderr = None", "None"),
    Attack("closed_output", "import os, sys\nsys.stdout.close()\nos.close(2)", "None"),
    Attack("closed_files", "import os\nos.closerange(0, 64)", "broke the process|exit code|crashed"),
    Attack("junk_on_the_socket", "import os\nfor i in range(3, 64):\n    try: os.write(i, b'\\xff' * 100)\n    except OSError: pass", "broke the process"),
    Attack("nested_reply", "import os\nfor i in range(3, 64):\n    try: os.write(i, (100_000).to_bytes(4, 'big') + b'[' * 100_000)\n    except OSError: pass", "broke the process"),
    Attack("reply_of_another_kind", "import os\nfor i in range(3, 64):\n    try: os.write(i, (11).to_bytes(4, 'big') + b'{\"value\":[]}'[:11])\n    except OSError: pass", "broke the process"),
    Attack("reply_without_end", "import os\nwhile True:\n    for i in range(3, 64):\n        try: os.write(i, (10**9).to_bytes(4, 'big') + b'x' * 1000)\n        except OSError: pass", "broke the process"),
    Attack("broken_json", "import json\njson.dumps = None", "exit code 1"),
    Attack("broken_os", "import os\nos.write = os.read = None", "exit code 1"),
    Attack("broken_builtins", "import builtins\nbuiltins.__dict__.clear()", "exit code 1|crashed|broke|None"),
    Attack("hidden_builtins", "import builtins\nbuiltins.repr = lambda _: 'patched'\n1", "patched|1"),
    Attack("threads_that_hold_everything", "import threading\nclass A:\n    def __del__(self): threading.Event().wait()\nthreading.Thread(target=lambda: A()).start()\n1/0", "ZeroDivisionError"),
    Attack("halves_of_characters", "'\\ud800'\nprint('\\ud800')\nraise Exception('\\ud800')", "Exception"),
]  # fmt: skip

# System calls that are made past the library, with their arguments. Numbers on x86_64 and aarch64.
CALLS: dict[str, tuple[int | None, int, str]] = {
    "execve": (59, 221, "b'/bin/true', None, None"),
    "execveat": (322, 281, "-100, b'/bin/true', None, None, 0"),
    "fork_by_clone": (56, 220, "17, None, None, None, None"),
    "namespace_by_clone": (56, 220, "0x10000000 | 17, None, None, None, None"),
    "vfork": (58, 220, "0"),
    "socket": (41, 198, "2, 1, 0"),
    "connect": (42, 203, "0, None, 0"),
    "sendmsg": (46, 211, "0, None, 0"),
    "sendmmsg": (307, 269, "0, None, 0, 0"),
    "mount": (165, 40, "None, b'/tmp', b'tmpfs', 0, None"),
    "fsopen": (430, 430, "b'tmpfs', 0"),
    "open_tree": (428, 428, "-100, b'/', 0"),
    "umount": (166, 39, "b'/', 2"),
    "pivot_root": (155, 41, "b'/', b'/'"),
    "chroot": (161, 51, "b'.'"),
    "unshare": (272, 97, "0x10000000"),
    "setns": (308, 268, "0, 0"),
    "keyctl": (250, 219, "0, -3, 0"),
    "add_key": (248, 217, "b'user', b'a', b'a', 1, -3"),
    "request_key": (249, 218, "b'user', b'a', None, 0"),
    "bpf": (321, 280, "0, None, 0"),
    "perf_event_open": (298, 241, "None, 0, -1, -1, 0"),
    "io_uring_setup": (425, 425, "8, None"),
    "userfaultfd": (323, 282, "1"),
    "ptrace": (101, 117, "16, @DECOY@, None, None"),
    "process_vm_readv": (310, 270, "@DECOY@, None, 0, None, 0, 0"),
    "process_vm_writev": (311, 271, "@DECOY@, None, 0, None, 0, 0"),
    "pidfd_open": (434, 434, "@DECOY@, 0"),
    "pidfd_getfd": (438, 438, "0, 0, 0"),
    "pidfd_send_signal": (424, 424, "0, 9, None, 0"),
    "tkill": (200, 130, "@DECOY@, 9"),
    "rt_sigqueueinfo": (129, 138, "@DECOY@, 9, None"),
    "kcmp": (312, 272, "@DECOY@, 1, 0, 0, 0"),
    "setuid": (105, 146, "1"),
    "setresuid": (117, 147, "1, 1, 1"),
    "setgroups": (116, 159, "0, None"),
    "capset": (126, 91, "None, None"),
    "personality": (135, 92, "0x40000"),
    "prctl_outlive_the_server": (157, 167, "1, 0, 0, 0, 0"),
    "prctl_seccomp": (157, 167, "22, 2, None, 0, 0"),
    "seccomp": (317, 277, "1, 0, None"),
    "init_module": (175, 105, "None, 0, b''"),
    "kexec_load": (246, 104, "0, 0, None, 0"),
    "reboot": (169, 142, "0, 0, 0, None"),
    "swapon": (167, 224, "b'/', 0"),
    "settimeofday": (164, 170, "None, None"),
    "sethostname": (170, 161, "b'a', 1"),
    "open_by_handle_at": (304, 265, "-100, None, 0"),
    "name_to_handle_at": (303, 264, "-100, b'/', None, None, 0"),
    "shmget": (29, 194, "0, 4096, 0o1600"),
    "semget": (64, 190, "0, 1, 0o1600"),
    "msgget": (68, 186, "0, 0o1600"),
    "mq_open": (240, 180, "b'a', 0o102, 0o600, None"),
    "memfd_create": (319, 279, "b'a', 0"),
    "memfd_secret": (447, 447, "0"),
    "fallocate": (285, 47, "1, 0, 0, 1"),
    "ioctl_push_a_character": (16, 29, "0, 0x5412, b'x'"),
    "ioctl_own_a_socket": (16, 29, "0, 0x8901, b'1234'"),
    "fcntl_own_a_pipe": (72, 25, "0, 8, @DECOY@"),
    "fcntl_enlarge_a_pipe": (72, 25, "1, 1031, 1 << 20"),
    "prlimit": (302, 261, "0, 9, b'\\0' * 16, None"),
    "fanotify_init": (300, 262, "0, 0"),
    "inotify_init": (294, 26, "0"),
    "syslog": (103, 116, "3, None, 0"),
    "chown": (260, 54, "-100, b'@CANARY@', 1, 1, 0"),
    "mknod": (259, 33, "-100, b'd', 0o020600, 0x101"),
    "quotactl": (179, 60, "0, None, 0, None"),
    "setsid": (112, 157, ""),
    "setpgid": (109, 154, "0, 0"),
    "nfsservctl_or_unknown": (180, 42, ""),
    "a_call_of_the_future": (999, 999, ""),
    "x32": (0x40000000 | 39, 999, ""),
}


def answer(reply: Reply) -> str:
    return f"{reply.stdout}\n{reply.stderr}\n{reply.value}\n{reply.error}\n{reply.ended}"


def sandbox_of(level: str, limits: Limits = LIMITS) -> Sandbox:
    return sandboxes.sandbox_of(level, limits)


@pytest.fixture(scope="module", params=each(FILTERED))
def sandbox(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    if not seccomp.is_supported():
        pytest.skip("there is no seccomp filter for this machine")
    sandbox = sandbox_of(request.param)
    yield sandbox
    sandbox.close()


@pytest.fixture(scope="module")
def impatient_sandbox(sandbox: Sandbox) -> Iterator[Sandbox]:
    """The same, with little time."""
    impatient = sandbox_of(sandbox.level, SHORT)
    yield impatient
    impatient.close()


@pytest.fixture
def start() -> Iterator[Callable[[Sandbox], Process]]:
    """Starts processes, and sees that nothing is left of them."""
    started: list[Process] = []

    def make(sandbox: Sandbox) -> Process:
        process = sandbox.start()
        started.append(process)
        process.open()
        return process

    yield make
    for process in started:
        process.end()
    assert [process.pid for process in started if psutil.pid_exists(process.pid)] == []
    folders = [process._launch.folder for process in started]
    assert [folder for folder in folders if folder is not None and folder.exists()] == []


@pytest.fixture
def process(sandbox: Sandbox, start: Callable[[Sandbox], Process]) -> Process:
    return start(sandbox)


@pytest.fixture(scope="module")
def used_process(sandbox: Sandbox) -> Iterator[Process]:
    """One for all the attacks that it survives."""
    process = sandbox.start()
    process.open()
    yield process
    process.end()


class Bait:
    """Things on the host that an attack would change, use or betray."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.canary = folder / "canary.txt"
        self.canary.write_text(SECRET)
        self.canary.chmod(0o600)
        self._sockets = [stack.enter_context(socket.socket(*kind)) for kind in self._kinds()]
        addresses = [("127.0.0.1", 0), ("127.0.0.1", 0), f"{folder}/s", f"\0mcp_grpo_{os.getpid()}", f"{folder}/d"]
        for place, address in zip(self._sockets, addresses, strict=True):
            place.bind(address)
            place.setblocking(False)
            if place.type == socket.SOCK_STREAM:
                place.listen()
        self.decoy = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        stack.callback(self.decoy.wait)
        stack.callback(self.decoy.kill)
        self.signals: list[int] = []
        before = signal.signal(signal.SIGUSR1, lambda number, _: self.signals.append(number))
        stack.callback(signal.signal, signal.SIGUSR1, before)
        self._library = self._state(Path(os.__file__))
        self._canary = self._state(self.canary)
        self._folder = sorted(os.listdir(folder))

    def fill_in(self, code: str) -> str:
        tcp, udp, unix, abstract, datagram = (place.getsockname() for place in self._sockets)
        values = {
            "CANARY": self.canary,
            "SECRET": SECRET,
            "PARENT": os.getpid(),
            "DECOY": self.decoy.pid,
            "TCP": tcp[1],
            "UDP": udp[1],
            "UNIX": unix,
            "ABSTRACT": abstract[1:].decode(),
            "DATAGRAM": datagram,
            "INSTALLED": mcp.__file__,
            "SOURCE": sandbox_module.__file__,
        }
        return re.sub("@([A-Z]+)@", lambda match: str(values[match[1]]), code)

    def check(self, reply: Reply) -> None:
        assert SECRET not in answer(reply)
        assert self.canary.read_text() == SECRET
        assert self._state(self.canary) == self._canary
        assert self._state(Path(os.__file__)) == self._library
        assert sorted(os.listdir(self.canary.parent)) == self._folder
        assert not Path(os.__file__).with_name("evil.py").exists()
        assert self.decoy.poll() is None
        assert psutil.Process(self.decoy.pid).nice() == psutil.Process().nice()
        assert self.signals == []
        for place in self._sockets:
            with pytest.raises(BlockingIOError):
                _ = place.accept() if place.type == socket.SOCK_STREAM else place.recv(10)

    @staticmethod
    def _kinds() -> list[tuple[int, int]]:
        stream, datagram = socket.SOCK_STREAM, socket.SOCK_DGRAM
        inet, unix = socket.AF_INET, socket.AF_UNIX
        return [(inet, stream), (inet, datagram), (unix, stream), (unix, stream), (unix, datagram)]

    @staticmethod
    def _state(path: Path) -> tuple[int, ...]:
        status = path.stat()
        return status.st_mode, status.st_uid, status.st_gid, status.st_size, status.st_nlink, status.st_mtime_ns


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bait]:
    with ExitStack() as stack:
        yield Bait(tmp_path_factory.mktemp("b"), stack)


def check_attack(attack: Attack, process: Process, bait: Bait) -> None:
    reply = process.call(bait.fill_in(attack.code))
    assert re.search(attack.expected, answer(reply)), answer(reply)[:2000]
    assert len(answer(reply)) < 6 * LIMITS.max_output
    bait.check(reply)


@pytest.mark.parametrize("attack", [*FILES, *NETWORK, *PROCESSES], ids=lambda attack: attack.name)
def test_an_attack_on_the_host_is_refused_and_leaves_no_trace(
    attack: Attack, sandbox: Sandbox, used_process: Process, bait: Bait
) -> None:
    if sandbox.level not in attack.levels:
        pytest.skip(f"{sandbox.level} does not promise it")
    check_attack(attack, used_process, bait)


@pytest.mark.parametrize("sandbox", each(WALLED), indirect=True)  # `TestWithoutSeccomp` is about the rest
@pytest.mark.parametrize("attack", [*ENDING, *MEDDLING], ids=lambda attack: attack.name)
def test_an_attack_on_the_server_ends_within_the_limits(
    attack: Attack, sandbox: Sandbox, start: Callable[[Sandbox], Process], bait: Bait
) -> None:
    check_attack(attack, start(sandbox), bait)


@pytest.mark.parametrize("sandbox", each(WALLED), indirect=True)
@pytest.mark.parametrize("attack", LASTING, ids=lambda attack: attack.name)
def test_an_attack_that_does_not_end_is_ended(
    attack: Attack, impatient_sandbox: Sandbox, start: Callable[[Sandbox], Process], bait: Bait
) -> None:
    check_attack(attack, start(impatient_sandbox), bait)


def test_no_system_call_that_is_not_needed_gets_through(process: Process, bait: Bait) -> None:
    column = {"x86_64": 0, "aarch64": 1}[platform.machine()]
    code = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nresults = {}\n"
    for name, (*numbers, arguments) in CALLS.items():
        comma = ", " if arguments else ""
        code += f"result = libc.syscall({numbers[column]}{comma}{arguments})\n"
        code += f"results[{name!r}] = (result, ctypes.get_errno())\n"
    reply = process.call(bait.fill_in(code + "results"))
    bait.check(reply)
    assert reply.value is not None, answer(reply)
    results = eval(reply.value)
    assert results.keys() == CALLS.keys()
    through = {name: result for name, result in results.items() if result != (-1, errno.EPERM)}
    # A kernel that knows neither may refuse them before the filter does.
    assert through.keys() <= {"a_call_of_the_future", "x32"}, through
    assert all(result[0] == -1 for result in through.values())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only there is there a second kind of system calls")
def test_system_calls_of_32_bits_are_refused(process: Process) -> None:
    # mov eax, 20 (getpid); int 0x80; ret
    code = (
        "import ctypes, mmap\n"
        "page = mmap.mmap(-1, 4096, prot=7)\n"
        "page.write(bytes.fromhex('b814000000cd80c3'))\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()"
    )
    assert process.call(code).value in (f"-{errno.EPERM}", f"-{errno.ENOSYS}")


def test_nothing_is_open_but_the_outputs_and_the_socket_to_the_server(process: Process) -> None:
    code = (
        "import os, stat\n"
        "kinds = []\n"
        "for i in range(64):\n"
        "    try: kinds.append(stat.S_IFMT(os.fstat(i).st_mode))\n"
        "    except OSError: pass\n"
        "names = {stat.S_IFCHR: 'null', stat.S_IFIFO: 'pipe', stat.S_IFSOCK: 'socket'}\n"
        "[names[kind] for kind in kinds], os.read(0, 1), os.fstat(0).st_rdev == os.stat('/dev/null').st_rdev"
    )
    assert process.call(code).value == "(['null', 'pipe', 'pipe', 'socket'], b'', True)"


def test_the_environment_has_nothing_of_the_server(
    sandbox: Sandbox, start: Callable[[Sandbox], Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MCP_GRPO_SECRET", SECRET)
    code = "import ctypes, os\nprint(ctypes.CDLL(None).getenv(b'MCP_GRPO_SECRET'))\nsorted(os.environ)"
    reply = start(sandbox).call(code)
    assert reply.stdout == "0\n"
    assert reply.value == "['LANG', 'PATH', 'PYTHONHASHSEED', 'PYTHONUTF8']"


def test_useful_code_runs(process: Process) -> None:
    code = (
        "import asyncio, collections, ctypes, csv, dataclasses, datetime, decimal, hashlib, io, json, lzma, math, pickle\n"
        "import random, re, shutil, sqlite3, ssl, statistics, tempfile, threading, urllib.parse, zlib, zipfile\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "@dataclasses.dataclass\n"
        "class A:\n"
        "    x: int\n"
        "async def f():\n"
        "    await asyncio.sleep(0.001)\n"
        "    return 1\n"
        "with ThreadPoolExecutor(4) as pool: squares = list(pool.map(lambda x: x * x, range(5)))\n"
        "with tempfile.TemporaryDirectory() as folder:\n"
        "    with open(folder + '/a', 'w') as file: file.write('hi')\n"
        "    shutil.copyfile(folder + '/a', folder + '/b')\n"
        "    text = open(folder + '/b').read()\n"
        "database = sqlite3.connect('data.db')\n"
        "database.execute('create table t (a)'); database.execute('insert into t values (7)'); database.commit()\n"
        "row = database.execute('select a from t').fetchone()\n"
        "(pickle.loads(pickle.dumps(A(3))), asyncio.run(f()), squares, text, row, hashlib.sha256(b'').hexdigest()[:4])"
    )
    reply = process.call(code)
    assert (reply.value, reply.stderr) == ("(A(x=3), 1, [0, 1, 4, 9, 16], 'hi', (7,), 'e3b0')", ""), answer(reply)


def test_numpy_can_be_imported_where_it_is_installed(sandbox: Sandbox, process: Process) -> None:
    if "numpy" not in sandbox.packages:
        pytest.skip("numpy is not installed")
    code = "import numpy as np\nfloat(np.linalg.det(np.array([[1.0, 2.0], [3.0, 4.0]])))"
    reply = process.call(code)
    assert reply.value is not None, answer(reply)
    assert float(reply.value) == pytest.approx(-2)


def test_a_module_can_be_imported_that_the_code_wrote(process: Process) -> None:
    assert process.call("with open('mine.py', 'w') as file: file.write('x = 5')\nimport mine\nmine.x").value == "5"


def test_two_processes_do_not_see_each_other(sandbox: Sandbox, start: Callable[[Sandbox], Process]) -> None:
    if sandbox.level not in WALLED:
        pytest.skip(f"{sandbox.level} does not promise it")
    first, second = start(sandbox), start(sandbox)
    path = eval(first.call(f"import os\nopen('f', 'w').write('{SECRET}')\nos.path.abspath('f')").value or "")
    reply = second.call(f"import os\ntry: os.kill({first.pid}, 9)\nexcept OSError: pass\nopen({path!r}).read()")
    assert re.search(REFUSED, reply.error or "")
    assert first.call("open('f').read()").value == repr(SECRET)


LOCKS = {
    "flock": "fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)",
    "fcntl": "fcntl.lockf(f, fcntl.LOCK_SH | fcntl.LOCK_NB)",
    "look": "struct.unpack('hhqqi4x', fcntl.fcntl(f, fcntl.F_GETLK, struct.pack('hhqqi4x', 1, 0, 0, 0, 0)))[0]",
}


@pytest.mark.parametrize(("mine", "theirs"), [("flock", "flock"), ("fcntl", "look")])
def test_a_lock_on_a_file_that_both_can_read_tells_another_process_nothing(
    sandbox: Sandbox, start: Callable[[Sandbox], Process], mine: str, theirs: str
) -> None:
    first, second = start(sandbox), start(sandbox)
    opening = "import fcntl, os, struct\nf = os.open(os.__file__, os.O_RDONLY)\n"
    looking = f"{opening}try: seen = {LOCKS[theirs]}\nexcept OSError as error: seen = str(error)\nos.close(f)\nseen"
    before = second.call(looking)
    first.call(opening + LOCKS[mine])
    after = second.call(looking)
    assert (before.value, before.error) == (after.value, after.error)


def test_a_database_in_a_file_still_works(process: Process) -> None:
    code = (
        "import sqlite3\nfor i in range(2):\n    c = sqlite3.connect('d.db')\n    c.execute('create table if not exists t (a)')\n"
        "    c.execute('insert into t values (1)')\n    c.commit()\n    c.close()\n"
        "sqlite3.connect('d.db').execute('select count(*) from t').fetchone()"
    )
    assert process.call(code).value == "(2,)"


def test_threads_that_were_left_behind_stop_between_calls(process: Process) -> None:
    process.call(
        "import threading, time\ntimes = []\ndef f():\n    while True:\n        times.append(time.monotonic())\n"
        "        time.sleep(0.001)\nthreading.Thread(target=f, daemon=True).start()\nwhile len(times) < 2: time.sleep(0.001)"
    )
    time.sleep(0.5)
    wait = "before = len(times)\nwhile len(times) < before + 2: time.sleep(0.001)\n"
    reply = process.call(wait + "max(b - a for a, b in zip(times, times[1:]))")
    assert float(reply.value or 0) > 0.4


def test_a_reply_that_was_written_ahead_does_not_answer_the_next_call(process: Process) -> None:
    forged = '{"value": "forged"}'
    reply = process.call(
        f"import os\ndata = ({len(forged)}).to_bytes(4, 'big') + b'{forged}'\nfor i in range(3, 64):\n"
        "    try: os.write(i, data + data)\n    except OSError: pass"
    )
    second = process.call("'real'") if reply.ended is None else reply
    assert second.value is None
    assert "broke the process" in (second.ended or "")


@pytest.mark.parametrize("number", ["''", "sys._getframe(3).f_locals['request']['number']"])
def test_after_a_forged_reply_no_late_one_answers_the_next_call(process: Process, number: str) -> None:
    reply = process.call(
        f"import json, os, sys, time\ndata = json.dumps({{'value': 'forged', 'number': {number}}}).encode()\n"
        "data = len(data).to_bytes(4, 'big') + data\nfor i in range(3, 64):\n"
        "    try: os.write(i, data)\n    except OSError: pass\ntime.sleep(0.5)\n'late'"
    )
    # Who knows the number of his own call may say what came of it. Without it, the state is over.
    assert (reply.value, reply.ended is None) == (("forged", True) if "request" in number else (None, False))
    if reply.ended is None:
        reply = process.call("'real'")
        assert reply.value is None
    assert "broke the process" in (reply.ended or "")


def test_output_of_any_length_takes_bounded_memory() -> None:
    excerpt = Excerpt(100)
    for part in range(10_000):
        excerpt.add(b"%d," % part * 100)
    assert excerpt.text.startswith("0,0,0,")
    assert excerpt.text.endswith(",9999,")
    assert re.search(r"\[[\d,]+ bytes left out\]", excerpt.text)
    assert len(excerpt.text) < 300


def test_a_process_that_is_ended_leaves_nothing_behind(sandbox: Sandbox, start: Callable[[Sandbox], Process]) -> None:
    before = psutil.Process().num_fds(), len(psutil.Process().children(recursive=True))
    process = start(sandbox)
    process.call("import atexit, time\natexit.register(time.sleep, 99)\nopen('f', 'w').write('x')")
    folder = process._launch.folder
    process.end()
    process.end()
    assert (psutil.Process().num_fds(), len(psutil.Process().children(recursive=True))) == before
    assert folder is None or not folder.exists()


@pytest.mark.parametrize("level", each(FILTERED))
def test_a_process_ends_with_the_server_that_is_killed(level: str) -> None:
    sandbox_of(level).close()
    code = (
        "import sys, time\nfrom mcp_grpo.desk.servers.python.process import Limits\n"
        "from mcp_grpo.desk.servers.python.sandbox import open_sandbox\n"
        f"process = open_sandbox({level!r}, Limits(timeout=60.0)).start()\nprocess.open()\n"
        "print(process.pid, process._popen.pid, flush=True)\n"
        "process.call('import signal\\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, 1)\\nwhile True: pass')"
    )
    root = str(Path(__file__).parents[3])
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) as server:
        assert server.stdout
        pids = [int(pid) for pid in server.stdout.readline().split()]
        while psutil.Process(pids[0]).cpu_times().user < 0.1:
            time.sleep(0.01)
        server.kill()
    deadline = time.monotonic() + 60
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, "the sandboxed process outlived the server"
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # which is for whoever adopted it to reap
    return False


def test_folders_that_a_killed_server_left_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, fresh = tmp_path / "mcp_grpo_python_left", tmp_path / "mcp_grpo_python_fresh"
    in_use = Rlimits(LIMITS, Visible.on_this_host())
    for folder in (left, fresh):
        folder.mkdir()
    for folder in (left, in_use._folder):
        os.utime(folder, (0, 0))
    sandbox = Rlimits(LIMITS, Visible.on_this_host())
    assert sorted(tmp_path.iterdir()) == sorted([fresh, in_use._folder, sandbox._folder])
    sandbox.close()
    in_use.close()
    assert sorted(tmp_path.iterdir()) == [fresh]


class TestWithoutSeccomp:
    """The level that every system has: limits, and nothing else."""

    @pytest.fixture
    def sandbox(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Sandbox]:
        monkeypatch.setattr(seccomp, "is_supported", lambda: False)
        monkeypatch.setattr(sandbox_module, "_can_change_users", lambda: False)
        sandbox = sandbox_of("rlimits", getattr(request, "param", LIMITS))
        assert sandbox.description == "rlimits only"
        yield sandbox
        sandbox.close()

    @pytest.mark.parametrize("sandbox", [SHORT], indirect=True, ids=[""])
    @pytest.mark.parametrize("name", ["loop", "loop_in_c", "sleep", "catch_everything"])
    def test_time_is_limited(self, name: str, process: Process, bait: Bait) -> None:
        (attack,) = [attack for attack in LASTING if attack.name == name]
        check_attack(attack, process, bait)

    @pytest.mark.parametrize(
        "name",
        [
            "memory",
            "open_files",
            "output",
            "errors",
            "large_file",
            "recursion",
            "crash",
            "exit",
            "many_files",
            "large_files",
            "thread_bomb",
        ],
    )
    def test_other_things_are_limited(self, name: str, process: Process, bait: Bait) -> None:
        (attack,) = [attack for attack in ENDING if attack.name == name]
        check_attack(attack, process, bait)

    @pytest.mark.parametrize("name", ["closed_files", "junk_on_the_socket", "reply_without_end"])
    def test_the_server_is_not_confused(self, name: str, process: Process, bait: Bait) -> None:
        (attack,) = [attack for attack in MEDDLING if attack.name == name]
        check_attack(attack, process, bait)

    def test_processes_that_code_starts_end_with_it(self, process: Process) -> None:
        if os.getuid():
            assert "BlockingIOError" in (process.call("import os\nos.fork()").error or "")
            return
        reply = process.call("import subprocess\nsubprocess.Popen(['sleep', '1000']).pid")
        pid = int(reply.value or 0)
        assert is_alive(pid)
        process.end()
        deadline = time.monotonic() + 60
        while is_alive(pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def test_it_has_no_walls(self, process: Process, bait: Bait, tmp_path: Path) -> None:
        assert process.call(bait.fill_in("open('@CANARY@').read()")).value == repr(SECRET)
        assert process.call(bait.fill_in("import os\nos.kill(@DECOY@, 0)")).error is None
        (tmp_path / "f").touch()
        assert process.call(f"os.chmod('{tmp_path}/f', 0o640)").error is None
        assert (tmp_path / "f").stat().st_mode & 0o777 == 0o640
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            assert (
                process.call(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 9).close()").error
                is None
            )


def test_seccomp_without_walls_leaves_files_in_sight(
    start: Callable[[Sandbox], Process], bait: Bait, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_can_change_users", lambda: False)
    sandbox = sandbox_of("rlimits")
    process = start(sandbox)
    assert process.call(bait.fill_in("open('@CANARY@').read()")).value == repr(SECRET)
    assert process.call(bait.fill_in("import os\n'@PARENT@' in os.listdir('/proc')")).value == "True"
    assert process.call(f"open('{tmp_path}/f', 'w').close()").error is None
    assert (tmp_path / "f").exists()
    sandbox.close()


def test_landlock_hides_what_files_contain_but_not_that_they_exist(
    start: Callable[[Sandbox], Process], bait: Bait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "_can_change_users", lambda: False)
    sandbox = sandbox_of("landlock")
    process = start(sandbox)
    assert process.call(bait.fill_in("import os\nos.path.getsize('@CANARY@')")).value == str(len(SECRET))
    installed = Path(os.__file__).with_name("site-packages")
    if installed.is_dir():
        names = eval(process.call(f"os.listdir({str(installed)!r})").value or "")
        assert sorted(names) == sorted(os.listdir(installed))
    sandbox.close()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root can give users away")
class TestUsers:
    """Started as root, where Python is not in root's home, each process has a user that nobody else is."""

    @pytest.fixture
    def sandbox(self) -> Iterator[Sandbox]:
        sandbox = sandbox_of("landlock")
        if not sandbox.has_own_users:
            sandbox.close()
            pytest.skip("other users cannot reach this Python")
        yield sandbox
        sandbox.close()

    def test_each_process_has_another_and_none_has_rights(
        self, sandbox: Sandbox, start: Callable[[Sandbox], Process]
    ) -> None:
        code = (
            "import os\nopen('f', 'w').close()\n(os.getresuid(), os.getresgid(), os.getgroups(), os.stat('f').st_uid)"
        )
        first, second = (eval(start(sandbox).call(code).value or "()") for _ in range(2))
        for users, groups, others, owner in (first, second):
            assert len({*users, *groups, owner}) == 1
            assert owner in sandbox_module._USERS
            assert others == []
        assert first != second

    def test_it_cannot_see_that_files_of_root_exist(
        self, sandbox: Sandbox, start: Callable[[Sandbox], Process], bait: Bait
    ) -> None:
        reply = start(sandbox).call(bait.fill_in("import os\nos.path.getsize('@CANARY@')"))
        assert re.search(REFUSED, reply.error or "")

    def test_walls_come_before_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if Visible.on_this_host().is_open_to_all:
            pytest.skip("other users can reach this Python")
        monkeypatch.setattr(sandbox_module, "_is_open_to_all", lambda path: True)
        sandbox = sandbox_of("landlock")
        assert (sandbox.level, sandbox.has_own_users) == ("landlock", False)
        sandbox.close()

    def test_users_that_root_may_not_become_are_not_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sandbox_module, "_USERS", range(-2, 0))  # whom nobody can become
        assert not sandbox_module._can_change_users()


def test_where_other_users_cannot_reach_python_nobody_is_made_another(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    (tmp_path / "closed" / "lib").mkdir(mode=0o755)
    assert not sandbox_module._is_open_to_all(tmp_path / "closed" / "lib")
    assert sandbox_module._is_open_to_all(Path("/usr/lib"))


def test_in_namespaces_there_is_nothing_but_the_interpreter(start: Callable[[Sandbox], Process], bait: Bait) -> None:
    sandbox = sandbox_of("bubblewrap")
    process = start(sandbox)
    assert (
        process.call(bait.fill_in("import os\nos.path.exists('@CANARY@'), os.getpid(), os.getuid()")).value
        == "(False, 1, 65534)"
    )
    hidden = Path(os.__file__).with_name("site-packages")
    assert process.call(f"os.path.isdir({str(hidden)!r}) and os.listdir({str(hidden)!r})").value in ("[]", "False")
    files = eval(
        process.call("[f for f in os.listdir('/') if f not in ('tmp', 'dev')], os.listdir('/dev')").value or ""
    )
    assert sorted(files[1]) == ["null", "random", "urandom", "zero"]
    assert not {"proc", "sys", "home", "var"} & set(files[0]) - {
        Path(os.__file__).parts[1],
        Path(mcp.__file__).parts[1],
    }


class TestOpening:
    def test_the_strongest_is_taken(self) -> None:
        sandbox = open_sandbox("auto", LIMITS)
        stronger = {"bubblewrap": (), "landlock": ("bubblewrap",), "rlimits": WALLED}[sandbox.level]
        for level in stronger:
            with pytest.raises(ToolServerError):
                open_sandbox(level, LIMITS)  # type: ignore[arg-type]  # one of the levels
        sandbox.close()

    def test_bubblewrap_that_can_make_namespaces_is_used(self) -> None:
        options = ["--unshare-all", "--as-pid-1", "--ro-bind", "/", "/", "true"]
        if shutil.which("bwrap") is None or subprocess.run(["bwrap", *options], check=False).returncode != 0:
            pytest.skip("bubblewrap is not installed, or may not make namespaces")
        sandbox = open_sandbox("bubblewrap", LIMITS)  # else every test of this level would be left out
        assert sandbox.level == STRONGEST == "bubblewrap"

    def test_bubblewrap_that_is_not_there_is_refused_with_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(shutil, "which", lambda _: None)
        with pytest.raises(ToolServerError, match="apt-get install bubblewrap"):
            open_sandbox("bubblewrap", LIMITS)

    def test_bubblewrap_that_may_not_make_namespaces_says_why_and_the_next_is_taken(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tool = tmp_path / "bwrap"
        tool.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
        tool.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda _: str(tool))
        with pytest.raises(ToolServerError, match=r"bubblewrap: .*No permissions to create new namespace"):
            open_sandbox("bubblewrap", LIMITS)
        sandbox = open_sandbox("auto", LIMITS)
        assert sandbox.level in ("landlock", "rlimits")
        sandbox.close()

    def test_other_systems_are_refused_unless_limits_are_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("mcp_grpo.desk.servers.python.sandbox.sys.platform", "darwin")
        with pytest.raises(ToolServerError, match="--sandbox rlimits"):
            open_sandbox("auto", LIMITS)

    def test_a_level_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(SettingsError, match="'docker'"):
            open_sandbox("docker", LIMITS)  # type: ignore[arg-type]  # not one of the levels


class TestFilter:
    """The filter as the kernel reads it, for machines that are not this one."""

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    def test_the_calls_are_those_that_the_library_knows_by_these_names(self, machine: str) -> None:
        name = ctypes.util.find_library("seccomp")
        if name is None:
            pytest.skip("libseccomp is not installed")
        library = ctypes.CDLL(name)
        column, architecture = seccomp._MACHINES[machine]
        tables = seccomp._ALLOWED | seccomp._ALLOWED_ON_PRIVATE_FILES | seccomp._CHECKED | seccomp._ABSENT
        for call, numbers in tables.items():
            number = library.seccomp_syscall_resolve_name_arch(architecture, call.encode())
            assert (number if number >= 0 else None) == numbers[column], call

    @pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
    @pytest.mark.parametrize(
        ("call", "arguments", "is_allowed"),
        [
            ("read", (), True),
            ("openat", (0, 0, 0), True),
            ("openat", (0, 0, 0o1001), True),
            ("openat", (0, 0, 0o1000), False),
            ("openat", (0, 0, 0o1003), False),
            ("openat", (0, 0, 3), False),
            ("flock", (3, 2), False),
            ("fcntl", (0, 6), False),
            ("clone", (0x3D0F00,), True),
            ("clone", (17,), False),
            ("kill", (42, 9), True),
            ("kill", (43, 9), False),
            ("kill", (0xFFFFFFFF, 9), False),
            ("ioctl", (0, 0x5421), True),
            ("ioctl", (0, 0x5412), False),
            ("fcntl", (0, 4), True),
            ("fcntl", (0, 8), False),
            ("prctl", (15,), True),
            ("prctl", (1, 0), False),
            ("prlimit64", (0, 9, 0), True),
            ("prlimit64", (0, 9, 1 << 40), False),
            ("prlimit64", (43, 9, 0), False),
            ("socketpair", (1, 1 | 0o2000000), True),
            ("socketpair", (1, 2), False),
            ("socketpair", (2, 1), False),
            ("sendto", (3, 0, 0, 0, 0), True),
            ("sendto", (3, 0, 0, 0, 1 << 32), False),
            ("fchmod", (), False),
            ("clone3", (), False),
        ],
    )
    def test_verdicts(self, machine: str, call: str, arguments: tuple[int, ...], is_allowed: bool) -> None:
        column, architecture = seccomp._MACHINES[machine]
        tables = seccomp._ALLOWED | seccomp._ALLOWED_ON_PRIVATE_FILES | seccomp._CHECKED | seccomp._ABSENT
        program = seccomp.filter_program(42, has_private_files=False, machine=machine)
        verdict = judge(program, tables[call][column] or 0, architecture, arguments)
        assert (verdict == 0x7FFF0000) == is_allowed
        assert judge(program, tables[call][column] or 0, architecture ^ 1, arguments) != 0x7FFF0000
        assert judge(program, (tables[call][column] or 0) | 0x40000000, architecture, arguments) != 0x7FFF0000
