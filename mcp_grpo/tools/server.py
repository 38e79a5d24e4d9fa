"""One server of a pool: its sessions are started within limits, and started anew when they end."""

import logging
from abc import ABC, abstractmethod
from contextlib import AbstractAsyncContextManager

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.breaker import Breaker
from mcp_grpo.tools.call_queue import CallQueue
from mcp_grpo.tools.catalog import catalog_changes, offered_tools
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.seat import Seat
from mcp_grpo.tools.session import LAST_WORDS_TIMEOUT, Handshake, Session


logger = logging.getLogger(__name__)

UNFORESEEN_DELAY = 1.0  # seconds before a start that failed for no known reason is tried again


class OpenServer(ABC):
    """
    One server of a pool, with as many sessions as its configuration asks for.

    Each session has a keeper, a task that starts the next one when it ends; what a session is used for, and for how long,
    is up to the subclass, one for each isolation. Sessions that are free are in `queue`.

    Args:
        config ([`ServerConfig`]):
            The server.
        tasks (`TaskGroup`):
            Where its sessions and keepers run.
        spawning (`CapacityLimiter`):
            Limits how many processes are started at a time.
        connections (`httpx2.AsyncBaseTransport`, *optional*):
            Connections of HTTP servers.
        max_inflight (`int`):
            How many places of a session `queue` gives out at a time.
    """

    def __init__(
        self,
        config: ServerConfig,
        tasks: TaskGroup,
        spawning: anyio.CapacityLimiter,
        connections: httpx2.AsyncBaseTransport | None,
        *,
        max_inflight: int,
    ) -> None:
        self.config = config
        self.breaker = Breaker(config.name)
        self.queue = CallQueue(max_inflight)
        self.num_starts = 0
        """How many sessions were opened so far, the first ones included."""
        self._tasks = tasks
        self._spawning = spawning
        self._connections = connections
        self._sessions: set[Session] = set()
        self._handshake: Handshake | None = None
        self._listed: tuple[types.Tool, ...] | None = None
        self._reported: list[str] = []
        self._num_reported = 0
        self._is_closed = False

    async def open(self) -> tuple[types.Tool, ...]:
        """
        Open the first session, and let the others follow.

        Returns:
            `tuple[mcp.types.Tool, ...]`: The tools that the configuration allows. Raises [`ToolServerError`] if the session
            cannot be opened, at once and without a second try: at the start of a run it is the configuration that is wrong.
        """
        session = await self._start()
        tools = offered_tools(self.config, session.tools)
        self._tasks.start_soon(self._keep, session)
        for _ in range(self.config.num_sessions - 1):
            self._tasks.start_soon(self._keep, None)
        return tools

    @abstractmethod
    def seat(self, trajectory_id: str) -> AbstractAsyncContextManager[Seat]:
        """
        One trajectory's use of the server.

        Args:
            trajectory_id (`str`):
                Tells trajectories apart.

        Returns:
            An async context manager that yields the [`Seat`]. Entering it may wait for others to leave, and raises
            [`ToolServerError`] if there is no session and will be none soon.
        """

    async def close(self) -> None:
        """Close all sessions, for good."""
        self._is_closed = True
        self.queue.close(ToolServerError(f"The server {self.config.name!r} cannot be called: its pool is closed."))
        async with anyio.create_task_group() as closing:
            for session in list(self._sessions):
                closing.start_soon(session.close)

    async def acquire(self, key: str) -> Session:
        """
        Wait for a place on a session that is alive. It must be given back by `queue.release`.

        Args:
            key (`str`):
                The trajectory it is for.

        Returns:
            [`Session`]: The session. Raises [`ToolServerError`] if there is none, and will be none soon.
        """
        while not (session := await self.queue.acquire(key)).is_alive:
            self.queue.remove(session)
        return session

    def answered(self) -> None:
        """Note that a call was answered."""
        self.breaker.answered()
        self.queue.error = None

    @abstractmethod
    async def _use(self, session: Session) -> None:
        """Put an open session to use; return when another one has to take its place."""

    async def _keep(self, session: Session | None) -> None:
        """Always have a session in use, starting with this one."""
        while not self._is_closed:
            if session is None and (session := await self._start_again()) is None:
                continue
            try:
                await self._use(session)
            except Exception:  # a keeper that ended would leave the server with a session less, for good
                logger.exception("Keeping a session with server %r failed.", self.config.name)
                session.ended.set()
            if session.is_broken and not session.has_answered:
                with anyio.move_on_after(LAST_WORDS_TIMEOUT):  # the exit code comes a moment after the end
                    await session.finished.wait()
                self.breaker.broke(ToolServerError(session.obituary), session.opened_at)
            if session.is_unreachable:
                self._handshake = None  # what comes back there may speak another protocol
            self._report(ToolServerError(session.obituary))
            self._tasks.start_soon(self._end, session)
            session = None

    async def _start(self) -> Session:
        session = Session(self.config, self._connections, self._handshake, self._compare)
        self._sessions.add(session)
        try:
            await session.open(self._tasks, self._spawning)
        except BaseException:
            self._sessions.discard(session)
            self._handshake = None
            raise
        self._handshake = session.handshake
        self.num_starts += 1
        self._compare(session.tools)
        return session

    async def _start_again(self) -> Session | None:
        try:
            async with self.breaker.attempt():
                return await self._start()
        except ToolServerError as error:
            self._report(error)
            return None
        except Exception as error:
            logger.exception(
                "Starting a session with server %r failed in a way that was not foreseen.", self.config.name
            )
            self._report(ToolServerError(f"{type(error).__name__}: {error}"))
            await anyio.sleep(UNFORESEEN_DELAY)
            return None

    def _report(self, error: ToolServerError) -> None:
        """Say what broke: in one line for a hiccup, and one for an outage, which those who wait need not wait out."""
        if self._is_closed:
            return
        num_failures, reason = self.breaker.num_failures, self.breaker.error
        if reason is not None:
            self.queue.fail(reason)
        if num_failures != self._num_reported and (reason is not None or num_failures == 1):
            logger.warning("%s", reason or error)
        self._num_reported = num_failures

    async def _end(self, session: Session) -> None:
        if session.is_unreachable:
            await session.finished.wait()  # which it is once its last calls are answered, or late
        await session.close()
        self._sessions.discard(session)

    def _compare(self, tools: tuple[types.Tool, ...]) -> None:
        """Report what has changed since the run began, each change once; prompts and checks stay as they were."""
        self._listed = self._listed or tools
        changes = catalog_changes(self._listed, tools) if tools != self._listed else []
        if changes and changes != self._reported:
            self._reported = changes
            logger.warning(
                "The tools of server %r have changed: %s. The run goes on with those it began with.",
                self.config.name,
                "; ".join(changes),
            )
