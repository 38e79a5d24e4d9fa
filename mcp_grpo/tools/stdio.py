"""
A server as a child process, spoken to over its standard streams.

The SDK's own stdio transport is not used: it buffers in quadratic time and without bound, one undecodable byte ends its
reader, and what the server itself started outlives it.
"""

import asyncio
import functools
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.framing import LineSplitter, parse
from mcp_grpo.tools.hints import missing_file_hint
from mcp_grpo.tools.reaper import register, signal_group, unregister


Incoming = SessionMessage | Exception
Streams = tuple[MemoryObjectReceiveStream[Incoming], MemoryObjectSendStream[SessionMessage]]

READ_SIZE = 256 * 1024
READ_AHEAD = 64  # messages that are read before anyone has looked at them
STDERR_BYTES = 8192  # how much of the end of a server's error output is kept
STDERR_LINES = 20  # how much of that is shown

EXIT_GRACE = 2.0  # after the end of its input; a Python server takes about half a second
TERM_GRACE = 1.0
REAP_GRACE = 1.0


class StdioTransport:
    """
    One child process and its streams.

    Args:
        config ([`ServerConfig`]):
            A stdio server.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._process: asyncio.subprocess.Process | None = None
        self._was_signalled = False
        self._stderr = b""
        self._stderr_ended = anyio.Event()
        self.ended = anyio.Event()
        """Set when a stream has ended: the server has exited, or nothing more can be said to it."""
        self.ended_by_itself = False
        """Whether it was the server that ended the session, and not we."""

    @property
    def pid(self) -> int | None:
        """Id of the process, which is also the id of its group."""
        return self._process.pid if self._process else None

    @property
    def returncode(self) -> int | None:
        """Exit code; negative for a signal; `None` while it runs."""
        return self._process.returncode if self._process else None

    @property
    def own_returncode(self) -> int | None:
        """Exit code of a server that exited without our asking."""
        return self.returncode if self.ended_by_itself and not self._was_signalled else None

    @property
    def stderr_tail(self) -> str:
        """The last lines of its error output, without secrets."""
        text = self._config.redact(self._stderr.decode("utf-8", "replace"))
        return "\n".join(text[-STDERR_BYTES:].rstrip().splitlines()[-STDERR_LINES:])

    @property
    def is_stuck(self) -> bool:
        """Whether the server has stopped reading what is sent to it."""
        stdin = self._process.stdin if self._process else None
        return stdin is not None and stdin.transport.get_write_buffer_size() > 0

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Streams, None]:
        """
        Start the process, and end it and all it started on the way out.

        Yields:
            `Streams`: The pair of streams that `mcp.Client` takes for a transport.
        """
        process = await self._spawn()
        try:
            incoming, read = anyio.create_memory_object_stream[Incoming](READ_AHEAD)
            # Unbounded, so that sending never blocks: the SDK's clock starts after the write, and a server that stops
            # reading must cost one call its deadline, not hang it. `max_inflight` bounds what can pile up.
            write, outgoing = anyio.create_memory_object_stream[SessionMessage](math.inf)
            async with anyio.create_task_group() as tasks, incoming, read, write, outgoing:
                tasks.start_soon(self._read_stdout, process, incoming)
                tasks.start_soon(self._read_stderr, process)
                tasks.start_soon(self._write_stdin, process, outgoing, incoming)
                try:
                    yield read, write
                finally:
                    read.close()  # sets the reader draining: a server that is stuck writing does not see its input end
                    with anyio.CancelScope(shield=True):
                        await self._stop(process)
                    tasks.cancel_scope.cancel()
        finally:
            signal_group(process.pid, signal.SIGKILL)
            unregister(process.pid)
            # A descendant that left the group can hold the pipes open; nothing public closes our ends of them.
            getattr(process, "_transport").close()  # noqa: B009
            await anyio.lowlevel.cancel_shielded_checkpoint()  # lets the loop close them

    async def _spawn(self) -> asyncio.subprocess.Process:
        config, env = self._config, get_default_environment() | dict(self._config.env)
        command = _executable(config, env.get("PATH"))
        try:
            with anyio.CancelScope(shield=True):  # a process must not be started and then not be recorded
                self._process = await asyncio.create_subprocess_exec(
                    *_death_guard(),
                    command,
                    *config.args,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env=env,
                    cwd=config.cwd,
                    start_new_session=True,  # Ctrl-C is for the trainer to handle; and the group can be killed as one
                    limit=READ_SIZE,
                )
                register(self._process.pid)
        except (OSError, ValueError) as error:
            raise ToolServerError(
                f"The server {config.name!r} could not be started: {error}. Its command is `{config.target}`, its "
                f"working directory {config.cwd or os.getcwd()!r}. Check that both exist and may be used."
            ) from error
        assert self._process is not None
        return self._process

    async def _read_stdout(
        self, process: asyncio.subprocess.Process, incoming: MemoryObjectSendStream[Incoming]
    ) -> None:
        assert process.stdout
        splitter, max_bytes = LineSplitter(self._config.max_result_bytes), self._config.max_result_bytes
        is_delivering = True
        async with incoming:
            while chunk := await process.stdout.read(READ_SIZE):
                for line in splitter.feed(chunk) if is_delivering else ():
                    if (message := parse(line, max_bytes)) is None:
                        continue
                    try:
                        try:
                            incoming.send_nowait(SessionMessage(message))
                        except anyio.WouldBlock:
                            await incoming.send(SessionMessage(message))
                    except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                        is_delivering = False  # nobody listens any more; go on reading so that the server can exit
                        break
            self.ended.set()  # before the stream closes: whoever sees it closed must see this too

    async def _read_stderr(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr
        while chunk := await process.stderr.read(READ_SIZE):
            # More than is shown: of a secret that is cut in two, nothing could be recognised.
            self._stderr = (self._stderr + chunk)[-2 * STDERR_BYTES :]
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
                line = item.message.model_dump_json(by_alias=True, exclude_unset=True)
                process.stdin.write(line.encode() + b"\n")
                await process.stdin.drain()
        except OSError:  # it closed its input: end the session, or its calls would wait for nothing
            self.ended.set()
            incoming.close()

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        """End of input, then SIGTERM, then SIGKILL to the whole group; every wait is bounded."""
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
        # Always, and also when the server exited by itself: what it started must not outlive it.
        signal_group(process.pid, signal.SIGKILL)
        await _exited(process, REAP_GRACE)
        with anyio.move_on_after(REAP_GRACE):
            await self._stderr_ended.wait()


async def _exited(process: asyncio.subprocess.Process, timeout: float) -> bool:
    """Whether the process exits in time. `process.wait()` would also wait for every holder of its pipes."""
    with anyio.move_on_after(timeout):
        while process.returncode is None:
            await anyio.sleep(0.01)
    return process.returncode is not None


def _executable(config: ServerConfig, path: str | None) -> str:
    """The program to run. Looked up here, because behind the death guard a missing one would look like a crash."""
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
    """A prefix that makes the kernel kill the server when the thread that started it dies, even by SIGKILL."""
    if sys.platform != "linux" or (setpriv := shutil.which("setpriv")) is None:
        return ()
    guard = (setpriv, "--pdeathsig", "KILL", "--")
    # Tried once, since not every setpriv knows the option. An exec wrapper, not `preexec_fn`: that forbids vfork and
    # can deadlock in a process with threads.
    tried = subprocess.run([*guard, "true"], stdin=subprocess.DEVNULL, capture_output=True, timeout=10, check=False)
    return guard if tried.returncode == 0 else ()
