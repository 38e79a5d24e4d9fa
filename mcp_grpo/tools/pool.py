"""The open servers of a run, and one trajectory's use of them."""

import itertools
import json
import logging
import os
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, Self, cast

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import CatalogError, ToolServerError
from mcp_grpo.tools.cassette import Cassette
from mcp_grpo.tools.catalog import Catalog, Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.config_files import Servers, load_servers
from mcp_grpo.tools.names import MAX_NAME_LENGTH, nearest_first
from mcp_grpo.tools.observation import with_repairs
from mcp_grpo.tools.secrets import shown_error, without_tokens
from mcp_grpo.tools.sessions.isolation import open_server
from mcp_grpo.tools.sessions.server import CallServer, OpenServer
from mcp_grpo.tools.setup import start_states, state_calls
from mcp_grpo.tools.transports.http import shared_connections
from mcp_grpo.tools.users import USER, User, UserSide, UserTools, check_user, named_tools
from mcp_grpo.types import Exchange, ResultKind, Task, ToolCall, ToolResult, Trajectory, UserTurn


logger = logging.getLogger(__name__)

MAX_SHOWN = 100  # characters of an invalid state in a message


class ToolPool:
    """
    The open servers of a run.

    An async context manager: entering opens all servers, and leaving ends all their processes and tasks. Enter and leave
    it in the same task; any task of that event loop may call.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `Sequence[ServerConfig]`, *optional*):
            What [`load_servers`] takes. May be omitted with a cassette that answers by itself.
        cassette ([`Cassette`], *optional*):
            Records the calls, or plays them back.
        user (`Callable`, *optional*):
            Says what users say once the policy has answered; see [`MCPGRPOTrainer`].

    Example:

    ```python
    async with ToolPool("servers.json") as pool:
        async with pool.lease(task) as lease:
            results = await lease.call_all([ToolCall(name="get_current_time", arguments={"timezone": "UTC"})])
    ```
    """

    def __init__(self, servers: Servers | None, cassette: Cassette | None = None, user: User | None = None) -> None:
        check_user(user)
        self._cassette = cassette
        self._user = user
        self._is_replayed = cassette is not None and not cassette.needs_servers
        self.configs = () if servers is None and self._is_replayed else load_servers(servers or {})
        self._num_leases: Counter[str] = Counter()  # by task, for the recording
        self._catalog: Catalog | None = None
        self._state_tools: Mapping[str, Tool] = {}
        self._setup_tools: Mapping[str, Tool] = {}
        self._servers: dict[str, OpenServer] = {}
        self._tasks: TaskGroup | None = None
        self._connections: httpx2.AsyncHTTPTransport | None = None
        self.seconds: dict[str, float] = {}
        """Seconds that each server took to start and list its tools."""
        self.failures: dict[str, ToolServerError | CatalogError] = {}
        """Servers that could not be opened, and why."""

    @property
    def catalog(self) -> Catalog:
        """All tools, as listed when the pool was opened."""
        if self._catalog is None:
            raise RuntimeError("The pool is not open. Use it inside `async with`.")
        return self._catalog

    @property
    def state_servers(self) -> tuple[str, ...]:
        """Return the names of the servers that have a `state_tool`."""
        return tuple(self._state_tools)

    @property
    def setup_servers(self) -> tuple[str, ...]:
        """Return the names of the servers that a task can set up."""
        by_itself = [config.name for config in self.configs if config.isolation == "meta" or config.is_made_per_task]
        return tuple(dict.fromkeys([*self._setup_tools, *by_itself]))

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise RuntimeError("A pool can be opened only once. Make a new `ToolPool`.")
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            if self._cassette is not None and self._is_replayed:
                listed, state_tools = self._cassette.listed, self._cassette.state_tools
                setup_tools, user_tools = self._cassette.setup_tools, self._cassette.user_tools
            else:
                listed = await self._open_all(self._tasks)
                state_tools = {config.name: config.state_tool for config in self.configs if config.state_tool}
                setup_tools = {config.name: config.setup_tool for config in self.configs if config.setup_tool}
                user_tools = {config.name: list(config.user_tools) for config in self.configs}
            self._state_tools = {
                server: _hidden_tool(server, name, is_read_only=True) for server, name in state_tools.items()
            }
            self._setup_tools = {
                server: _hidden_tool(server, name, is_read_only=False) for server, name in setup_tools.items()
            }
            self._catalog = Catalog.from_servers(listed, self.configs, user_tools)
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
            [`ToolResult`]: The result; for a failure, its `kind` says who caused it.
        """
        servers = {tool.server for tool in self.catalog.tools if tool.name == call.name}
        try:
            async with self._lease_servers(servers, None) as leased:
                return await Lease(self.catalog.tools, leased.servers, configs=self.configs).call(call)
        except ToolServerError as error:
            return _failed(error, next(iter(servers), None))

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncGenerator["Lease", None]:
        """
        Lease the pool to one trajectory: wait for the sessions it needs to itself, set them up as the task asks for, and give them
        back on leaving.

        Args:
            task ([`Task`]):
                The task of the trajectory. Raises [`CatalogError`] if it names a server or tool that does not exist, and
                [`ToolServerError`] if a server cannot provide a session or be set up.

        Yields:
            [`Lease`]: What the trajectory may call.
        """
        tools, of_user = self.catalog.all_tools_for(task), self._user_tools(task)
        async with self._lease_servers({tool.server for tool in (*tools, *of_user)}, task) as leased:
            offered = self.catalog.tools_for(task) if task.user_turns else tools
            lease = Lease(offered, leased.servers, self._state_tools, self.configs, self._state_calls(task))
            await lease.set_up(task, self._setup_tools)
            # What a user calls is not recorded: what it says is.
            calls = UserTools(of_user, Lease(of_user, leased.unrecorded, configs=self.configs).call)
            brought = [tool for tool in self.catalog.tools if tool.server in leased.servers]
            lease.listen_to(UserSide(task, calls, self._user, leased.record), brought)
            yield lease

    def _user_tools(self, task: Task) -> tuple[Tool, ...]:
        servers = self.catalog.servers if task.servers is None else task.servers
        return tuple(tool for tool in self.catalog.user_tools if tool.server in servers) if self._user else ()

    def _state_calls(self, task: Task) -> dict[str, list[tuple[Tool, Mapping[str, Any]]]]:
        """Return the calls of all tools, also of those that the task may not use, that show what its trajectory leaves behind."""
        if not (wanted := state_calls(task)):
            return {}
        by_name = {(tool.server, tool.name): tool for tool in self.catalog.tools}
        for server, name in ((server, call.name) for server, calls in wanted.items() for call in calls):
            if (server, name) not in by_name:
                raise CatalogError(
                    f"The `state_calls` of task {task.task_id!r} name the tool {name!r} of server {server!r}, which does not exist. "
                    f"Its tools are {nearest_first(name, [tool.name for tool in self.catalog.tools if tool.server == server])}."
                )
        return {
            server: [(by_name[server, call.name], call.arguments) for call in calls]
            for server, calls in wanted.items()
        }

    @asynccontextmanager
    async def _lease_servers(self, names: Collection[str], task: Task | None) -> AsyncGenerator["_Leased", None]:
        """Lease servers, always in the same order, or two trajectories could wait for each other."""
        trajectory_id, task_id = uuid.uuid4().hex, "" if task is None else task.task_id
        attempt, numbers = self._num_leases[task_id], itertools.count()
        self._num_leases[task_id] += 1
        unrecorded: dict[str, CallServer] = {}

        def record(name: str, call: CallServer | None) -> CallServer:
            if self._cassette is not None:
                return self._cassette.wrap(name, call, task_id, attempt, numbers)
            assert call is not None
            return call

        async with AsyncExitStack() as stack:
            for name in filter(names.__contains__, self.catalog.servers):
                if not self._is_replayed:
                    unrecorded[name] = await stack.enter_async_context(self._servers[name].lease(trajectory_id, task))
            names = [name for name in self.catalog.servers if name in names]
            yield _Leased(
                servers={name: record(name, unrecorded.get(name)) for name in names},
                unrecorded=unrecorded,
                record=partial(record, USER),
            )

    async def _open_all(self, tasks: TaskGroup) -> dict[str, tuple[types.Tool, ...]]:
        if any(config.transport == "http" for config in self.configs):
            self._connections = shared_connections()
        spawning = anyio.CapacityLimiter(os.cpu_count() or 1)  # starting a server is CPU work
        listed: dict[str, tuple[types.Tool, ...]] = {}
        failures = self.failures

        async def open_one(server: OpenServer) -> None:
            start = time.monotonic()
            try:
                listed[server.config.name] = await server.open()
            except (ToolServerError, CatalogError) as error:
                failures[server.config.name] = error
            self.seconds[server.config.name] = time.monotonic() - start

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
        # Cancel sessions that did not close. An error under way is not passed on: the group would wrap it.
        self._tasks.cancel_scope.cancel()
        await self._tasks.__aexit__(None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Leased:
    """The servers of one trajectory, with and without a recording in between."""

    servers: dict[str, CallServer]
    unrecorded: dict[str, CallServer]
    record: Callable[[CallServer], CallServer]  # the user, too


class Lease:
    """
    One trajectory's use of a pool.

    Args:
        tools (`tuple[Tool, ...]`):
            The only tools the trajectory may call.
        servers (`Mapping[str, CallServer]`):
            Where calls go, by the names of the servers.
        state_tools (`Mapping[str, Tool]`, *optional*):
            The `state_tool` of each server that has one.
        configs (`Sequence[ServerConfig]`, *optional*):
            The configurations of the servers, whose secrets are hidden in what is logged.
        state_calls (`Mapping[str, Sequence[tuple[Tool, Mapping[str, Any]]]]`, *optional*):
            Further calls that show what the trajectory has left behind, by the names of the servers.
    """

    def __init__(
        self,
        tools: tuple[Tool, ...],
        servers: Mapping[str, CallServer],
        state_tools: Mapping[str, Tool] | None = None,
        configs: Sequence[ServerConfig] = (),
        state_calls: Mapping[str, Sequence[tuple[Tool, Mapping[str, Any]]]] | None = None,
    ) -> None:
        self._state_calls = state_calls or {}
        self.tools = tools
        self._by_name = {tool.name: tool for tool in tools}
        self._servers = servers
        self._state_tools = state_tools or {}
        self._configs = {config.name: config for config in configs}
        self._user: UserSide | None = None
        self._all_tools: dict[str, Tool] = {}

    @property
    def user_exchanges(self) -> tuple[Exchange, ...]:
        """Return the calls of the user, with their results."""
        return () if self._user is None else tuple(self._user.tools.exchanges)

    def listen_to(self, user: UserSide, tools: Iterable[Tool]) -> None:
        """Let a user speak between the policy's turns, who may bring some of these tools."""
        self._user = user
        self._all_tools = {tool.name: tool for tool in tools}

    async def next_user_turn(self, so_far: Callable[[], Trajectory]) -> tuple[UserTurn, tuple[Tool, ...]] | None:
        """
        Ask the user for the next message, once the policy has answered.

        Args:
            so_far (`Callable[[], Trajectory]`):
                Returns the trajectory up to the answer.

        Returns:
            `tuple[UserTurn, tuple[Tool, ...]]`, *optional*: The message and the tools that it brings, which are in `tools` from
            now on; `None` if the user has no more to say. Raises [`ToolServerError`] if the user fails.
        """
        turn = None if self._user is None else await self._user.next_turn(so_far)
        if turn is None:
            return None
        try:
            brought = named_tools(turn.tools, self._all_tools)
        except CatalogError as error:
            raise ToolServerError(str(error)) from error
        new = tuple(tool for tool in brought if tool.name not in self._by_name)
        self.tools += new
        self._by_name |= {tool.name: tool for tool in new}
        return turn, new

    async def call(self, call: ToolCall) -> ToolResult:
        """
        Call one tool. Any problem with the call, the tool or the server is a result, never an exception.

        Args:
            call ([`ToolCall`]):
                What the policy asked for.

        Returns:
            [`ToolResult`]: The result; for a failure, its `kind` says who caused it.
        """
        tool = self._by_name.get(call.name)
        if tool is None:
            name = str(call.name)[:MAX_NAME_LENGTH]
            text = f"There is no tool `{name}`. The tools are: {nearest_first(name, self._by_name)}."
            return ToolResult(text=text, kind=ResultKind.UNKNOWN_TOOL)
        return await self._caught(tool, self._call(tool, call.arguments))

    async def _call(self, tool: Tool, arguments: Any) -> ToolResult:
        refusal, repairs = f"the arguments must be an object, got {type(arguments).__name__}; {tool.usage}", ()
        if isinstance(arguments, Mapping):
            prepared = tool.prepare(cast("Mapping[str, Any]", arguments))
            arguments, refusal, repairs = prepared.arguments, prepared.refusal, prepared.repairs
        if refusal is not None:
            return ToolResult(text=refusal, kind=ResultKind.INVALID_ARGUMENTS, server=tool.server)
        result = await self._servers[tool.server](tool, arguments)
        return with_repairs(result, repairs)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """
        Run the calls of one turn. Those to one server run in the order in which they are written, as each may rely on what those
        before it have done; read-only ones that follow each other run side by side, and so do calls to different servers.

        Args:
            calls (`Sequence[ToolCall]`):
                What the policy asked for.

        Returns:
            `list[ToolResult]`: One result per call, in the order of the calls.
        """
        if len(calls) == 1:
            return [await self.call(calls[0])]
        results: dict[int, ToolResult] = {}

        async def run(index: int) -> None:
            results[index] = await self.call(calls[index])

        async def run_in_order(waves: Iterable[Sequence[int]]) -> None:
            for wave in waves:
                async with anyio.create_task_group() as together:
                    for index in wave:
                        together.start_soon(run, index)

        async with anyio.create_task_group() as tasks:
            for waves in self._waves(calls):
                tasks.start_soon(run_in_order, waves)
        return [results[index] for index in range(len(calls))]

    def _waves(self, calls: Sequence[ToolCall]) -> Iterable[list[list[int]]]:
        """Return for each server which of its calls may run together, by their indices, one wave after another."""
        by_server: dict[str, list[list[int]]] = {}
        is_last_read: dict[str, bool] = {}
        for index, call in enumerate(calls):
            tool = self._by_name.get(call.name)
            server, is_read = ("", True) if tool is None else (tool.server, tool.is_read_only)
            waves = by_server.setdefault(server, [])
            if waves and is_read and is_last_read[server]:
                waves[-1].append(index)
            else:
                waves.append([index])
            is_last_read[server] = is_read
        return by_server.values()

    async def set_up(self, task: Task, tools: Mapping[str, Tool]) -> None:
        """
        Bring servers into the state in which the task begins.

        Args:
            task ([`Task`]):
                The task of the trajectory.
            tools (`Mapping[str, Tool]`):
                The `setup_tool` of each server that has one. Raises [`ToolServerError`] if one fails.
        """
        for server, arguments in start_states(task).items():
            call, tool = self._servers.get(server), tools.get(server)
            if call is None or tool is None:
                continue
            result = await self._caught(tool, call(tool, arguments))
            if result.is_error:
                raise ToolServerError(
                    f"The `setup_tool` {tool.tool!r} of server {server!r} failed for task {task.task_id!r}: {result.text}"
                )

    async def states(self) -> dict[str, Any]:
        """
        Read what the trajectory has left behind. Call it once, when the trajectory has ended.

        Returns:
            `dict[str, Any]`: The answer of each `state_tool`, by server. For a server that the task has `state_calls` of, an
            object with the texts of their results, errors included, as `calls`. Raises [`ToolServerError`] if a
            `state_tool` fails or does not answer with JSON, or a server fails.
        """
        states: dict[str, Any] = {}
        for server, call in self._servers.items():
            if (tool := self._state_tools.get(server)) is not None:
                states[server] = _state(tool, await self._caught(tool, call(tool, {})))
            if server in self._state_calls:
                results = [await self._caught(tool, call(tool, given)) for tool, given in self._state_calls[server]]
                if broken := [result for result in results if result.kind.is_server_fault]:
                    raise ToolServerError(f"A call of `state_calls` failed at server {server!r}: {broken[0].text}")
                states[server] = {"calls": [result.text for result in results]}
        return states

    async def _caught(self, tool: Tool, answer: Awaitable[ToolResult]) -> ToolResult:
        try:
            return await answer
        except ToolServerError as error:
            return _failed(error, tool.server)
        except Exception as error:  # a bug here or in a library; it must not take other trajectories down
            config = self._configs.get(tool.server)
            trace = config.shown_error(error) if config else shown_error(error)
            logger.error("Calling %r failed unexpectedly.\n%s", tool.name, trace)
            redact = config.redact if config else without_tokens
            return _failed(ToolServerError(redact(f"{type(error).__name__}: {error}")), tool.server)


def _hidden_tool(server: str, name: str, *, is_read_only: bool) -> Tool:
    return Tool(
        name=name,
        server=server,
        tool=name,
        description="",
        input_schema={"type": "object"},
        is_read_only=is_read_only,
        is_repeatable=is_read_only,
    )


def _state(tool: Tool, result: ToolResult) -> Any:
    failed = f"The `state_tool` {tool.tool!r} of server {tool.server!r}"
    if result.is_error:
        raise ToolServerError(f"{failed} failed: {result.text}")
    try:
        return json.loads(result.text)
    except (ValueError, RecursionError) as error:
        raise ToolServerError(
            f"{failed} must answer with JSON, got {result.text[:MAX_SHOWN]!r}: {error}. Fix the server, or name another "
            f"tool."
        ) from error


def _failed(error: ToolServerError, server: str | None) -> ToolResult:
    logger.debug("%s", error)  # the failure was logged where it happened; this repeats for each call
    return ToolResult(text=str(error), kind=ResultKind.SERVER_ERROR, server=server)
