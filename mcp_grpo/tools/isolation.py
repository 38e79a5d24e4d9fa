"""What trajectories share of a server: its sessions, or nothing."""

import logging
from abc import abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

import anyio
import httpx2
from anyio.abc import TaskGroup

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.call_queue import CallQueue
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.seat import Seat, SessionSeat
from mcp_grpo.tools.server import OpenServer
from mcp_grpo.tools.session import NotSentError, Session
from mcp_grpo.types import TRAJECTORY_ID


logger = logging.getLogger(__name__)


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


class PinnedServer(OpenServer):
    """A trajectory's calls all go to one session, where what it did before is known."""

    @abstractmethod
    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        """
        Wait for a session.

        Args:
            trajectory_id (`str`):
                The trajectory that is to have it.

        Returns:
            `tuple[Session, CallQueue]`: The session, and its places for calls.
        """

    @abstractmethod
    def give_back(self, session: Session, trajectory_id: str) -> None:
        """
        Let go of a session.

        Args:
            session ([`Session`]):
                What [`take`] returned.
            trajectory_id (`str`):
                The trajectory that had it.
        """


class MetaServer(PinnedServer):
    """Trajectories share sessions, and the server keeps them apart by the id that comes with every call."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=2**31)  # of trajectories; each session limits its own calls
        self._calls: dict[Session, CallQueue] = {}

    @asynccontextmanager
    async def seat(self, trajectory_id: str) -> AsyncGenerator[Seat, None]:
        """See [`OpenServer.seat`]."""
        async with _PinnedSeat(self, trajectory_id, _meta(trajectory_id)) as seat:
            yield seat

    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        """See [`PinnedServer.take`]."""
        session = await self.acquire(trajectory_id)
        return session, self._calls[session]

    def give_back(self, session: Session, trajectory_id: str) -> None:
        """See [`PinnedServer.give_back`]. The server is told to forget the trajectory, if it can."""
        self.queue.release(session)
        if self.config.reset_tool is not None and session.is_alive:
            self._tasks.start_soon(_reset, self.config, session, _meta(trajectory_id))

    async def _use(self, session: Session) -> None:
        self._calls[session] = calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        self.queue.add(session)
        await session.ended.wait()
        self.queue.remove(session)
        del self._calls[session]


class ExclusiveServer(PinnedServer):
    """A trajectory has a session to itself. Afterwards the session is reset, or another one takes its place."""

    def __init__(self, config: ServerConfig, *args: Any) -> None:
        super().__init__(config, *args, max_inflight=1)
        self._leases = anyio.CapacityLimiter(config.num_leases)
        self._released: dict[Session, anyio.Event] = {}
        self._leased: set[Session] = set()

    @asynccontextmanager
    async def seat(self, trajectory_id: str) -> AsyncGenerator[Seat, None]:
        """See [`OpenServer.seat`]."""
        borrower = object()
        await self._leases.acquire_on_behalf_of(borrower)
        try:
            async with _PinnedSeat(self, trajectory_id) as seat:
                yield seat
        finally:
            self._leases.release_on_behalf_of(borrower)

    async def take(self, trajectory_id: str) -> tuple[Session, CallQueue]:
        """See [`PinnedServer.take`]."""
        session = await self.acquire(trajectory_id)
        self.queue.remove(session)  # nobody else is to get it, before it is as new
        self._leased.add(session)
        calls = CallQueue(self.config.max_inflight)
        calls.add(session)
        return session, calls

    def give_back(self, session: Session, trajectory_id: str) -> None:
        """See [`PinnedServer.give_back`]. Recycling it is its keeper's business; the trajectory does not wait for it."""
        self._leased.remove(session)
        self._released[session].set()

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
        self._released.pop(session, None)

    async def _watch(self, session: Session, scope: anyio.CancelScope) -> None:
        """A session that ends while nobody has it need not be waited for."""
        await session.ended.wait()
        if session not in self._leased:
            self.queue.remove(session)
            scope.cancel()


class _SharedSeat(SessionSeat):
    def __init__(self, server: OpenServer, key: str) -> None:
        super().__init__(server.config, server.answered)
        self._server = server
        self._key = key

    async def _acquire(self) -> Session:
        return await self._server.acquire(self._key)

    def _release(self, session: Session) -> None:
        self._server.queue.release(session)


class _PinnedSeat(SessionSeat):
    """A seat on one session. When that is over, so is what the trajectory did there, and the trajectory with it."""

    def __init__(self, server: PinnedServer, trajectory_id: str, meta: Mapping[str, Any] | None = None) -> None:
        super().__init__(server.config, server.answered, meta)
        self._server = server
        self._trajectory_id = trajectory_id
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
        async with self._moving:
            if self._session is None or not self._session.is_alive:
                self._refuse_to_forget()
                await self._move()
            assert self._session is not None
            calls = self._calls[self._session]
        return await calls.acquire(self._trajectory_id)

    def _release(self, session: Session) -> None:
        self._calls[session].release(session)

    async def _move(self) -> None:
        """Take a session, in the place of one that ended before it was used."""
        if self._session is not None:
            ended, self._session = self._session, None
            self._server.give_back(ended, self._trajectory_id)
        self._session, calls = await self._server.take(self._trajectory_id)
        self._calls[self._session] = calls

    def _refuse_to_forget(self) -> None:
        if self._num_sent and self._session is not None:
            raise ToolServerError(
                f"The session of this trajectory is over, and what it did there is lost. {self._session.obituary}"
            )


def _meta(trajectory_id: str) -> dict[str, Any]:
    return {TRAJECTORY_ID: trajectory_id}


async def _reset(config: ServerConfig, session: Session, meta: Mapping[str, Any] | None = None) -> bool:
    """Make the server forget a trajectory, if it can; whether it did."""
    if config.reset_tool is None or not session.is_alive:
        return False
    if session.num_abandoned and meta is None:
        return False  # a call that was not waited for may still be running, and would meet the next trajectory
    try:
        result = await session.call(config.reset_tool, {}, config.call_timeout, meta)
    except NotSentError:
        return False
    except Exception:  # it must not take the other sessions down; this one is replaced
        logger.exception("The reset tool of server %r failed in a way that was not foreseen.", config.name)
        return False
    if result.is_error and session.is_alive:  # not one that was closed meanwhile
        logger.warning("The reset tool of server %r failed: %s", config.name, result.text)
    return not result.is_error
