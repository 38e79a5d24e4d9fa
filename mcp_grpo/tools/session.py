"""One connection to one server: opened and closed by its own task, never raising for what a server does."""

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, cast

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup
from mcp import Client, MCPError

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.http import connect_http
from mcp_grpo.tools.observation import observed, observed_error
from mcp_grpo.tools.stdio import StdioTransport
from mcp_grpo.types import ResultKind, ToolResult


logger = logging.getLogger(__name__)

MAX_PAGES = 100  # of a tool listing
CLOSE_TIMEOUT = 5.0  # for an orderly end, and once more for a forced one
LAST_WORDS_TIMEOUT = 1.0
MAX_SILENT_TIMEOUTS = 3  # deadlines missed in a row, with no reply to any call in between


class SessionEndedError(ToolServerError):
    """The session was over before the call was sent, so that another session may safely be given it."""


@dataclass(slots=True)
class _Exchange:
    """One request under way."""

    request: types.CallToolRequest
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    done: anyio.Event = field(default_factory=anyio.Event)
    outcome: types.CallToolResult | Exception | None = None


class Session:
    """
    A connection to a server.

    A task of its own opens and closes the connection, as the SDK demands; any task of the same event loop may call.

    Args:
        config ([`ServerConfig`]):
            The server.
        connections (`httpx2.AsyncBaseTransport`, *optional*):
            Connections to use, for an HTTP server.
    """

    def __init__(self, config: ServerConfig, connections: httpx2.AsyncBaseTransport | None = None) -> None:
        self._config = config
        self._connections = connections
        self._stdio = StdioTransport(config) if config.transport == "stdio" else None
        self._gate = anyio.CapacityLimiter(config.max_inflight)
        self._client: Client | None = None
        self._exchanges: TaskGroup | None = None
        self._scope = anyio.CancelScope()
        self._settled = anyio.Event()  # open, or failed to open
        self._stopping = anyio.Event()
        self._finished = anyio.Event()
        self._failure: BaseException | None = None
        self._num_silent_timeouts = 0
        self.tools: tuple[types.Tool, ...] = ()
        """What the server offered when the session was opened."""

    @property
    def is_alive(self) -> bool:
        """Whether a call can be sent."""
        has_ended = self._stdio is not None and self._stdio.is_ended
        return self._exchanges is not None and not self._stopping.is_set() and not has_ended

    async def open(self, tasks: TaskGroup) -> None:
        """
        Connect and list the tools. Raises [`ToolServerError`] if that cannot be done in time.

        Args:
            tasks (`TaskGroup`):
                Where the session's own task runs. It must outlive the session.
        """
        tasks.start_soon(self._own)
        try:
            with anyio.move_on_after(self._config.connect_timeout):
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
        self._stopping.set()
        with anyio.CancelScope(shield=True):
            if not force:
                with anyio.move_on_after(CLOSE_TIMEOUT):
                    await self._finished.wait()
            self._scope.cancel()
            with anyio.move_on_after(CLOSE_TIMEOUT):
                await self._finished.wait()
        if not self._finished.is_set():
            logger.warning("The server %r did not let go of its session in time.", self._config.name)

    async def call(self, name: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        """
        Call a tool.

        Args:
            name (`str`):
                Name of the tool on the server.
            arguments (`Mapping[str, Any]`):
                Its arguments.
            timeout (`float`):
                Deadline in seconds, from the moment the call is sent.

        Returns:
            [`ToolResult`]: Whatever became of it. Raises only [`SessionEndedError`], and only if nothing was sent.
        """
        async with self._gate:
            if not self.is_alive or self._exchanges is None:
                raise SessionEndedError(f"The session with server {self._config.name!r} is over.")
            params = types.CallToolRequestParams(name=name, arguments=dict(arguments))
            exchange = _Exchange(types.CallToolRequest(params=params))
            start = anyio.current_time()
            # In a task of the session, not of the caller: when cancelled, the SDK may wait seconds to say so to the
            # server, and a plain function of an in-process server cannot be interrupted at all. The caller only waits
            # for an event, so its deadline holds to the letter.
            self._exchanges.start_soon(self._run, exchange)
            try:
                with anyio.move_on_after(timeout):
                    await exchange.done.wait()
            finally:
                exchange.scope.cancel()
            seconds = anyio.current_time() - start
        if not exchange.done.is_set():
            return self._timed_out(timeout, seconds)
        self._num_silent_timeouts = 0
        result = self._as_result(exchange.outcome, seconds)
        return result if result is not None else await self._ended(seconds)

    async def _run(self, exchange: _Exchange) -> None:
        assert self._client
        try:
            with exchange.scope:
                # Not `call_tool`: that checks results against the tool's output schema, and raises for a mismatch that
                # the policy could well have read.
                exchange.outcome = await self._client.session.send_request(exchange.request, types.CallToolResult)
        except Exception as error:  # belongs to the caller; raised here it would end the session and all its calls
            exchange.outcome = error
        finally:
            exchange.done.set()

    def _timed_out(self, timeout: float, seconds: float) -> ToolResult:
        self._num_silent_timeouts += 1
        is_mute = self._num_silent_timeouts >= MAX_SILENT_TIMEOUTS
        if self._stdio is not None and (is_mute or self._stdio.is_stuck):
            # A process that reads nothing, or says nothing, would fail every trajectory from here on.
            logger.warning("The server %r does not react any more; the next call starts it anew.", self._config.name)
            self._stopping.set()
        return self._result(f"The server did not answer within {timeout:g} s.", ResultKind.TIMEOUT, seconds)

    def _as_result(self, outcome: types.CallToolResult | Exception | None, seconds: float) -> ToolResult | None:
        """What the outcome is to the policy; `None` if the session ended first."""
        match outcome:
            case types.CallToolResult():
                return observed(outcome, server=self._config.name, seconds=seconds)
            case MCPError():
                kind, text = observed_error(outcome, self._config)
                return None if kind is None else self._result(text, kind, seconds)
            case None:
                return None
            case ValueError():  # pydantic's: the reply is not what the protocol says
                text = f"The server {self._config.name!r} answered with something that is not a tool result."
                logger.warning("%s %s", text, outcome)
                return self._result(text, ResultKind.SERVER_ERROR, seconds)
            case _:
                self._stopping.set()
                text = f"The server {self._config.name!r} failed: {type(outcome).__name__}: {outcome}"
                return self._result(text, ResultKind.SERVER_ERROR, seconds)

    async def _ended(self, seconds: float) -> ToolResult:
        self._stopping.set()
        with anyio.move_on_after(LAST_WORDS_TIMEOUT):  # the end of the output comes before the exit code and stderr
            await self._finished.wait()
        text = f"The server {self._config.name!r} ended the connection during the call.{self._last_words()}"
        return self._result(text, ResultKind.SERVER_ERROR, seconds)

    def _result(self, text: str, kind: ResultKind, seconds: float) -> ToolResult:
        return ToolResult(text=self._config.redact(text), kind=kind, server=self._config.name, seconds=seconds)

    def _connect(self) -> AbstractAsyncContextManager[Client]:
        config = self._config
        if self._stdio is not None:
            return Client(self._stdio.connect(), mode=config.protocol, cache=None)
        if config.transport == "http":
            assert self._connections is not None
            return Client(connect_http(config, self._connections), mode=config.protocol, cache=None)
        assert config.server is not None
        return Client(config.server, mode=config.protocol, cache=None)

    async def _own(self) -> None:
        """The session's own task: what is opened here is closed here."""
        try:
            with self._scope:
                async with self._connect() as client, anyio.create_task_group() as exchanges:
                    self.tools = await _list_tools(client, self._config.name)
                    self._client, self._exchanges = client, exchanges
                    self._settled.set()
                    await self._stopping.wait()
                    exchanges.cancel_scope.cancel()
        except Exception as error:  # kept for `open`; raised here it would take the other servers' sessions down
            self._failure = error
        finally:
            self._stopping.set()
            self._exchanges = None
            self._settled.set()
            self._finished.set()

    def _why_not_open(self, is_late: bool) -> str:
        config, failure = self._config, _first_cause(self._failure)
        if isinstance(failure, ToolServerError):
            return str(failure)
        if is_late:
            reason = f"it did not answer within {config.connect_timeout:g} s"
            advice = "Raise `connect_timeout` if it needs longer to start."
        elif self._stdio is not None and self._stdio.ended_by_itself:
            reason = "it ended before it answered"
            advice = "Run the command by hand to see why."
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


def _first_cause(error: BaseException | None) -> BaseException | None:
    """The first error in nested groups, which is what the SDK raises."""
    while isinstance(error, BaseExceptionGroup):
        error = cast("BaseExceptionGroup[BaseException]", error).exceptions[0]
    return error
