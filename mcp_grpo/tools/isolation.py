"""What trajectories share of a server: its sessions, or nothing."""

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
from anyio.abc import TaskGroup

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.call_queue import CallQueue
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.seat import Seat, SessionSeat
from mcp_grpo.tools.server import OpenServer
from mcp_grpo.tools.session import NotSentError, Session


logger = logging.getLogger(__name__)

TRAJECTORY_ID = "mcp_grpo/trajectory_id"


def open_server(
    config: ServerConfig,
    tasks: TaskGroup,
    spawning: anyio.CapacityLimiter,
    connections: httpx2.AsyncBaseTransport | None,
) -> OpenServer:
    """
    The kind of server that a configuration asks for, not yet open.

    Args:
        config ([`ServerConfig`]):
            The server.
        tasks (`TaskGroup`):
            Where its sessions run.
        spawning (`CapacityLimiter`):
            Limits how many processes are started at a time.
        connections (`httpx2.AsyncBaseTransport`, *optional*):
            Connections of HTTP servers.

    Returns:
        [`OpenServer`]: The server.
    """
    kinds = {"shared": SharedServer, "exclusive": ExclusiveServer, "meta": MetaServer}
    return kinds[config.isolation](config, tasks, spawning, connections)


class SharedServer(OpenServer):
    """Every call goes to the least loaded session."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=config.max_inflight)

    @asynccontextmanager
    async def seat(self, trajectory_id: str) -> AsyncGenerator[Seat, None]:
        """See [`OpenServer.seat`]."""
        yield _SharedSeat(self, trajectory_id)

    async def _use(self, session: Session) -> None:
        self.queue.add(session)
        await session.ended.wait()
        self.queue.remove(session)


class MetaServer(OpenServer):
    """Trajectories share sessions, and the server keeps them apart by the id that comes with every call."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=2**31)  # of trajectories; each session limits its own calls
        self._calls: dict[Session, CallQueue] = {}

    @asynccontextmanager
    async def seat(self, trajectory_id: str) -> AsyncGenerator[Seat, None]:
        """See [`OpenServer.seat`]. What the server knows of a trajectory is in one session, so its calls stay there."""
        meta = {TRAJECTORY_ID: trajectory_id}
        session = await self.acquire(trajectory_id)
        try:
            yield _PinnedSeat(self, session, self._calls[session], trajectory_id, meta)
        finally:
            self.queue.release(session)
            if self.config.reset_tool is not None and session.is_alive:
                self._tasks.start_soon(self._forget, session, meta)

    async def _use(self, session: Session) -> None:
        self._calls[session] = calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        self.queue.add(session)
        await session.ended.wait()
        self.queue.remove(session)
        del self._calls[session]

    async def _forget(self, session: Session, meta: Mapping[str, Any]) -> None:
        await _reset(self.config, session, meta)


class ExclusiveServer(OpenServer):
    """A trajectory has a session to itself. Afterwards the session is reset, or another one takes its place."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=1)
        self._leases = anyio.CapacityLimiter(config.num_leases)
        self._released: dict[Session, anyio.Event] = {}

    @asynccontextmanager
    async def seat(self, trajectory_id: str) -> AsyncGenerator[Seat, None]:
        """See [`OpenServer.seat`]."""
        borrower = object()
        await self._leases.acquire_on_behalf_of(borrower)
        try:
            session = await self.acquire(trajectory_id)
            self.queue.remove(session)  # nobody else is to get it, before it is as new
            released = self._released[session]
            calls = CallQueue(self.config.max_inflight)
            calls.add(session)
            try:
                yield _PinnedSeat(self, session, calls, trajectory_id)
            finally:
                released.set()  # recycling is its keeper's business; the trajectory does not wait for it
        finally:
            self._leases.release_on_behalf_of(borrower)

    async def _use(self, session: Session) -> None:
        is_new = True
        while session.is_alive and is_new:
            self._released[session] = released = anyio.Event()
            self.queue.add(session)
            async with anyio.create_task_group() as waiting:
                waiting.start_soon(self._watch, session, waiting.cancel_scope)
                await released.wait()
                waiting.cancel_scope.cancel()
            is_new = released.is_set() and await _reset(self.config, session)
        del self._released[session]

    async def _watch(self, session: Session, scope: anyio.CancelScope) -> None:
        """A session that ends while nobody has it need not be waited for."""
        await session.ended.wait()
        if self.queue.remove(session):
            scope.cancel()


class _SharedSeat(SessionSeat):
    def __init__(self, server: OpenServer, key: str) -> None:
        super().__init__(server.config, server.breaker)
        self._server = server
        self._key = key

    async def _acquire(self) -> Session:
        return await self._server.acquire(self._key)

    def _release(self, session: Session) -> None:
        self._server.queue.release(session)


class _PinnedSeat(SessionSeat):
    """A seat on one session. When that is over, so is what the trajectory did there, and the trajectory with it."""

    def __init__(
        self,
        server: OpenServer,
        session: Session,
        calls: CallQueue,
        key: str,
        meta: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(server.config, server.breaker, meta)
        self._session = session
        self._calls = calls
        self._key = key

    async def _acquire(self) -> Session:
        if not self._session.is_alive:
            raise ToolServerError(
                f"The session of this trajectory is over, and what it did there is lost. {self._session.obituary}"
            )
        return await self._calls.acquire(self._key)

    def _release(self, session: Session) -> None:
        self._calls.release(session)


async def _reset(config: ServerConfig, session: Session, meta: Mapping[str, Any] | None = None) -> bool:
    """Make the server forget a trajectory, if it can; whether it did."""
    if config.reset_tool is None or not session.is_alive:
        return False
    try:
        result = await session.call(config.reset_tool, {}, config.call_timeout, meta)
    except NotSentError:
        return False
    if result.is_error:
        logger.warning("The reset tool of server %r failed: %s", config.name, result.text)
    return not result.is_error
