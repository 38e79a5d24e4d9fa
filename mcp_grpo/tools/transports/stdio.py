"""
A server as a child process, over its standard streams.

The SDK's own stdio transport is not used: it buffers in quadratic time and without bound, one undecodable byte ends its
reader, and the server's own child processes outlive it.
"""

import asyncio
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp.types import JSONRPCError, JSONRPCMessage, JSONRPCRequest, JSONRPCResponse

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.transports import guard as guard_program
from mcp_grpo.tools.transports.framing import LineSplitter, parse
from mcp_grpo.tools.transports.reaper import end_guard, make_home, register, remove_home, signal_group, unregister
from mcp_grpo.tools.transports.scratch import Scratch
from mcp_grpo.tools.transports.share import BYTE_COST, MESSAGE_COST, Share
from mcp_grpo.tools.transports.startup_hints import missing_file_hint
from mcp_grpo.tools.transports.walls import behind_walls


Incoming = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]

READ_SIZE = 256 * 1024
SLICE = 4096  # bytes that are read between two looks at a server's share
READ_AHEAD = 64  # messages
MAX_UNREAD = 64  # messages to a server that it has not read, before its own requests are left unread
STDERR_BYTES = 8192  # kept of the end of a server's error output
STDERR_LINES = 20  # shown of that

EXIT_GRACE = 2.0  # seconds after the end of its input; a Python server takes about half a second
TERM_GRACE = 1.0
REAP_GRACE = 1.0
HOME_GRACE = 10.0  # to remove the files that a server in a sandbox has written


class StdioTransport:
    """One child process and its streams."""

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._homes: list[str] = []  # folders of its own: of a server in a sandbox, and of a scratch copy
        self._scratch: Scratch | None = None
        self._was_signalled = False
        self._share = Share()
        self._awaited: set[str] = set()  # ids of requests without a reply
        self._stderr = b""
        self._stderr_ended = anyio.Event()
        self.ended = anyio.Event()  # a stream has ended: the server has exited or reads no more
        self.ended_by_itself = False

    @property
    def pid(self) -> int | None:
        """Id of the process, or of its guard, and of its group."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit code; negative for a signal; `None` while it runs."""
        return self._process.returncode if self._process else None

    @property
    def own_returncode(self) -> int | None:
        """Exit code of a server that exited by itself."""
        return self.returncode if self.ended_by_itself and not self._was_signalled else None

    @property
    def stderr_tail(self) -> str:
        """The last lines of its error output, without secrets."""
        text = self._config.redact(self._stderr.decode("utf-8", "replace"))
        return "\n".join(text[-STDERR_BYTES:].rstrip().splitlines()[-STDERR_LINES:])

    @property
    def is_stuck(self) -> bool:
        """Return whether the server has stopped reading what is sent to it."""
        stdin = self._process.stdin if self._process else None
        return stdin is not None and stdin.transport.get_write_buffer_size() > 0

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Streams, None]:
        """Start the process, and yield the streams that `mcp.Client` takes; end it and all it started on the way out."""
        try:
            process = await self._spawn()
        except BaseException:
            await self._remove_home()
            raise
        try:
            incoming, read = anyio.create_memory_object_stream[Incoming](READ_AHEAD)
            # Unbounded, so that sending never blocks: the SDK's clock starts after the write, and a server that stops
            # reading must not hang a call past its deadline. `max_inflight` limits what can pile up.
            write, outgoing = anyio.create_memory_object_stream[SessionMessage](math.inf)
            async with anyio.create_task_group() as tasks, incoming, read, write, outgoing:
                tasks.start_soon(self._read_stdout, process, incoming, outgoing)
                tasks.start_soon(self._read_stderr, process)
                tasks.start_soon(self._write_stdin, process, outgoing, incoming)
                try:
                    yield read, write
                finally:
                    read.close()  # makes the reader drain: a server stuck in a write does not see its input end
                    with anyio.CancelScope(shield=True):
                        await self._stop(process)
                    tasks.cancel_scope.cancel()
        finally:
            signal_group(process.pid, signal.SIGKILL)
            await self._remove_home()
            unregister(process.pid)
            # A descendant that left the group can hold the pipes open; nothing public closes our ends of them.
            getattr(process, "_transport").close()  # noqa: B009
            await anyio.lowlevel.cancel_shielded_checkpoint()  # lets the loop close them

    async def _remove_home(self) -> None:
        for home in self._homes:
            with anyio.move_on_after(HOME_GRACE, shield=True):  # the rest is removed beside what follows
                await anyio.to_thread.run_sync(remove_home, home, abandon_on_cancel=True)

    async def _spawn(self) -> asyncio.subprocess.Process:
        config = await self._make_scratch() if self._config.scratch is not None else self._config
        env = get_default_environment() | dict(config.env)
        command, walls = _executable(config, env.get("PATH")), []
        if config.sandbox is not None:
            self._homes.append(make_home())
            walls, variables = behind_walls(config, command, self._homes[-1])
            env = get_default_environment() | variables | dict(config.env)
        try:
            with anyio.CancelScope(shield=True):  # a started process must be registered
                self._process = await asyncio.create_subprocess_exec(
                    *_death_guard(),
                    *walls,
                    command,
                    *config.args,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=env,
                    cwd=config.cwd,
                    start_new_session=True,  # Ctrl-C is for the trainer, and the group can be killed as one
                    limit=READ_SIZE,
                )
                register(self._process.pid)
        except (OSError, ValueError) as error:
            raise ToolServerError(
                config.redact(
                    f"The server {config.name!r} could not be started: {error}. Its command is `{config.target}`, its "
                    f"working directory {config.cwd or os.getcwd()!r}. Check that both exist and are accessible."
                )
            ) from None
        assert self._process is not None
        return self._process

    async def _make_scratch(self) -> ServerConfig:
        """Make the copy that the server works on, and return its configuration there."""
        self._homes.append(make_home())
        self._scratch = Scratch(self._config, self._homes[-1])
        return await anyio.to_thread.run_sync(self._scratch.make)

    async def _read_stdout(
        self,
        process: asyncio.subprocess.Process,
        incoming: MemoryObjectSendStream[Incoming],
        outgoing: MemoryObjectReceiveStream[SessionMessage],
    ) -> None:
        assert process.stdout
        splitter, max_bytes = LineSplitter(self._config.max_result_bytes), self._config.max_result_bytes
        is_delivering = True
        async with incoming:
            while chunk := await process.stdout.read(READ_SIZE):
                is_delivering = is_delivering and _is_listening(incoming)  # else read on, so that the server can exit
                for start in range(0, len(chunk), SLICE) if is_delivering else ():
                    began = time.perf_counter()
                    for line in splitter.feed(chunk[start : start + SLICE]):
                        if self._scratch is not None and isinstance(line, bytes):
                            line = self._scratch.from_server(line)
                        message = parse(line, max_bytes)
                        seconds = time.perf_counter() - began
                        if self._is_answer(message):
                            self._share.charge_answer(seconds)
                        else:
                            self._share.charge(seconds + (0 if message is None else MESSAGE_COST))
                        if message is not None and not await self._deliver(message, incoming, outgoing):
                            break
                        began = time.perf_counter()
                    if splitter.is_dropping:
                        self._share.charge(SLICE * BYTE_COST)
                    await self._share.settle()
            self.ended.set()  # before the stream closes, for whoever sees it closed

    def _is_answer(self, message: JSONRPCMessage | None) -> bool:
        """Return whether a message answers a request, for the first time."""
        if not isinstance(message, (JSONRPCResponse, JSONRPCError)) or (key := str(message.id)) not in self._awaited:
            return False
        self._awaited.remove(key)
        return True

    async def _deliver(
        self,
        message: JSONRPCMessage,
        incoming: MemoryObjectSendStream[Incoming],
        outgoing: MemoryObjectReceiveStream[SessionMessage],
    ) -> bool:
        """Hand a message to the session, and return whether it still listens."""
        if isinstance(message, JSONRPCRequest):
            # Its replies would pile up if it asks without reading them.
            while outgoing.statistics().current_buffer_used > MAX_UNREAD and _is_listening(incoming):
                await anyio.sleep(0.01)
        try:
            try:
                incoming.send_nowait(SessionMessage(message))
            except anyio.WouldBlock:
                await incoming.send(SessionMessage(message))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            return False
        return True

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        share = Share()  # of its own: who logs much should not be answered late
        while chunk := await process.stderr.read(READ_SIZE):
            # More than is shown: a secret that is cut in two could not be recognised.
            self._stderr = (self._stderr + chunk)[-2 * STDERR_BYTES :]
            share.charge(len(chunk) * BYTE_COST)
            await share.settle()
        self._stderr_ended.set()

    async def _write_stdin(
        self,
        process: asyncio.subprocess.Process,
        outgoing: MemoryObjectReceiveStream[SessionMessage],
        incoming: MemoryObjectSendStream[Incoming],
    ) -> None:
        assert process.stdin
        try:
            async for item in outgoing:
                if isinstance(item.message, JSONRPCRequest):
                    self._awaited.add(str(item.message.id))
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True).encode()
                line = self._scratch.to_server(line) if self._scratch is not None else line
                process.stdin.write(line + b"\n")
                await process.stdin.drain()
        except OSError:  # it closed its input; its calls would wait in vain
            self.ended.set()
            incoming.close()

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """End its input, then send SIGTERM, then kill it and all that it started; every wait is bounded."""
        assert process.stdin
        self.ended_by_itself = self.ended.is_set()
        if self.is_stuck:
            process.stdin.transport.abort()  # `close` would wait for the server to read the rest
        else:
            process.stdin.close()
        if not await _exited(process, EXIT_GRACE):
            self._was_signalled = True
            signal_group(process.pid, signal.SIGTERM)
            await _exited(process, TERM_GRACE)
        # Also when the server exited by itself: what it started must not outlive it.
        if process.returncode is None and _death_guard():
            end_guard(process.pid)
            await _exited(process, REAP_GRACE)
        signal_group(process.pid, signal.SIGKILL)
        await _exited(process, REAP_GRACE)
        with anyio.move_on_after(REAP_GRACE):
            await self._stderr_ended.wait()


def _is_listening(incoming: MemoryObjectSendStream[Incoming]) -> bool:
    return incoming.statistics().open_receive_streams > 0


async def _exited(process: asyncio.subprocess.Process, timeout: float) -> bool:
    """Wait for the process to exit. `process.wait()` would also wait for every holder of its pipes."""
    with anyio.move_on_after(timeout):
        while process.returncode is None:
            await anyio.sleep(0.01)
    return process.returncode is not None


def _executable(config: ServerConfig, path: str | None) -> str:
    """Look up the program here, because behind the death guard a missing one would look like a crash."""
    command = config.command or ""
    if os.sep in command:
        found = shutil.which(os.path.join(config.cwd or "", command))
    else:
        found = shutil.which(command, path=path)
    if found is None:
        hint = missing_file_hint(config, command) if os.sep in command else None
        raise ToolServerError(
            f"The server {config.name!r} could not be started: there is no program {config.redact(command)!r}. "
            f"Its command is `{config.target}`. "
            f"{config.redact(hint or 'Install it, put it on PATH, or give its full path.')}"
        )
    return os.path.abspath(found)


@functools.cache
def _death_guard() -> tuple[str, ...]:
    """Return a prefix that makes a server end with all it started when it exits, is ended, or this process dies."""
    if sys.platform != "linux" or not sys.executable:
        return ()
    guard = (sys.executable, "-I", "-S", guard_program.__file__)
    # Tried once. An exec wrapper, not `preexec_fn`: that forbids vfork and can deadlock in a process with threads.
    tried = subprocess.run(
        [*guard, shutil.which("true") or "/bin/true"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return guard if tried.returncode == 0 else ()
