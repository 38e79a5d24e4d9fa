"""The system calls that sandboxed code may make, as a filter for Linux's seccomp. Whatever is not named is refused."""

import errno
import platform
import struct
import sys
from collections.abc import Sequence


Calls = dict[str, tuple[int | None, int | None]]


def _calls(table: str) -> Calls:
    """Read a table of `name:number on x86_64:number on aarch64`, with `-` where there is no such call."""
    words = [word for line in table.splitlines() if not line.lstrip().startswith("#") for word in line.split()]
    rows = [word.split(":") for word in words]
    return {name: (int(first), None if second == "-" else int(second)) for name, first, second in rows}


_ALLOWED = _calls("""
    # Files. Where they are is the business of the namespaces or of Landlock.
    read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 lseek:8:62 close:3:57
    close_range:436:436 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 stat:4:- fstat:5:80 lstat:6:-
    newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:-
    readlinkat:267:78 getcwd:79:17 chdir:80:49 fchdir:81:50 getdents64:217:61 mkdir:83:- mkdirat:258:34
    rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 symlink:88:-
    symlinkat:266:36 link:86:- linkat:265:37 ftruncate:77:46 fsync:74:82 fdatasync:75:83
    fadvise64:221:223 copy_file_range:326:285 sendfile:40:71 statfs:137:43 fstatfs:138:44 umask:95:166
    # Memory.
    mmap:9:222 munmap:11:215 mremap:25:216 mprotect:10:226 madvise:28:233 msync:26:227 brk:12:214
    membarrier:324:283
    # Itself.
    futex:202:98 rseq:334:293 set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96
    arch_prctl:158:- gettid:186:178 getpid:39:172 getppid:110:173 getpgid:121:155 getpgrp:111:- getsid:124:156
    getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177 getgroups:115:158 getresuid:118:148
    getresgid:120:150 getrusage:98:165 getrlimit:97:163 getpriority:140:141 getcpu:309:168 sched_yield:24:124
    sched_getaffinity:204:123 wait4:61:260 waitid:247:95 exit:60:93 exit_group:231:94
    # Its signals.
    rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
    rt_sigtimedwait:128:137 sigaltstack:131:132 restart_syscall:219:128 pause:34:- alarm:37:- setitimer:38:103
    getitimer:36:102
    # Time and chance.
    nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169
    time:201:- times:100:153 getrandom:318:278 uname:63:160 sysinfo:99:179
    # Waiting for its own pipes, as asyncio does.
    poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
    epoll_pwait:281:22 eventfd2:290:19 recvfrom:45:207 shutdown:48:210 getsockname:51:204 getpeername:52:205
    getsockopt:55:209
""")
# Neither Landlock nor the opening of a file looks at these: where the host's files are in sight, they would change them.
_ALLOWED_ON_PRIVATE_FILES = _calls("""
    chmod:90:- fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- utimensat:280:88 truncate:76:45
""")
# Calls that are allowed with some arguments.
_CHECKED = _calls("""
    open:2:- openat:257:56 clone:56:220 kill:62:129 tgkill:234:131 ioctl:16:29 fcntl:72:25 prctl:157:167
    prlimit64:302:261 socketpair:53:199 sendto:44:206 flock:73:32
""")
# The C library takes another way when a call does not exist, and gives up when it is forbidden.
_ABSENT = _calls("clone3:435:435 openat2:437:437")

_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column above, AUDIT_ARCH
_X32 = 0x40000000

_LOAD, _AND, _JUMP_IF_EQUAL, _JUMP_IF_GREATER_OR_EQUAL, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
_ALLOW, _REFUSE, _UNKNOWN = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_PRETEND = 0x00050000  # not done, and 0 is returned

_CLONE_THREAD = 0x10000
_AF_UNIX, _SOCK_STREAM, _SOCK_FLAGS = 1, 1, 0o2004000  # SOCK_CLOEXEC, SOCK_NONBLOCK
_O_TRUNC, _O_ACCMODE = 0o1000, 0o3
_IOCTLS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIONCLEX FIOCLEX
_FCNTLS = (0, 1, 2, 3, 4, 1030, 1032)  # no F_SETOWN or F_SETSIG, which send signals; no F_SETPIPE_SZ; no locks
_LOCKS = (6, 7)  # F_SETLK F_SETLKW
_PRCTLS = (15, 16, 0x53564D41)  # PR_SET_NAME PR_GET_NAME PR_SET_VMA

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, operand


def is_supported() -> bool:
    """Tell whether there is a filter for this machine."""
    return sys.platform == "linux" and platform.machine() in _MACHINES


def filter_program(pid: int, *, has_private_files: bool, machine: str | None = None) -> bytes:
    """Return the filter of one process in the kernel's format."""
    column, architecture = _MACHINES[machine or platform.machine()]
    allowed = _ALLOWED | (_ALLOWED_ON_PRIVATE_FILES if has_private_files else {})
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_IF_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _REFUSE),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_GREATER_OR_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, _REFUSE),
    ]
    for name, body in _bodies(allowed, pid).items():
        number = (allowed | _CHECKED | _ABSENT)[name][column]
        if number is not None:
            program += [(_JUMP_IF_EQUAL, 0, len(body), number), *body]
    program.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _bodies(allowed: Calls, pid: int) -> dict[str, list[Instruction]]:
    """Return the instructions for each call. Each ends in a verdict; none returns to the search."""
    allow: Instruction = (_RETURN, 0, 0, _ALLOW)
    pretend: Instruction = (_RETURN, 0, 0, _PRETEND)
    # Landlock before version 3 lets a file be emptied by reading it, and none looks at a device that is opened for neither
    # reading nor writing.
    not_to_open = (_O_TRUNC, _O_ACCMODE, _O_TRUNC | _O_ACCMODE)
    bodies: dict[str, list[Instruction]] = {name: [allow] for name in allowed}
    return bodies | {
        "open": [*_none_of(1, not_to_open, mask=_O_TRUNC | _O_ACCMODE), allow],
        "openat": [*_none_of(2, not_to_open, mask=_O_TRUNC | _O_ACCMODE), allow],
        "clone": [*_one_of(0, (_CLONE_THREAD,), mask=_CLONE_THREAD), allow],
        "kill": [*_one_of(0, (pid,)), allow],
        "tgkill": [*_one_of(0, (pid,)), allow],
        "ioctl": [*_one_of(1, _IOCTLS), allow],
        # A lock on a file that all can read would tell other trajectories something. Each has a process of its own, with
        # nobody else to keep out of its files: sqlite and others are told that they have the lock.
        "flock": [pretend],
        "fcntl": [*_unless(1, _LOCKS, pretend), *_one_of(1, _FCNTLS), allow],
        "prctl": [*_one_of(0, _PRCTLS), allow],
        "prlimit64": [*_one_of(0, (0, pid)), *_null(2), allow],  # to read its own limits
        # A pair of datagram sockets could send to any other that has a name.
        "socketpair": [*_one_of(0, (_AF_UNIX,)), *_one_of(1, (_SOCK_STREAM,), mask=~_SOCK_FLAGS & 0xFFFFFFFF), allow],
        "sendto": [*_null(4), allow],
        **{name: [(_RETURN, 0, 0, _UNKNOWN)] for name in _ABSENT},
    }


def _one_of(argument: int, values: Sequence[int], mask: int = 0xFFFFFFFF) -> list[Instruction]:
    """Continue if the argument, an `int` of C, is one of these under the mask."""
    last = len(values) - 1
    tests = [(_JUMP_IF_EQUAL, last - place + 1, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), *tests, (_RETURN, 0, 0, _REFUSE)]


def _none_of(argument: int, values: Sequence[int], mask: int) -> list[Instruction]:
    """Continue if the argument is none of these under the mask."""
    return _unless(argument, values, (_RETURN, 0, 0, _REFUSE), mask)


def _unless(argument: int, values: Sequence[int], verdict: Instruction, mask: int = 0xFFFFFFFF) -> list[Instruction]:
    """Give a verdict if the argument is one of these under the mask; continue if not."""
    tests = [step for value in values for step in ((_JUMP_IF_EQUAL, 0, 1, value), verdict)]
    return [(_LOAD, 0, 0, 16 + 8 * argument), (_AND, 0, 0, mask), *tests]


def _null(argument: int) -> list[Instruction]:
    """Continue if the argument is a null pointer."""
    return [step for half in (16, 20) for step in _word_is_zero(half + 8 * argument)]


def _word_is_zero(offset: int) -> list[Instruction]:
    return [(_LOAD, 0, 0, offset), (_JUMP_IF_EQUAL, 1, 0, 0), (_RETURN, 0, 0, _REFUSE)]
