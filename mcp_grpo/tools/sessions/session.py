"""One connection to one server, opened and closed by its own task."""

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, cast

import anyio
import anyio.lowlevel
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup
from mcp import Client, MCPError

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.functions import FunctionServer
from mcp_grpo.tools.observation import observed, observed_error
from mcp_grpo.tools.transports.http import HttpTransport, is_unsent
from mcp_grpo.tools.transports.startup_hints import start_hints
from mcp_grpo.tools.transports.stdio import StdioTransport
from mcp_grpo.types import ResultKind, ToolResult


logger = logging.getLogger(__name__)

MAX_PAGES = 100  # of a tool listing
MAX_TOOLS = 10_000
CLOSE_TIMEOUT = 5.0  # for an orderly end, and once more for a forced one
EXIT_TIMEOUT = 0.5  # for the exit code and stderr of a server that ended
SPAWN_TIME = 10.0  # seconds that one start holds up the next; starting is CPU work
MAX_STRIKES = 3  # failures in a row, with no reply in between, before the session is replaced

ToolsChanged = Callable[[tuple[types.Tool, ...]], None]
_Outcome = types.CallToolResult | Exception


class NotSentError(ToolServerError):
    """The call was not sent, so it is safe to send it to another session."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """Hold what the first session learnt about a server's protocol, so that later ones need not probe for it."""

    mode: str
    discovered: types.DiscoverResult | None = None


_CLOSED = MCPError(code=types.CONNECTION_CLOSED, message="Connection closed")


class Session:
    """
    A connection to a server.

    A task of its own opens and closes the connection, as the SDK demands; any task of the same event loop may call.
    """

    def __init__(
        self,
        config: ServerConfig,
        connections: httpx2.AsyncBaseTransport | None,
        handshake: Handshake | None,
        on_change: ToolsChanged,
    ) -> None:
        self._config = config
        self._stdio = StdioTransport(config) if config.transport == "stdio" else None
        self._http = HttpTransport(config, connections) if connections and config.transport == "http" else None
        self._on_change = on_change
        self._client: Client | None = None
        self._exchanges: TaskGroup | None = None
        self._scope = anyio.CancelScope()
        self._is_started = False
        self._is_closing = False
        self._settled = anyio.Event()  # open, or failed to open
        self._failure: BaseException | None = None
        self._num_strikes = 0
        self._num_inflight = 0
        self._last_answer = 0.0
        self._has_listed_again = False
        # Over HTTP, only the legacy protocol has sessions that a trajectory could have to itself.
        needs_legacy = config.isolation == "exclusive" and config.transport == "http"
        self.handshake = handshake or Handshake("legacy" if needs_legacy else config.protocol)
        self.tools: tuple[types.Tool, ...] = ()  # when it was opened
        self.ended = anyio.Event()  # no more calls can be sent
        self.finished = anyio.Event()  # the connection is closed, too
        self.was_closed = False  # ended by `close`, not by the server or its silence
        self.has_answered = False
        self.is_unreachable = False  # ended because nothing listens there, or nothing that knows the session
        self.opened_at = 0.0  # by the event loop's clock
        self.num_abandoned = 0  # calls that were sent and not waited for

    @property
    def is_alive(self) -> bool:
        """Return whether calls can be sent."""
        has_ended = self.ended.is_set() or (self._stdio is not None and self._stdio.ended.is_set())
        return self._exchanges is not None and not has_ended

    @property
    def is_broken(self) -> bool:
        """Return whether it ended by itself, and not because the server went away."""
        return self.ended.is_set() and not self.was_closed and not self.is_unreachable

    @property
    def end_reason(self) -> str:
        """The reason why the session ended, with the exit code and error output of a process."""
        if self.was_closed:
            return f"The session with server {self._config.name!r} was closed."
        if self._stdio is not None and not self._stdio.ended.is_set():
            return f"The server {self._config.name!r} stopped responding."
        return self._config.redact(f"The server {self._config.name!r} ended the connection.{self._exit_details()}")

    async def open(self, tasks: TaskGroup, spawning: anyio.CapacityLimiter) -> None:
        """
        Connect and list the tools, in a task of `tasks`. Waiting for `spawning`, which limits how many processes start at
        once, does not count. Raises [`ToolServerError`] if the server does not open in time.
        """
        timeout = self._config.connect_timeout
        try:
            async with spawning if self._stdio is not None else nullcontext():
                deadline = anyio.current_time() + timeout
                tasks.start_soon(self._own)
                self._is_started = True
                with anyio.move_on_after(min(SPAWN_TIME, timeout)):
                    await self._settled.wait()
            with anyio.move_on_after(max(0.0, deadline - anyio.current_time())):
                await self._settled.wait()
        except BaseException:
            self._scope.cancel()  # its task cleans up by itself
            raise
        if self._exchanges is None:
            is_late = not self._settled.is_set()
            await self.close(force=True)
            raise ToolServerError(self._why_not_open(is_late))

    async def close(self, *, force: bool = False) -> None:
        """Disconnect, within a few seconds; `force` skips the orderly end. Calls in flight become server errors."""
        self.was_closed = self.was_closed or not self.ended.is_set()
        self._is_closing = True
        self.ended.set()
        if not self._is_started:
            return
        with anyio.CancelScope(shield=True):
            if not force and self._settled.is_set():
                with anyio.move_on_after(CLOSE_TIMEOUT):
                    await self.finished.wait()
            self._scope.cancel()
            with anyio.move_on_after(CLOSE_TIMEOUT):
                await self.finished.wait()
        if not self.finished.is_set():
            logger.warning("The server %r did not close its session in time.", self._config.name)

    async def call(
        self, name: str, arguments: Mapping[str, Any], timeout: float, meta: Mapping[str, Any] | None
    ) -> ToolResult:
        """Call a tool, sending `meta` as `_meta`. Raises only [`NotSentError`], and only if nothing was sent."""
        if not self.is_alive:
            raise NotSentError(f"The session with server {self._config.name!r} is over.")
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments), _meta=cast(Any, meta))
        request = types.CallToolRequest(params=params)
        start = time.monotonic()
        self._num_inflight += 1
        self.num_abandoned += 1
        try:
            if self._stdio is not None:
                # Writing to our own transport never blocks, so the SDK's deadline is exact, and so is its cancelling.
                outcome = await self._send(request, timeout)
            else:
                outcome = await self._send_apart(request, timeout)
        finally:
            self._num_inflight -= 1
        seconds = time.monotonic() - start
        if outcome is None or _is_timeout(outcome, seconds, timeout):
            return self._timed_out(timeout, seconds, since=start)
        self.num_abandoned -= 1
        result = self._as_result(name, outcome, seconds)
        if result is None:
            return await self._broken_off(seconds)
        self._note(result)
        return result

    def _note(self, result: ToolResult) -> None:
        if result.kind is not ResultKind.SERVER_ERROR:
            self._num_strikes, self._last_answer = 0, time.monotonic()
            return
        self._num_strikes += 1
        if self._http is not None and self._num_strikes >= MAX_STRIKES:
            self.is_unreachable = True  # it may have forgotten the session, and say so in words of its own
            self.ended.set()

    async def _send(self, request: types.CallToolRequest, timeout: float | None = None) -> _Outcome:
        assert self._client
        try:
            # Not `call_tool`: that checks results against the tool's output schema, and raises for a mismatch that the
            # policy could well have read.
            return await self._client.session.send_request(
                request, types.CallToolResult, request_read_timeout_seconds=timeout
            )
        except (
            Exception
        ) as error:  # returned to the caller: raised in a task it would end the session and all its calls
            return error

    async def _send_apart(self, request: types.CallToolRequest, timeout: float) -> _Outcome | None:
        """Send from a task of the session, so that the caller's deadline is exact; `None` if nothing came in time."""
        assert self._exchanges
        # When cancelled, the SDK may take seconds to tell an HTTP server, and a plain function of an in-process server
        # cannot be interrupted at all. The caller only waits for an event.
        done, scope = anyio.Event(), anyio.CancelScope()
        outcome: _Outcome | None = None

        async def run() -> None:
            nonlocal outcome
            try:
                with scope:
                    outcome = await self._send(request)
            finally:
                if self.ended.is_set() and outcome is None:
                    outcome = _CLOSED
                done.set()

        self._exchanges.start_soon(run)
        try:
            with anyio.move_on_after(timeout):
                await done.wait()
        finally:
            scope.cancel()
        return outcome

    def _timed_out(self, timeout: float, seconds: float, since: float) -> ToolResult:
        if self._last_answer < since:  # else only this call hangs
            self._num_strikes += 1
        is_stuck = self._stdio is not None and self._stdio.is_stuck
        is_silent = self._num_strikes >= MAX_STRIKES and self._config.transport != "in_process"
        if (is_stuck or is_silent) and not self.ended.is_set():
            # It would fail every trajectory from here on.
            logger.warning("The server %r stopped responding; its session is replaced.", self._config.name)
            self.ended.set()
        return self._result(f"The server did not answer within {timeout:g} s.", ResultKind.TIMEOUT, seconds)

    def _as_result(self, tool: str, outcome: _Outcome, seconds: float) -> ToolResult | None:
        """Return the result for the policy; `None` if the session ended first."""
        match outcome:
            case types.CallToolResult():
                self.has_answered = True
                return observed(outcome, config=self._config, tool=tool, seconds=seconds)
            case MCPError() if self._http is not None and is_unsent(outcome):
                # Nothing listens there. Opening the next session waits until something does.
                self.is_unreachable = True
                self.ended.set()
                text = f"The server {self._config.name!r} could not be reached: {outcome.message}"
                raise NotSentError(self._config.redact(text))
            case MCPError():
                kind, text = observed_error(outcome, self._config)
                self.has_answered = self.has_answered or kind is ResultKind.TOOL_ERROR
                return None if kind is None else self._result(text, kind, seconds)
            case ValueError():  # pydantic's: the reply is not what the protocol says
                text = f"The server {self._config.name!r} sent a reply that is not a tool result."
                logger.warning("%s %s", text, self._config.redact(str(outcome)))
                return self._result(text, ResultKind.SERVER_ERROR, seconds)
            case _:
                self.ended.set()
                text = f"The server {self._config.name!r} failed: {type(outcome).__name__}: {outcome}"
                return self._result(text, ResultKind.SERVER_ERROR, seconds)

    async def _broken_off(self, seconds: float) -> ToolResult:
        self.ended.set()
        with anyio.move_on_after(EXIT_TIMEOUT):  # output ends before the exit code and stderr come
            await self.finished.wait()
        return self._result(self.end_reason, ResultKind.SERVER_ERROR, seconds)

    def _result(self, text: str, kind: ResultKind, seconds: float) -> ToolResult:
        # Only likely secrets are hidden in what a tool said; our own messages hide every private value.
        hide = self._config.hide_secrets if kind is ResultKind.TOOL_ERROR else self._config.redact
        return ToolResult(text=hide(text), kind=kind, server=self._config.name, seconds=seconds)

    def _connect(self) -> AbstractAsyncContextManager[Client]:
        connection = self._stdio or self._http
        transport: Any = connection.connect() if connection else self._config.server
        transport = transport.connectable() if isinstance(transport, FunctionServer) else transport
        assert transport is not None
        return Client(
            transport,
            mode=self.handshake.mode,
            prior_discover=self.handshake.discovered,
            message_handler=self._on_message,
            cache=None,
        )

    async def _own(self) -> None:
        """Run the session: the SDK wants the task that opens a connection to close it."""
        try:
            with self._scope:
                async with self._connect() as client, anyio.create_task_group() as exchanges:
                    self.tools = await _list_tools(client, self._config)
                    self._check_isolation()
                    discovered = client.session.discover_result
                    self.handshake = Handshake(client.protocol_version if discovered else "legacy", discovered)
                    self._client, self._exchanges, self.opened_at = client, exchanges, anyio.current_time()
                    self._settled.set()
                    if self._stdio is not None:
                        exchanges.start_soon(self._watch, self._stdio)
                    await self.ended.wait()
                    await self._drain()
                    exchanges.cancel_scope.cancel()
        except Exception as error:  # for `open`; raised here it would take the other servers down
            self._failure = error
        finally:
            self.ended.set()
            self._exchanges = None
            self._settled.set()
            self.finished.set()

    async def _drain(self) -> None:
        """Wait for open calls: a server that takes no new connections, while it restarts, may still answer them."""
        if self.is_unreachable:
            with anyio.move_on_after(self._config.call_timeout):
                while self._num_inflight and not self._is_closing:
                    await anyio.sleep(0.05)

    async def _watch(self, stdio: StdioTransport) -> None:
        await stdio.ended.wait()
        self.ended.set()

    async def _on_message(self, message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification) and self._exchanges and not self._has_listed_again:
            self._has_listed_again = True  # once: some servers notify whenever they are asked for the list
            self._exchanges.start_soon(self._list_again)
        await anyio.lowlevel.checkpoint()

    async def _list_again(self) -> None:
        assert self._client
        with anyio.move_on_after(self._config.call_timeout), suppress(MCPError, ToolServerError, ValueError):
            tools = await _list_tools(self._client, self._config)
            self._on_change(tools)

    def _check_isolation(self) -> None:
        if self._config.isolation == "exclusive" and self._http is not None and not self._http.has_session:
            raise ToolServerError(
                f"The server {self._config.name!r} cannot give a trajectory a session of its own: over HTTP it has none (no "
                f"`Mcp-Session-Id`). Run it over stdio, or set its `isolation` to 'meta' if it keeps state by trajectory "
                f"id, or to 'shared' if it keeps none."
            )

    def _why_not_open(self, is_late: bool) -> str:
        if self._is_closing and not is_late and self._failure is None:
            return self.end_reason
        config, failure = self._config, _first_cause(self._failure)
        if isinstance(failure, ToolServerError):
            return str(failure)
        hints = start_hints(config, self._stdio.stderr_tail) if self._stdio is not None else []
        if is_late:
            reason = f"it did not answer within {config.connect_timeout:g} s"
            advice = "\n".join([*hints, "Raise `connect_timeout` if it needs longer to start."])
        elif self._stdio is not None and self._stdio.ended_by_itself:
            reason = "it ended before it answered"
            advice = "\n".join(hints) or "Run the command by hand to see why."
        else:
            reason = str(failure) if isinstance(failure, MCPError) else f"{type(failure).__name__}: {failure}"
            advice = "Check that it is an MCP server and that it is running."
        what = {"stdio": "command", "http": "address", "in_process": "object"}[config.transport]
        return config.redact(
            f"The server {config.name!r} could not be opened: {reason}. Its {what} is `{config.target}`."
            f"{self._exit_details()}\n{advice}"
        )

    def _exit_details(self) -> str:
        """Describe how a process ended: its exit code and the end of its error output."""
        if self._stdio is None:
            return ""
        code = f" Its exit code is {self._stdio.own_returncode}." if self._stdio.own_returncode is not None else ""
        tail = self._stdio.stderr_tail
        return code + (f" The end of its error output is:\n{tail}" if tail else " It wrote nothing to stderr.")


async def _list_tools(client: Client, config: ServerConfig) -> tuple[types.Tool, ...]:
    """List all pages, without secrets; refuse a listing that loops, never ends, or is too large."""
    tools: list[types.Tool] = []
    cursor, seen = None, set[str]()
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        cursor = page.next_cursor
        check_size(tools, config)
        if cursor is None:
            return tuple(map(config.without_secrets_in, tools))
        if cursor in seen:
            text = f"The server {config.name!r} lists its tools in a loop: page {cursor!r} comes twice."
            raise ToolServerError(f"{config.redact(text)} Report it to its authors.")
        seen.add(cursor)
    raise ToolServerError(
        f"The server {config.name!r} lists its tools on more than {MAX_PAGES} pages. Report it to its authors."
    )


def check_size(tools: Sequence[types.Tool], config: ServerConfig) -> None:
    """Refuse a listing that is too large."""
    if len(tools) > MAX_TOOLS:
        raise ToolServerError(
            f"The server {config.name!r} lists more than {MAX_TOOLS} tools. Have it offer fewer; no prompt holds so many."
        )
    if (
        sum(len(tool.description or "") + len(json.dumps(tool.input_schema)) for tool in tools)
        > config.max_result_bytes
    ):
        raise ToolServerError(
            f"The server {config.name!r} lists tools of more than {config.max_result_bytes} bytes. Have it offer fewer, "
            f"or raise `max_result_bytes`."
        )


def _is_timeout(outcome: _Outcome, seconds: float, timeout: float) -> bool:
    """Return whether the SDK's deadline passed; a server may use the same error code."""
    return isinstance(outcome, MCPError) and outcome.code == types.REQUEST_TIMEOUT and seconds >= timeout * 0.99


def _first_cause(error: BaseException | None) -> BaseException | None:
    """Return the first error in the nested groups that the SDK raises."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
