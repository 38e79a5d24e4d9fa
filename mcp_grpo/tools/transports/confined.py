"""
Starts a third-party server behind walls: `python confined.py '{"read": [...], ...}' command args...`.

It is run as a file of its own, with nothing but the standard library, in the process that then becomes the server. Landlock hides
every file but those that a rule names, and seccomp refuses sockets to the outside. Nothing is started where either is missing.
"""

import ctypes
import errno
import json
import os
import platform
import struct
import sys
from collections.abc import Sequence
from typing import Any


_NO_NEW_PRIVS, _SET_SECCOMP = 38, 22
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE, _READ, _READ_FOLDER, _TRUNCATE, _IOCTL = 1, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
_CONNECT = 1 << 1
_MIN_VERSION = 4  # of Landlock: the first that knows of TCP, in Linux 6.7
_DNS = 53

# Numbers of socket, and of calls that would go round the walls: ptrace, process_vm_readv and _writev, io_uring, bpf, kexec, mounts.
_MACHINES = {
    "x86_64": (
        0xC000003E,
        41,
        (101, 310, 311, 425, 426, 427, 321, 246, 165, 428, 429, 430, 432, 155, 272, 308, 298, 323),
    ),
    "aarch64": (
        0xC00000B7,
        198,
        (117, 270, 271, 425, 426, 427, 280, 104, 40, 428, 429, 430, 432, 41, 97, 268, 241, 282),
    ),
}
_X32 = 0x40000000
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_INET, _INET6, _NETLINK, _STREAM, _TYPE = 2, 10, 16, 1, 0xF


def is_supported() -> bool:
    """Return whether this system has all that the walls are made of."""
    is_linux = sys.platform == "linux" and platform.machine() in _MACHINES
    return is_linux and ctypes.CDLL(None).syscall(_CREATE_RULESET, None, 0, 1) >= _MIN_VERSION


def seal(read: Sequence[str], write: Sequence[str], network: bool | Sequence[int]) -> None:
    """Leave this process nothing but these files and, of the network, all, nothing, or TCP to some ports."""
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < _MIN_VERSION:
        raise OSError(errno.ENOSYS, "Landlock cannot be had, or is older than Linux 6.7")
    files = (1 << (16 if version >= 5 else 15)) - 1
    # Files; TCP, to bind and to connect; abstract sockets and signals to others.
    attributes = struct.pack("=QQQ", files, 0 if network is True else 3, 3)[: 24 if version >= 6 else 16]
    ruleset = _check(libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock")
    reading = _EXECUTE | _READ | _READ_FOLDER
    for path, rights in [*((path, reading) for path in read), *((path, files) for path in write)]:
        try:
            place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue  # not every system has them all
        if not os.path.isdir(path):
            rights &= _EXECUTE | _WRITE | _READ | _TRUNCATE | (_IOCTL if version >= 5 else 0)
        _check(libc.syscall(_ADD_RULE, ruleset, 1, struct.pack("=QI", rights, place), 0), f"landlock rule for {path}")
        os.close(place)
    for port in [] if isinstance(network, bool) else [*network, _DNS]:
        _check(libc.syscall(_ADD_RULE, ruleset, 2, struct.pack("=QQ", _CONNECT, port), 0), "landlock rule for a port")
    _check(libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock restriction")
    os.close(ruleset)
    program = filter_program(network, platform.machine())
    array = ctypes.create_string_buffer(program, len(program))
    pointer = ctypes.create_string_buffer(struct.pack("=QQ", len(program) // 8, ctypes.addressof(array)), 16)
    _check(libc.prctl(_SET_SECCOMP, 2, pointer, 0, 0), "seccomp")


def filter_program(network: bool | Sequence[int], machine: str) -> bytes:
    """Return a filter that refuses ways round Landlock, and all but some sockets."""
    architecture, socket, refused = _MACHINES[machine]
    steps = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), (_RETURN, 0, 0, _REFUSE), (_LOAD, 0, 0, 0)]
    steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _REFUSE)]
    steps += [step for number in refused for step in ((_EQUAL, 0, 1, number), (_RETURN, 0, 0, _REFUSE))]
    # No Unix sockets: Landlock does not look at their paths, and behind one of them may be Docker, or an agent with keys.
    families = () if network is False else (_INET, _INET6) if network is not True else (_INET, _INET6, _NETLINK)
    body = [(_LOAD, 0, 0, 16), *((_EQUAL, len(families) - i, 0, family) for i, family in enumerate(families))]
    body += [(_RETURN, 0, 0, _REFUSE)]
    if network is not True:  # only TCP: what is sent by other means cannot be told by its port
        body += [(_LOAD, 0, 0, 24), (_AND, 0, 0, _TYPE), (_EQUAL, 1, 0, _STREAM), (_RETURN, 0, 0, _REFUSE)]
    steps += [(_EQUAL, 0, len(body) + 1, socket), *body, (_RETURN, 0, 0, _ALLOW)]
    return b"".join(struct.pack("=HBBI", *step) for step in [*steps, (_RETURN, 0, 0, _ALLOW)])


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def main() -> None:
    """Seal this process, and become the server."""
    walls: dict[str, Any] = json.loads(sys.argv[1])
    command = sys.argv[2:]
    try:
        seal(**walls)
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(f"The server was not started, as it could not be kept in: {error}")


if __name__ == "__main__":
    main()
