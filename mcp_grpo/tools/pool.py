"""The open servers of a run, and one trajectory's use of them."""

import itertools
import json
import logging
import os
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import CatalogError, ToolServerError
from mcp_grpo.tools.cassette import Cassette
from mcp_grpo.tools.catalog import Catalog, Tool
from mcp_grpo.tools.http import shared_connections
from mcp_grpo.tools.isolation import open_server
from mcp_grpo.tools.loading import Servers, load_servers
from mcp_grpo.tools.names import MAX_NAME_LENGTH, nearest_first
from mcp_grpo.tools.observation import with_repairs
from mcp_grpo.tools.seat import Seat
from mcp_grpo.tools.server import OpenServer
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


logger = logging.getLogger(__name__)

MAX_SHOWN = 100  # characters of a state that is none, in a message


class ToolPool:
    """
    The open servers of a run.

    An async context manager: it opens all servers on the way in, and leaves no process and no task behind on the way
    out. Enter and leave it in the same task; any task of that event loop may call.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `Sequence[ServerConfig]`, *optional*):
            What [`load_servers`] takes. Only a cassette that answers by itself can do without.
        cassette ([`Cassette`], *optional*):
            Records the calls, or answers them.

    Example:

    ```python
    async with ToolPool("servers.json") as pool:
        async with pool.lease(task) as lease:
            results = await lease.call_all([ToolCall(name="get_current_time", arguments={"timezone": "UTC"})])
    ```
    """

    def __init__(self, servers: Servers | None, cassette: Cassette | None = None) -> None:
        self._cassette = cassette
        self._is_replayed = cassette is not None and not cassette.needs_servers
        self.configs = () if servers is None and self._is_replayed else load_servers(servers or {})
        self._num_leases: Counter[str] = Counter()  # by task, for the recording
        self._catalog: Catalog | None = None
        self._state_tools: Mapping[str, Tool] = {}
        self._servers: dict[str, OpenServer] = {}
        self._tasks: TaskGroup | None = None
        self._connections: httpx2.AsyncHTTPTransport | None = None

    @property
    def catalog(self) -> Catalog:
        """All tools, as they were when the pool was opened."""
        if self._catalog is None:
            raise RuntimeError("The pool is not open. Use it inside `async with`.")
        return self._catalog

    @property
    def state_servers(self) -> tuple[str, ...]:
        """The servers that say what a trajectory has left behind, by their `state_tool`."""
        return tuple(self._state_tools)

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("A pool is opened once. Make a new `ToolPool`.")
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            if self._cassette is not None and self._is_replayed:
                listed, state_tools = self._cassette.listed, self._cassette.state_tools
            else:
                listed = await self._open_all(self._tasks)
                state_tools = {config.name: config.state_tool for config in self.configs if config.state_tool}
            self._state_tools = {server: _state_tool(server, name) for server, name in state_tools.items()}
            self._catalog = Catalog.from_servers(listed, self.configs)
            if self._cassette is not None:
                self._cassette.open(listed, self.configs, self._catalog.hash)
        except BaseException:
            await self._close_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close_all()

    async def call(self, call: ToolCall) -> ToolResult:
        """
        Call any tool, as a trajectory of its own. Use [`lease`] for calls that belong together.

        Args:
            call ([`ToolCall`]):
                What to call.

        Returns:
            [`ToolResult`]: What came back; its `kind` says whose doing a failure is.
        """
        servers = {tool.server for tool in self.catalog.tools if tool.name == call.name}
        try:
            async with self._seats(servers, "") as seats:
                return await Lease(self.catalog.tools, seats).call(call)
        except ToolServerError as error:
            return _failed(error, next(iter(servers), None))

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncGenerator["Lease", None]:
        """
        One trajectory's use of the pool. Where a server has sessions to lend, this waits for one; leaving gives it back.

        Args:
            task ([`Task`]):
                The task of the trajectory. Raises [`CatalogError`] if it names a server or tool that does not exist, and
                [`ToolServerError`] if a server that lends sessions has none and cannot start any.

        Yields:
            [`Lease`]: What the trajectory may call.
        """
        tools = self.catalog.tools_for(task)
        async with self._seats({tool.server for tool in tools}, task.task_id) as seats:
            yield Lease(tools, seats, self._state_tools)

    @asynccontextmanager
    async def _seats(self, servers: Collection[str], task_id: str) -> AsyncGenerator[dict[str, Seat], None]:
        """A seat at each server. Always in the same order, or two trajectories could wait for each other."""
        trajectory_id = uuid.uuid4().hex
        attempt, calls = self._num_leases[task_id], itertools.count()
        self._num_leases[task_id] += 1
        seats: dict[str, Seat] = {}
        async with AsyncExitStack() as stack:
            for name in self.catalog.servers:
                if name not in servers:
                    continue
                seat = None
                if not self._is_replayed:
                    seat = await stack.enter_async_context(self._servers[name].seat(trajectory_id))
                if self._cassette is not None:
                    seat = self._cassette.seat(name, seat, task_id, attempt, calls)
                assert seat is not None
                seats[name] = seat
            yield seats

    async def _open_all(self, tasks: TaskGroup) -> dict[str, tuple[types.Tool, ...]]:
        if any(config.transport == "http" for config in self.configs):
            self._connections = shared_connections()
        spawning = anyio.CapacityLimiter(os.cpu_count() or 1)  # starting a server is CPU work
        listed: dict[str, tuple[types.Tool, ...]] = {}
        failures: dict[str, ToolServerError | CatalogError] = {}

        async def open_one(server: OpenServer) -> None:
            try:
                listed[server.config.name] = await server.open()
            except (ToolServerError, CatalogError) as error:
                failures[server.config.name] = error

        for config in self.configs:
            self._servers[config.name] = open_server(config, tasks, spawning, self._connections)
        async with anyio.create_task_group() as opening:
            for server in self._servers.values():
                opening.start_soon(open_one, server)
        if len(failures) == 1:
            raise next(iter(failures.values()))
        if failures:
            reasons = [str(failures[config.name]) for config in self.configs if config.name in failures]
            raise ToolServerError(
                f"{len(failures)} of {len(self.configs)} servers could not be opened.\n\n" + "\n\n".join(reasons)
            )
        return {config.name: listed[config.name] for config in self.configs}

    async def _close_all(self) -> None:
        assert self._tasks
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as closing:
                for server in self._servers.values():
                    closing.start_soon(server.close)
            if self._connections is not None:
                await self._connections.aclose()
            if self._cassette is not None:
                self._cassette.close()
        # What sessions are left by now is not orderly any more. The error that may be under way is not passed on: the
        # task group would wrap it into an exception group.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


class Lease:
    """
    One trajectory's use of a pool.

    Args:
        tools (`tuple[Tool, ...]`):
            The only tools the trajectory may call.
        seats (`Mapping[str, Seat]`):
            Where calls go, for each server of these tools.
        state_tools (`Mapping[str, Tool]`, *optional*):
            By the names of servers, the tool that says what the trajectory has left behind there.
    """

    def __init__(
        self, tools: tuple[Tool, ...], seats: Mapping[str, Seat], state_tools: Mapping[str, Tool] | None = None
    ) -> None:
        self.tools = tools
        self._by_name = {tool.name: tool for tool in tools}
        self._seats = seats
        self._state_tools = state_tools or {}

    async def call(self, call: ToolCall) -> ToolResult:
        """
        Call one tool. Whatever goes wrong with the call, the tool or the server is a result, never an exception.

        Args:
            call ([`ToolCall`]):
                What the policy asked for.

        Returns:
            [`ToolResult`]: What came back; its `kind` says whose doing a failure is.
        """
        tool = self._by_name.get(call.name)
        if tool is None:
            name = str(call.name)[:MAX_NAME_LENGTH]
            text = f"There is no tool `{name}`. The tools are: {nearest_first(name, self._by_name)}."
            return ToolResult(text=text, kind=ResultKind.UNKNOWN_TOOL)
        arguments: Any = call.arguments
        if not isinstance(arguments, Mapping):
            text = f"the arguments must be an object, got {type(arguments).__name__}; {tool.usage}"
            return ToolResult(text=text, kind=ResultKind.INVALID_ARGUMENTS, server=tool.server)
        return await _caught(tool, self._call(tool, call.arguments))

    async def _call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        prepared = tool.prepare(arguments)
        if prepared.refusal is not None:
            return ToolResult(text=prepared.refusal, kind=ResultKind.INVALID_ARGUMENTS, server=tool.server)
        result = await self._seats[tool.server].call(tool, prepared.arguments)
        return with_repairs(result, prepared.repairs)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """
        Run the calls of one turn at the same time.

        Args:
            calls (`Sequence[ToolCall]`):
                What the policy asked for.

        Returns:
            `list[ToolResult]`: One result per call, in the order of the calls.
        """
        if len(calls) == 1:
            return [await self.call(calls[0])]
        results: dict[int, ToolResult] = {}

        async def run(index: int, call: ToolCall) -> None:
            results[index] = await self.call(call)

        async with anyio.create_task_group() as tasks:
            for index, call in enumerate(calls):
                tasks.start_soon(run, index, call)
        return [results[index] for index in range(len(calls))]

    async def states(self) -> dict[str, Any]:
        """
        Ask what the trajectory has left behind. To be called once, when it has ended.

        Returns:
            `dict[str, Any]`: What each server with a `state_tool` says, by the server's name. Raises [`ToolServerError`]
            if one of them does not say it, or not in JSON.
        """
        states: dict[str, Any] = {}
        for server, seat in self._seats.items():
            if (tool := self._state_tools.get(server)) is not None:
                states[server] = _state(tool, await _caught(tool, seat.call(tool, {})))
        return states


async def _caught(tool: Tool, answer: Awaitable[ToolResult]) -> ToolResult:
    try:
        return await answer
    except ToolServerError as error:
        return _failed(error, tool.server)
    except Exception as error:  # a bug of ours, or of a library; it must not take the other trajectories down
        logger.exception("Calling %r failed in a way that was not foreseen.", tool.name)
        return _failed(ToolServerError(f"{type(error).__name__}: {error}"), tool.server)


def _state_tool(server: str, name: str) -> Tool:
    return Tool(
        name=name,
        server=server,
        tool=name,
        description="",
        input_schema={"type": "object"},
        is_read_only=True,
        is_repeatable=True,
    )


def _state(tool: Tool, result: ToolResult) -> Any:
    failed = f"The `state_tool` {tool.tool!r} of server {tool.server!r}"
    if result.is_error:
        raise ToolServerError(f"{failed} failed: {result.text}")
    try:
        return json.loads(result.text)
    except ValueError as error:
        raise ToolServerError(
            f"{failed} must answer with JSON, got {result.text[:MAX_SHOWN]!r}: {error}. Mend the server, or name another "
            f"tool."
        ) from error


def _failed(error: ToolServerError, server: str | None) -> ToolResult:
    logger.debug("%s", error)  # what broke was reported where it broke; this is once more for each call
    return ToolResult(text=str(error), kind=ResultKind.SERVER_ERROR, server=server)
