"""One connection to one server: opened and closed by its own task, never raising for what a server does."""

import logging
import time
from collections.abc import Callable, Mapping
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
from mcp_grpo.tools.hints import start_hints
from mcp_grpo.tools.http import HttpTransport, is_unsent
from mcp_grpo.tools.observation import observed, observed_error
from mcp_grpo.tools.stdio import StdioTransport
from mcp_grpo.types import ResultKind, ToolResult


logger = logging.getLogger(__name__)

MAX_PAGES = 100  # of a tool listing
CLOSE_TIMEOUT = 5.0  # for an orderly end, and once more for a forced one
LAST_WORDS_TIMEOUT = 0.5
SPAWN_TIME = 10.0  # seconds of CPU work that starting may take before the next server may start, too
MAX_STRIKES = 3  # deadlines missed in a row, with no reply to any call in between

ToolsChanged = Callable[[tuple[types.Tool, ...]], None]


class NotSentError(ToolServerError):
    """The call was not sent, so that another session may safely be given it."""


@dataclass(frozen=True, slots=True)
class Handshake:
    """What a first session found out about a server, which spares later ones the probe for its protocol."""

    mode: str
    discovered: types.DiscoverResult | None = None


@dataclass(slots=True)
class _Exchange:
    """One request under way; it has no outcome yet, or none in time."""

    request: types.CallToolRequest
    outcome: types.CallToolResult | Exception | None = None


_CLOSED = MCPError(code=types.CONNECTION_CLOSED, message="Connection closed")


class Session:
    """
    A connection to a server.

    A task of its own opens and closes the connection, as the SDK demands; any task of the same event loop may call.

    Args:
        config ([`ServerConfig`]):
            The server.
        connections (`httpx2.AsyncBaseTransport`, *optional*):
            Connections to use, for an HTTP server.
        handshake ([`Handshake`], *optional*):
            That of an earlier session with the same server.
        on_change (`Callable`, *optional*):
            Called with the new list when the server says that its tools have changed.
    """

    def __init__(
        self,
        config: ServerConfig,
        connections: httpx2.AsyncBaseTransport | None = None,
        handshake: Handshake | None = None,
        on_change: ToolsChanged | None = None,
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
        self.handshake = handshake or Handshake(_first_mode(config))
        """What the session knows about the server's protocol."""
        self.tools: tuple[types.Tool, ...] = ()
        """What the server offered when the session was opened."""
        self.ended = anyio.Event()
        """Set when no more calls can be sent."""
        self.finished = anyio.Event()
        """Set when the connection is closed, too."""
        self.was_closed = False
        """Whether it was ended by [`close`], and not by the server or by its silence."""
        self.has_answered = False
        """Whether the server has answered a call."""
        self.is_unreachable = False
        """Whether it ended because nothing listens there any more, or nothing that knows the session."""
        self.opened_at = 0.0
        """When it was opened, by the event loop's clock."""
        self.num_abandoned = 0
        """How many calls were sent and not waited for until they were answered."""

    @property
    def is_alive(self) -> bool:
        """Whether a call can be sent."""
        has_ended = self.ended.is_set() or (self._stdio is not None and self._stdio.ended.is_set())
        return self._exchanges is not None and not has_ended

    @property
    def is_broken(self) -> bool:
        """Whether it ended, and not because we closed it."""
        return self.ended.is_set() and not self.was_closed and not self.is_unreachable

    @property
    def obituary(self) -> str:
        """How the session ended, with the end of the error output of a process that did."""
        if self.was_closed:
            return f"The session with server {self._config.name!r} was closed."
        if self._stdio is not None and not self._stdio.ended.is_set():
            return f"The server {self._config.name!r} did not react any more."
        return self._config.redact(f"The server {self._config.name!r} ended the connection.{self._last_words()}")

    async def open(self, tasks: TaskGroup, spawning: anyio.CapacityLimiter | None = None) -> None:
        """
        Connect and list the tools. Raises [`ToolServerError`] if that cannot be done in time.

        Args:
            tasks (`TaskGroup`):
                Where the session's own task runs. It must outlive the session.
            spawning (`CapacityLimiter`, *optional*):
                Limits how many processes are started at a time. Waiting for it does not count.
        """
        timeout = self._config.connect_timeout
        try:
            async with spawning if spawning is not None and self._stdio is not None else nullcontext():
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
        """
        Disconnect. Calls in flight come back as server errors. Returns within a few seconds, whatever happens.

        Args:
            force (`bool`, *optional*, defaults to `False`):
                Whether to skip the orderly end.
        """
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
            logger.warning("The server %r did not let go of its session in time.", self._config.name)

    async def call(
        self, name: str, arguments: Mapping[str, Any], timeout: float, meta: Mapping[str, Any] | None = None
    ) -> ToolResult:
        """
        Call a tool.

        Args:
            name (`str`):
                Name of the tool on the server.
            arguments (`Mapping[str, Any]`):
                Its arguments.
            timeout (`float`):
                Deadline in seconds.
            meta (`Mapping[str, Any]`, *optional*):
                Sent along as `_meta`, which tools can read and the policy does not see.

        Returns:
            [`ToolResult`]: Whatever became of it. Raises only [`NotSentError`], and only if nothing was sent.
        """
        if not self.is_alive:
            raise NotSentError(f"The session with server {self._config.name!r} is over.")
        params = types.CallToolRequestParams(name=name, arguments=dict(arguments), _meta=cast(Any, meta))
        exchange = _Exchange(types.CallToolRequest(params=params))
        start = time.monotonic()
        self._num_inflight += 1
        self.num_abandoned += 1
        try:
            if self._stdio is not None:
                # Writing to our own transport never blocks, so that the SDK's clock is exact, and so is its cancelling.
                await self._run(exchange, timeout)
            else:
                await self._run_apart(exchange, timeout)
        finally:
            self._num_inflight -= 1
        seconds = time.monotonic() - start
        if exchange.outcome is None or _is_timeout(exchange.outcome, seconds, timeout):
            return self._timed_out(timeout, seconds, since=start)
        self.num_abandoned -= 1
        result = self._as_result(name, exchange.outcome, seconds)
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

    async def _run(self, exchange: _Exchange, timeout: float | None = None) -> None:
        assert self._client
        try:
            # Not `call_tool`: that checks results against the tool's output schema, and raises for a mismatch that the
            # policy could well have read.
            exchange.outcome = await self._client.session.send_request(
                exchange.request, types.CallToolResult, request_read_timeout_seconds=timeout
            )
        except (
            Exception
        ) as error:  # belongs to the caller; raised in a task it would end the session and all its calls
            exchange.outcome = error

    async def _run_apart(self, exchange: _Exchange, timeout: float) -> None:
        """Run in a task of the session, so that the caller's deadline holds to the letter."""
        assert self._exchanges
        # When cancelled, the SDK may wait seconds to say so to an HTTP server, and a plain function of an in-process
        # server cannot be interrupted at all. The caller only waits for an event.
        done, scope = anyio.Event(), anyio.CancelScope()

        async def run() -> None:
            try:
                with scope:
                    await self._run(exchange)
            finally:
                if self.ended.is_set() and exchange.outcome is None:
                    exchange.outcome = _CLOSED
                done.set()

        self._exchanges.start_soon(run)
        try:
            with anyio.move_on_after(timeout):
                await done.wait()
        finally:
            scope.cancel()

    def _timed_out(self, timeout: float, seconds: float, since: float) -> ToolResult:
        if self._last_answer < since:  # or it is only this call that hangs
            self._num_strikes += 1
        is_stuck = self._stdio is not None and self._stdio.is_stuck
        is_silent = self._num_strikes >= MAX_STRIKES and self._config.transport != "in_process"
        if (is_stuck or is_silent) and not self.ended.is_set():
            # A server that reads nothing, or says nothing, would fail every trajectory from here on.
            logger.warning("The server %r does not react any more; its session is replaced.", self._config.name)
            self.ended.set()
        return self._result(f"The server did not answer within {timeout:g} s.", ResultKind.TIMEOUT, seconds)

    def _as_result(self, tool: str, outcome: types.CallToolResult | Exception, seconds: float) -> ToolResult | None:
        """What the outcome is to the policy; `None` if the session ended first."""
        match outcome:
            case types.CallToolResult():
                self.has_answered = True
                return observed(outcome, config=self._config, tool=tool, seconds=seconds)
            case MCPError() if self._http is not None and is_unsent(outcome):
                # Nothing listens there any more. Whoever opens the next session waits until something does.
                self.is_unreachable = True
                self.ended.set()
                raise NotSentError(f"The server {self._config.name!r} could not be reached: {outcome.message}")
            case MCPError():
                kind, text = observed_error(outcome, self._config)
                self.has_answered = self.has_answered or kind is ResultKind.TOOL_ERROR
                return None if kind is None else self._result(text, kind, seconds)
            case ValueError():  # pydantic's: the reply is not what the protocol says
                text = f"The server {self._config.name!r} answered with something that is not a tool result."
                logger.warning("%s %s", text, self._config.redact(str(outcome)))
                return self._result(text, ResultKind.SERVER_ERROR, seconds)
            case _:
                self.ended.set()
                text = f"The server {self._config.name!r} failed: {type(outcome).__name__}: {outcome}"
                return self._result(text, ResultKind.SERVER_ERROR, seconds)

    async def _broken_off(self, seconds: float) -> ToolResult:
        self.ended.set()
        with anyio.move_on_after(LAST_WORDS_TIMEOUT):  # the end of the output comes before the exit code and stderr
            await self.finished.wait()
        return self._result(self.obituary, ResultKind.SERVER_ERROR, seconds)

    def _result(self, text: str, kind: ResultKind, seconds: float) -> ToolResult:
        # What the policy reads is ordinary text, and hides only what is plainly secret; the rest is for logs.
        hide = self._config.hide_secrets if kind is ResultKind.TOOL_ERROR else self._config.redact
        return ToolResult(text=hide(text), kind=kind, server=self._config.name, seconds=seconds)

    def _connect(self) -> AbstractAsyncContextManager[Client]:
        transport = (
            self._stdio.connect() if self._stdio else self._http.connect() if self._http else self._config.server
        )
        assert transport is not None
        return Client(
            transport,
            mode=self.handshake.mode,
            prior_discover=self.handshake.discovered,
            message_handler=self._on_message,
            cache=None,
        )

    async def _own(self) -> None:
        """The session's own task: what is opened here is closed here."""
        try:
            with self._scope:
                async with self._connect() as client, anyio.create_task_group() as exchanges:
                    self.tools = await _list_tools(client, self._config.name)
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
        except Exception as error:  # kept for `open`; raised here it would take the other servers' sessions down
            self._failure = error
        finally:
            self.ended.set()
            self._exchanges = None
            self._settled.set()
            self.finished.set()

    async def _drain(self) -> None:
        """A server that takes no more connections, as one that is being restarted, may still answer what it was asked."""
        if self.is_unreachable:
            with anyio.move_on_after(self._config.call_timeout):
                while self._num_inflight and not self._is_closing:
                    await anyio.sleep(0.05)

    async def _watch(self, stdio: StdioTransport) -> None:
        await stdio.ended.wait()
        self.ended.set()

    async def _on_message(self, message: object) -> None:
        if isinstance(message, types.ToolListChangedNotification) and self._exchanges and not self._has_listed_again:
            self._has_listed_again = True  # once: some servers say so whenever they are asked for the list
            self._exchanges.start_soon(self._list_again)
        await anyio.lowlevel.checkpoint()

    async def _list_again(self) -> None:
        assert self._client
        with anyio.move_on_after(self._config.call_timeout), suppress(MCPError, ToolServerError, ValueError):
            tools = await _list_tools(self._client, self._config.name)
            if self._on_change is not None:
                self._on_change(tools)

    def _check_isolation(self) -> None:
        if self._config.isolation == "exclusive" and self._http is not None and not self._http.has_session:
            raise ToolServerError(
                f"The server {self._config.name!r} cannot give a trajectory a session to itself: over HTTP it keeps none (no "
                f"`Mcp-Session-Id`). Run it over stdio, or set its `isolation` to 'meta' if it keeps state by trajectory "
                f"id, or to 'shared' if it keeps none."
            )

    def _why_not_open(self, is_late: bool) -> str:
        if self._is_closing and not is_late and self._failure is None:
            return self.obituary
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
            f"{self._last_words()}\n{advice}"
        )

    def _last_words(self) -> str:
        """The exit code and the end of the error output of a stdio server that has ended."""
        if self._stdio is None:
            return ""
        code = f" Its exit code is {self._stdio.own_returncode}." if self._stdio.own_returncode is not None else ""
        tail = self._stdio.stderr_tail
        return code + (f" The end of its error output is:\n{tail}" if tail else " It wrote nothing to stderr.")


async def _list_tools(client: Client, server: str) -> tuple[types.Tool, ...]:
    """All pages of the listing. A listing that goes in circles, or on for ever, is refused."""
    tools: list[types.Tool] = []
    cursor, seen = None, set[str]()
    for _ in range(MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools.extend(page.tools)
        cursor = page.next_cursor
        if cursor is None:
            return tuple(tools)
        if cursor in seen:
            raise ToolServerError(
                f"The server {server!r} lists its tools in circles: page {cursor!r} comes twice. Report it to its makers."
            )
        seen.add(cursor)
    raise ToolServerError(
        f"The server {server!r} lists its tools on more than {MAX_PAGES} pages. Report it to its makers."
    )


def _first_mode(config: ServerConfig) -> str:
    """Over HTTP, only the older protocol has sessions that a trajectory could have to itself."""
    return "legacy" if config.isolation == "exclusive" and config.transport == "http" else config.protocol


def _is_timeout(outcome: types.CallToolResult | Exception, seconds: float, timeout: float) -> bool:
    """Whether it was the SDK's clock, and not a server that happens to use the same code."""
    return isinstance(outcome, MCPError) and outcome.code == types.REQUEST_TIMEOUT and seconds >= timeout * 0.99


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The first error in nested groups, which is what the SDK raises."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
