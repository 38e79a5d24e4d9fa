"""One sandboxed process as the server sees it: send code, watch it run, stop it in between."""

import json
import os
import secrets
import select
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

from mcp_grpo.errors import ToolServerError


_START_TIMEOUT = 20.0
_LOOK_EVERY = 0.05  # seconds between looks at what a running call uses
_MAX_RAW_OUTPUT = 8 << 20  # more is not read, but ends the call
_CHUNK = 1 << 16
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on the code of one trajectory."""

    timeout: float = 5.0
    max_memory_mib: int = 256
    max_files_mib: int = 16
    max_files: int = 1000
    max_open_files: int = 64
    max_threads: int = 16
    max_output: int = 8000
    max_code: int = 100_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """Result of a call."""

    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    error: str | None = None
    ended: str | None = None


class Excerpt:
    """Beginning and end of a stream of bytes of any length."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._head = b""
        self._tail = b""
        self.length = 0

    def add(self, data: bytes) -> None:
        """Take more of the stream."""
        self.length += len(data)
        space = self._size - len(self._head)
        self._head += data[:space]
        self._tail = (self._tail + data[space:])[-self._size :]

    @property
    def text(self) -> str:
        """Return the stream, or what was kept of it."""
        left_out = self.length - len(self._head) - len(self._tail)
        note = f"\n[{left_out:,} bytes left out]\n".encode() if left_out else b""
        return (self._head + note + self._tail).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Describe how a sandbox starts a process."""

    command: list[str]
    environment: Mapping[str, str]
    settings: Callable[[int], dict[str, Any]]
    folder: Path | None = None
    mounted_folder: str | None = None
    info: tuple[int, int] | None = None


class Process:
    """
    One sandboxed interpreter.

    The thread that starts it must outlive it: the kernel kills it when that thread ends.
    """

    def __init__(self, launch: Launch, limits: Limits) -> None:
        self._launch = launch
        self._limits = limits
        self._control, theirs = socket.socketpair()
        inherited = (launch.info[1],) if launch.info else ()
        try:
            self._popen = subprocess.Popen(
                launch.command,
                stdin=theirs.fileno(),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(launch.environment),
                cwd=launch.folder or "/",
                pass_fds=inherited,
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            for descriptor in launch.info or ():
                os.close(descriptor)
            raise ToolServerError(f"{launch.command[0]!r} cannot be started: {error}.") from None
        finally:
            theirs.close()
        for descriptor in inherited:
            os.close(descriptor)
        assert self._popen.stdout
        assert self._popen.stderr
        self._outputs = (self._popen.stdout, self._popen.stderr)
        self.pid = self._popen.pid
        self._pidfd: int | None = None
        self._received = b""
        self._is_over = False

    def open(self) -> None:
        """Wait until the runner has confined itself. Blocks."""
        try:
            if self._launch.info:
                self.pid = self._child_pid(self._launch.info[0])
                self._pidfd = os.pidfd_open(self.pid)
            self._control.settimeout(_START_TIMEOUT)
            self._control.sendall(_frame(self._launch.settings(self.pid)))
            while (message := self._message(1024)) is None:
                self._receive()
            if message != {"ready": True}:
                raise ConnectionError(f"unexpected answer {message!r}")
        except (OSError, ValueError) as error:
            problem = self._last_words() or str(error)
            self.end()
            raise ToolServerError(f"The sandboxed process did not start: {problem}") from None
        self._control.setblocking(False)
        for output in self._outputs:
            os.set_blocking(output.fileno(), False)

    def call(self, code: str) -> Reply:
        """Run code. Blocks for no longer than the limits allow."""
        stdout, stderr = (Excerpt(2 * self._limits.max_output) for _ in self._outputs)
        excerpts = dict(zip((output.fileno() for output in self._outputs), (stdout, stderr), strict=True))
        try:
            self._discard_rest(excerpts)
            self._signal(signal.SIGCONT)
            message, ended = self._exchange(code, excerpts), None
        except _Ended as why:
            message, ended = {}, str(why)
            self.end()
        else:
            self._signal(signal.SIGSTOP)  # threads that were left behind wait, too
        return Reply(
            stdout=_printable(stdout.text),
            stderr=_printable(stderr.text[-self._limits.max_output // 4 :]),
            value=_printable(message.get("value")),
            error=_printable(message.get("error")),
            ended=ended,
        )

    def end(self) -> None:
        """Kill the process and all that is of it. Blocks for a moment. It may be ended already."""
        if self._is_over:
            return
        self._is_over = True
        self._signal(signal.SIGKILL)
        try:
            self._popen.wait(2.0)  # bubblewrap reaps its child and follows it
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()
        self._control.close()
        for output in self._outputs:
            output.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
        if self._launch.folder:
            remove(self._launch.folder)

    def _discard_rest(self, excerpts: dict[int, Excerpt]) -> None:
        """Discard output that was written after the last reply, and end the process if it forged a reply."""
        self._read_outputs({descriptor: Excerpt(0) for descriptor in excerpts})
        with suppress(BlockingIOError, ConnectionError):
            self._receive()
        if self._received:
            raise _Ended(_MEDDLED)

    def _exchange(self, code: str, excerpts: dict[int, Excerpt]) -> dict[str, Any]:
        """Send a request and wait for the reply to it and no other, with an eye on the limits."""
        number = secrets.token_hex(8)
        request = _frame({"code": code, "number": number})
        watch = select.poll()
        control = self._control.fileno()
        watch.register(control, select.POLLIN | select.POLLOUT)
        for descriptor in excerpts:
            watch.register(descriptor, select.POLLIN)
        deadline = time.monotonic() + self._limits.timeout
        next_look = time.monotonic() + _LOOK_EVERY
        cpu_at_start = self._usage()[0]
        while True:
            events = dict(watch.poll(1000 * _LOOK_EVERY)).get(control, 0)
            if events & select.POLLOUT and not (request := self._send(request)):
                watch.modify(control, select.POLLIN)
            if events & ~select.POLLOUT:
                self._receive_or_end(excerpts)
            for descriptor in self._read_outputs(excerpts):
                watch.unregister(descriptor)
                del excerpts[descriptor]
            self._check_output(excerpts)
            message = self._message(64 * self._limits.max_output + _CHUNK)
            now = time.monotonic()
            if message is not None or now >= next_look:
                self._look(cpu_at_start)
                next_look = now + _LOOK_EVERY
            if message is not None:
                if message.get("number") != number:
                    raise _Ended(_MEDDLED)
                return message
            if now >= deadline:
                raise _Ended(self._out_of_time)

    def _send(self, data: bytes) -> bytes:
        with suppress(BlockingIOError, ConnectionError):  # if it has died, reading will tell
            data = data[self._control.send(data) :]
        return data

    def _receive(self) -> None:
        data = self._control.recv(_CHUNK)
        if not data:
            raise ConnectionError("the process has ended")
        self._received += data

    def _receive_or_end(self, excerpts: dict[int, Excerpt]) -> None:
        try:
            self._receive()
        except BlockingIOError:
            return
        except ConnectionError:
            self._read_outputs(excerpts)
            raise _Ended(self._cause_of_death()) from None

    def _message(self, max_bytes: int) -> dict[str, Any] | None:
        """Return the message received, if it is complete. Its content is untrusted."""
        if len(self._received) < 4:
            return None
        end = 4 + int.from_bytes(self._received[:4], "big")
        if end > max_bytes:
            raise _Ended(_MEDDLED)
        if len(self._received) < end:
            return None
        data, self._received = self._received[4:end], self._received[end:]
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise _Ended(_MEDDLED) from None
        if not isinstance(message, dict) or not all(isinstance(one, str | bool | None) for one in message.values()):
            raise _Ended(_MEDDLED)
        return message

    def _read_outputs(self, excerpts: dict[int, Excerpt]) -> list[int]:
        """Read what is there; returns the outputs that are closed."""
        closed = []
        for descriptor, excerpt in excerpts.items():
            with suppress(BlockingIOError):
                for _ in range(16):  # no more than a pipe holds: one that is never empty must not keep us here
                    data = os.read(descriptor, _CHUNK)
                    excerpt.add(data)
                    if not data:
                        closed.append(descriptor)
                        break
        return closed

    def _check_output(self, excerpts: dict[int, Excerpt]) -> None:
        if sum(excerpt.length for excerpt in excerpts.values()) > _MAX_RAW_OUTPUT:
            raise _Ended(f"Stopped: it wrote more than {_MAX_RAW_OUTPUT >> 20} MiB of output. Print less.")

    def _look(self, cpu_at_start: float) -> None:
        """End a call that uses more than it may."""
        limits = self._limits
        cpu, num_threads = self._usage()
        if cpu - cpu_at_start > limits.timeout:
            raise _Ended(self._out_of_time)
        if num_threads > limits.max_threads:
            raise _Ended(f"Stopped: {num_threads} threads, and {limits.max_threads} are the limit. Start fewer.")
        num_files, num_bytes = self._files()
        if num_files > limits.max_files:
            raise _Ended(f"Stopped: it made more than {limits.max_files:,} files, the limit. Make fewer.")
        if num_bytes > limits.max_files_mib << 20:
            raise _Ended(f"Stopped: its files are larger than {limits.max_files_mib} MiB, the limit. Write less.")

    @property
    def _out_of_time(self) -> str:
        return f"Stopped: a call may take {self._limits.timeout:g} s. Do less in one call, or find a faster way."

    def _usage(self) -> tuple[float, int]:
        """Return the seconds of CPU time and the number of threads, where the system tells."""
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0, 0
        return (int(fields[11]) + int(fields[12])) / _TICKS, int(fields[17])

    def _files(self) -> tuple[int, int]:
        """Return the number and size of the files in the private folder."""
        if self._launch.mounted_folder:
            try:
                room = os.statvfs(f"/proc/{self.pid}/root{self._launch.mounted_folder}")
            except OSError:
                return 0, 0  # it has just ended
            return room.f_files - room.f_ffree - 1, 0  # its size is limited by itself
        try:
            num_files, num_bytes = self._walk()
        except OSError:  # a path is too long, or the mode of a folder hides what is in it
            return self._limits.max_files + 1, 0
        return num_files, num_bytes + self._deleted_bytes()

    def _walk(self) -> tuple[int, int]:
        num_files = num_bytes = 0
        folders = [str(self._launch.folder)]
        while folders and num_files <= self._limits.max_files:
            with suppress(FileNotFoundError), os.scandir(folders.pop()) as entries:  # or it has just been removed
                for entry in islice(entries, self._limits.max_files + 1):
                    num_files += 1
                    num_bytes += _size(entry)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        return num_files, num_bytes

    def _deleted_bytes(self) -> int:
        """Return the size of files that are deleted but still open or mapped."""
        sizes: dict[int, int] = {}  # by the number of the file
        with suppress(OSError):
            for name in os.listdir(f"/proc/{self.pid}/fd"):
                with suppress(OSError):
                    status = os.stat(f"/proc/{self.pid}/fd/{name}")
                    sizes |= {status.st_ino: status.st_blocks * 512} if status.st_nlink == 0 else {}
        with suppress(OSError):
            for line in Path(f"/proc/{self.pid}/maps").read_bytes().splitlines():
                place, _, _, _, number, *path = line.split(maxsplit=5)
                if (
                    path
                    and path[0].endswith(b"(deleted)")
                    and path[0].startswith(os.fsencode(str(self._launch.folder)))
                ):
                    sizes.setdefault(int(number), self._mapped_bytes(os.fsdecode(place)))
        return sum(sizes.values())

    def _mapped_bytes(self, place: str) -> int:
        """Return the size of a mapped file; only root is told, and for others it is the largest that it can be."""
        try:
            return os.stat(f"/proc/{self.pid}/map_files/{place}").st_blocks * 512
        except OSError:
            return self._limits.max_files_mib << 20

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            if self._pidfd is not None:
                signal.pidfd_send_signal(self._pidfd, number)
            elif self._popen.poll() is None:
                os.killpg(self._popen.pid, number)

    def _child_pid(self, info: int) -> int:
        data = b""
        with open(info, "rb", buffering=0) as pipe:
            while part := pipe.read(_CHUNK):
                data += part
        return json.loads(data)["child-pid"]

    def _last_words(self) -> str:
        with suppress(OSError, subprocess.TimeoutExpired):
            self._control.close()  # a runner that waits for us ends
            self._popen.wait(1.0)
            data = os.read(self._outputs[1].fileno(), _CHUNK)
            return data.decode("utf-8", "replace").strip().splitlines()[-1] if data.strip() else ""
        return ""

    def _cause_of_death(self) -> str:
        try:
            code = self._popen.wait(2.0)
        except subprocess.TimeoutExpired:
            return _MEDDLED  # it closed the socket
        number = -code if code < 0 else code - 128 if self._pidfd is not None and code > 128 else 0
        if number == signal.SIGKILL:
            return "The process was killed by the system, probably because memory ran out. Use less memory."
        if number:
            return f"The process crashed ({signal.Signals(number).name})."
        return f"The code ended its process (exit code {code}). Let it run to its end instead."


def remove(folder: Path) -> None:
    """Remove a folder that sandboxed code has written to. However deep it is: `shutil.rmtree` recurses, and fails."""
    prefix, numbers = uuid.uuid4().hex, count()
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    with suppress(OSError), _opened(folder, flags) as top:
        while folders := _remove_files(top):
            for name in folders:
                os.chmod(name, 0o700, dir_fd=top)
                with _opened(name, flags, top) as inner:
                    for deeper in _remove_files(inner):
                        os.chmod(deeper, 0o700, dir_fd=inner)  # it can be moved then
                        os.rename(deeper, f"{prefix}{next(numbers)}", src_dir_fd=inner, dst_dir_fd=top)
                os.rmdir(name, dir_fd=top)
        os.rmdir(folder)


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:  # it has just been removed
        return 0


def _remove_files(folder: int) -> list[str]:
    """Remove what is not a folder; returns the names of the rest."""
    with os.scandir(folder) as entries:
        is_folder = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
    for name in is_folder:
        if not is_folder[name]:
            os.unlink(name, dir_fd=folder)
    return [name for name in is_folder if is_folder[name]]


@contextmanager
def _opened(path: str | Path, flags: int, folder: int | None = None) -> Generator[int, None, None]:
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class _Ended(Exception):
    """The process has ended, or must be."""


_MEDDLED = "The code broke the process that runs it."


def _frame(message: dict[str, Any]) -> bytes:
    data = json.dumps(message).encode()
    return len(data).to_bytes(4, "big") + data


def _printable(text: Any) -> Any:
    """Return text that JSON can carry: lone surrogates are replaced."""
    return text.encode("utf-8", "replace").decode() if isinstance(text, str) else None
