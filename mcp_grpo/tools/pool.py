"""The open servers of a run, and one trajectory's use of them."""

import logging
import os
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import CatalogError, ToolServerError, boundary
from mcp_grpo.tools.catalog import Catalog, Tool, nearest_first
from mcp_grpo.tools.http import shared_connections
from mcp_grpo.tools.loading import Servers, load_servers
from mcp_grpo.tools.server import OpenServer
from mcp_grpo.types import ResultKind, Task, ToolCall, ToolResult


logger = logging.getLogger(__name__)


class ToolPool:
    """
    The open servers of a run.

    An async context manager: it opens all servers on the way in, and leaves no process and no task behind on the way
    out. Enter and leave it in the same task; any task of that event loop may call.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `Sequence[ServerConfig]`):
            What [`load_servers`] takes.

    Example:

    ```python
    async with ToolPool("servers.json") as pool:
        async with pool.lease(task) as lease:
            results = await lease.call_all([ToolCall(name="get_current_time", arguments={"timezone": "UTC"})])
    ```
    """

    def __init__(self, servers: Servers) -> None:
        self.configs = load_servers(servers)
        self._catalog: Catalog | None = None
        self._servers: dict[str, OpenServer] = {}
        self._tasks: TaskGroup | None = None
        self._connections: httpx2.AsyncHTTPTransport | None = None

    @property
    def catalog(self) -> Catalog:
        """All tools, as they were when the pool was opened."""
        if self._catalog is None:
            raise RuntimeError("The pool is not open. Use it inside `async with`.")
        return self._catalog

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("A pool is opened once. Make a new `ToolPool`.")
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            self._catalog = Catalog.from_servers(await self._open_all(self._tasks))
        except BaseException:
            await self._close_all()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._close_all()

    async def call(self, call: ToolCall, *, tools: Sequence[Tool] | None = None) -> ToolResult:
        """
        Call a tool. Whatever goes wrong with the call, the tool or the server is a result, never an exception.

        Args:
            call ([`ToolCall`]):
                What the policy asked for.
            tools (`Sequence[Tool]`, *optional*):
                The only tools that may be called. `None` stands for all.

        Returns:
            [`ToolResult`]: What came back; its `kind` says whose doing a failure is.
        """
        tools = self.catalog.tools if tools is None else tools
        tool = next((tool for tool in tools if tool.name == call.name), None)
        if tool is None:
            names = nearest_first(str(call.name), [tool.name for tool in tools])
            return ToolResult(
                text=f"There is no tool `{call.name}`. The tools are: {names}.", kind=ResultKind.UNKNOWN_TOOL
            )
        arguments: Any = call.arguments
        if not isinstance(arguments, Mapping):
            text = f"the arguments must be an object, got {type(arguments).__name__}; {tool.usage}"
            return ToolResult(text=text, kind=ResultKind.INVALID_ARGUMENTS, server=tool.server)
        try:
            with boundary(ToolServerError, f"Calling {call.name!r}"):
                if (refusal := tool.refusal(call.arguments)) is not None:
                    return ToolResult(text=refusal, kind=ResultKind.INVALID_ARGUMENTS, server=tool.server)
                return await self._servers[tool.server].call(tool, call.arguments)
        except ToolServerError as error:
            logger.warning("%s", error)
            return ToolResult(text=str(error), kind=ResultKind.SERVER_ERROR, server=tool.server)

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncGenerator["Lease", None]:
        """
        One trajectory's use of the pool.

        Args:
            task ([`Task`]):
                The task of the trajectory. Raises [`CatalogError`] if it names a server or tool that does not exist.

        Yields:
            [`Lease`]: What the trajectory may call.
        """
        yield Lease(self, self.catalog.tools_for(task))

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
            self._servers[config.name] = OpenServer(config, tasks, spawning, self._connections)
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
        # What sessions are left by now is not orderly any more. The error that may be under way is not passed on: the
        # task group would wrap it into an exception group.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


class Lease:
    """
    One trajectory's use of a pool.

    Args:
        pool ([`ToolPool`]):
            The pool.
        tools (`tuple[Tool, ...]`):
            The only tools the trajectory may call.
    """

    def __init__(self, pool: ToolPool, tools: tuple[Tool, ...]) -> None:
        self._pool = pool
        self.tools = tools

    async def call(self, call: ToolCall) -> ToolResult:
        """
        Call one tool.

        Args:
            call ([`ToolCall`]):
                What the policy asked for.

        Returns:
            [`ToolResult`]: What came back, error or not.
        """
        return await self._pool.call(call, tools=self.tools)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """
        Run the calls of one turn at the same time.

        Args:
            calls (`Sequence[ToolCall]`):
                What the policy asked for.

        Returns:
            `list[ToolResult]`: One result per call, in the order of the calls.
        """
        results: dict[int, ToolResult] = {}

        async def run(index: int, call: ToolCall) -> None:
            results[index] = await self.call(call)

        async with anyio.create_task_group() as tasks:
            for index, call in enumerate(calls):
                tasks.start_soon(run, index, call)
        return [results[index] for index in range(len(calls))]
