"""How trajectories share a server: one kind of server for each isolation, and the leases that trajectories get."""

import logging
import random
from abc import abstractmethod
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any, Self, cast

import anyio
import mcp.types as types

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.catalog import Tool, offered_tools
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.functions import FunctionServer
from mcp_grpo.tools.sessions.call_queue import CallQueue
from mcp_grpo.tools.sessions.direct import DirectSession
from mcp_grpo.tools.sessions.server import CallServer, OpenServer
from mcp_grpo.tools.sessions.session import NotSentError, Session, check_size
from mcp_grpo.tools.setup import start_states
from mcp_grpo.types import SETUP, TRAJECTORY_ID, ResultKind, Task, ToolResult


logger = logging.getLogger(__name__)

MAX_SESSIONS = 10  # that may end before a call can be sent
RETRY_DELAY = 0.1  # seconds before the first retry; doubled with each


def open_server(config: ServerConfig, *args: Any) -> OpenServer:
    """Make the kind of server that a configuration asks for, not yet open."""
    if config.is_made_per_task:
        return MadeServer(config, *args)
    kinds = {"shared": SharedServer, "exclusive": ExclusiveServer, "meta": MetaServer}
    return kinds[config.isolation](config, *args)


class SharedServer(OpenServer):
    """Every call goes to the least loaded session."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=config.max_inflight)

    @asynccontextmanager
    async def lease(self, trajectory_id: str, task: Task | None = None) -> AsyncGenerator[CallServer, None]:
        yield _Lease(self, trajectory_id).call

    async def _use(self, session: Session) -> None:
        self.queue.add(session)
        await session.ended.wait()
        self.queue.remove(session)


class PinnedServer(OpenServer):
    """All calls of a trajectory go to one session, which knows what it did before."""

    @asynccontextmanager
    async def lease(self, trajectory_id: str, task: Task | None = None) -> AsyncGenerator[CallServer, None]:
        async with _PinnedLease(self, trajectory_id, self._meta(trajectory_id, task)) as lease:
            yield lease.call

    def _meta(self, trajectory_id: str, task: Task | None) -> Mapping[str, Any] | None:
        """Return what every call of a trajectory carries."""
        return None

    @abstractmethod
    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        """Wait for a session, and return it with its places for calls."""

    @abstractmethod
    def give_back(self, session: Session, trajectory_id: str) -> None:
        """Return a session that [`take`] gave."""


class MetaServer(PinnedServer):
    """Trajectories share sessions, and the server keeps them apart by the id in every call."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        # Places for trajectories; each session limits its own calls.
        super().__init__(config, *args, max_inflight=config.max_trajectories or 2**31)
        self._calls: dict[Session, CallQueue] = {}

    def _meta(self, trajectory_id: str, task: Task | None) -> Mapping[str, Any] | None:
        meta: dict[str, Any] = {TRAJECTORY_ID: trajectory_id}
        if task is None or self.config.setup_tool is not None:
            return meta
        setup = start_states(task).get(self.config.name)
        return meta if setup is None else meta | {SETUP: setup}

    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        session = await self.acquire(trajectory_id)
        return session, self._calls[session]

    def give_back(self, session: Session, trajectory_id: str) -> None:
        if session.is_alive:
            self._tasks.start_soon(self._forget, session, trajectory_id)
        else:
            self.queue.release(session)

    async def _forget(self, session: Session, trajectory_id: str) -> None:
        try:
            await _reset(self.config, session, {TRAJECTORY_ID: trajectory_id})
        finally:
            self.queue.release(session)  # only now, or the server would have one too many

    async def _use(self, session: Session) -> None:
        self._calls[session] = calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        self.queue.add(session)
        await session.ended.wait()
        self.queue.remove(session)
        del self._calls[session]


class ExclusiveServer(PinnedServer):
    """A trajectory has a session to itself, which is then reset or replaced."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=1)
        self._leases = anyio.CapacityLimiter(config.num_leases)
        self._released: dict[Session, anyio.Event] = {}
        self._leased: set[Session] = set()

    @asynccontextmanager
    async def lease(self, trajectory_id: str, task: Task | None = None) -> AsyncGenerator[CallServer, None]:
        borrower = object()
        await self._leases.acquire_on_behalf_of(borrower)
        try:
            async with super().lease(trajectory_id) as call:
                yield call
        finally:
            self._leases.release_on_behalf_of(borrower)

    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        session = await self.acquire(trajectory_id)
        self.queue.remove(session)  # nobody else gets it before it is clean
        self._leased.add(session)
        calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        return session, calls

    def give_back(self, session: Session, trajectory_id: str) -> None:
        self._leased.remove(session)
        self._released[session].set()  # its keeper recycles it; the trajectory does not wait

    async def _use(self, session: Session) -> None:
        is_clean = True
        while session.is_alive and is_clean:
            self._released[session] = released = anyio.Event()
            self.queue.add(session)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(self._watch, session, waiting.cancel_scope)
                await released.wait()
                waiting.cancel_scope.cancel()
            is_clean = released.is_set() and await _reset(self.config, session)
        self._released.pop(session, None)

    async def _watch(self, session: Session, scope: anyio.CancelScope) -> None:
        """Stop waiting for the release of a session that ends while nobody has it."""
        await session.ended.wait()
        if session not in self._leased:
            self.queue.remove(session)
            scope.cancel()


class MadeServer(PinnedServer):
    """A trajectory has a server object to itself, made for its task."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=1)
        self._leases = None if config.pool_size is None else anyio.CapacityLimiter(config.pool_size)
        self._tasks_of: dict[str, Task | None] = {}  # by trajectory
        self._listing: Sequence[types.Tool] = ()  # as the last server of functions had it

    async def open(self) -> tuple[types.Tool, ...]:
        """See [`OpenServer.open`]. One object is made without a task, only to list its tools."""
        session = await self._made(None)
        try:
            return offered_tools(self.config, session.tools)
        finally:
            self._tasks.start_soon(self._end, session)

    @asynccontextmanager
    async def lease(self, trajectory_id: str, task: Task | None = None) -> AsyncGenerator[CallServer, None]:
        async with self._leases or nullcontext():
            self._tasks_of[trajectory_id] = task
            try:
                async with super().lease(trajectory_id, task) as call:
                    yield call
            finally:
                del self._tasks_of[trajectory_id]

    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        session = await self._made(self._tasks_of[trajectory_id])
        calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        return session, calls

    def give_back(self, session: Session, trajectory_id: str) -> None:
        if isinstance(session, DirectSession):
            session.end()
        else:
            self._tasks.start_soon(self._end, session)

    async def _made(self, task: Task | None) -> Session:
        name, factory = self.config.name, cast("Callable[[Task | None], Any]", self.config.server)
        try:
            made = factory(task)
        except Exception as error:
            of_task = "without a task, to list its tools" if task is None else f"for task {task.task_id!r}"
            raise ToolServerError(
                self.config.redact(f"Server {name!r} could not be made {of_task}: {type(error).__name__}: {error}")
            ) from error
        if isinstance(made, FunctionServer):
            return self._direct(made)
        return await self._start(replace(self.config, server=made))

    def _direct(self, made: FunctionServer) -> Session:
        """Return a session with a server of functions. Its tools are looked at if they are not those of the last one."""
        session = DirectSession(self.config, made, self._tasks)
        if made.tools is not self._listing:
            check_size(made.tools, self.config)
            session.tools = tuple(map(self.config.without_secrets_in, made.tools))
            self._compare(session.tools)
            self._listing = made.tools
        self.num_starts += 1
        return session

    async def _use(self, session: Session) -> None:
        """Do nothing: sessions are not kept."""


class _Lease:
    """One trajectory's use of a server with shared sessions."""

    def __init__(self, server: OpenServer, trajectory_id: str, meta: Mapping[str, Any] | None = None) -> None:
        self._server = server
        self._trajectory_id = trajectory_id
        self._meta = meta
        self._num_sent = 0

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Call a tool. A call that did not reach the server goes to its next session; one that the server failed is retried,
        within the same deadline, if the tool is idempotent.
        """
        config = self._server.config
        max_attempts = 1 + (config.retries if tool.is_repeatable else 0)
        num_attempts, seconds = 0, 0.0
        while True:
            result = await self._call_once(tool.tool, arguments, config.call_timeout - seconds)
            num_attempts += 1
            seconds += result.seconds
            if not result.kind.is_server_fault:
                self._server.answered()
            is_last = num_attempts == max_attempts or seconds >= config.call_timeout
            if result.kind is not ResultKind.SERVER_ERROR or is_last:
                break
            # Jittered: calls that failed together should not all be retried together.
            await anyio.sleep(RETRY_DELAY * 2 ** (num_attempts - 1) * random.uniform(0.5, 1.0))
        return result if num_attempts == 1 else replace(result, num_attempts=num_attempts, seconds=seconds)

    async def _call_once(self, name: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        config = self._server.config
        for _ in range(MAX_SESSIONS):
            session = await self._acquire()
            self._num_sent += 1
            try:
                return await session.call(name, arguments, timeout, self._meta)
            except NotSentError:
                self._num_sent -= 1
            finally:
                self._release(session)
        raise ToolServerError(f"The server {config.name!r} keeps ending before a call can be sent to it.")

    async def _acquire(self) -> Session:
        """Wait for a session with a place for one call."""
        return await self._server.acquire(self._trajectory_id)

    def _release(self, session: Session) -> None:
        self._server.queue.release(session)


class _PinnedLease(_Lease):
    """A lease of one session. When that is over, so is what the trajectory did there, and the trajectory with it."""

    _server: PinnedServer

    def __init__(self, server: PinnedServer, trajectory_id: str, meta: Mapping[str, Any] | None = None) -> None:
        super().__init__(server, trajectory_id, meta)
        self._session: Session | None = None
        self._calls: dict[Session, CallQueue] = {}
        self._moving = anyio.Lock()

    async def __aenter__(self) -> Self:
        await self._move()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            self._server.give_back(self._session, self._trajectory_id)

    async def _acquire(self) -> Session:
        if (
            self._session is not None and self._session.is_alive
        ):  # the usual case, for which a lock would cost a turn of the loop
            return await self._calls[self._session].acquire(self._trajectory_id)
        async with self._moving:
            if self._session is None or not self._session.is_alive:
                if self._num_sent and self._session is not None:
                    raise ToolServerError(
                        f"The session of this trajectory is over, and what it did there is lost. {self._session.end_reason}"
                    )
                await self._move()
            assert self._session is not None
            calls = self._calls[self._session]
        return await calls.acquire(self._trajectory_id)

    def _release(self, session: Session) -> None:
        self._calls[session].release(session)

    async def _move(self) -> None:
        """Take a session, in place of one that ended before it was used."""
        if self._session is not None:
            ended, self._session = self._session, None
            self._server.give_back(ended, self._trajectory_id)
        self._session, calls = await self._server.take(self._trajectory_id)
        self._calls[self._session] = calls


async def _reset(config: ServerConfig, session: Session, meta: Mapping[str, Any] | None = None) -> bool:
    """Make the server forget a trajectory, and return whether it did."""
    if config.reset_tool is None or not session.is_alive:
        return False
    if session.num_abandoned and meta is None:
        return False  # an abandoned call may still be running, and would meet the next trajectory
    try:
        result = await session.call(config.reset_tool, {}, config.call_timeout, meta)
    except NotSentError:
        return False
    except Exception as error:  # it must not take the other sessions down; this one is replaced
        trace = config.shown_error(error)
        logger.error("The reset tool of server %r failed unexpectedly.\n%s", config.name, trace)
        return False
    if result.is_error and session.is_alive:  # not one that was closed meanwhile
        logger.warning("The reset tool of server %r failed: %s", config.name, result.text)
    return not result.is_error
