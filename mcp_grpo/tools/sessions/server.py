"""One server of a pool: starts its sessions within limits, and again when they end."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.catalog import Tool, catalog_changes, offered_tools
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.sessions.breaker import Breaker
from mcp_grpo.tools.sessions.call_queue import CallQueue
from mcp_grpo.tools.sessions.session import EXIT_TIMEOUT, Handshake, Session
from mcp_grpo.types import Task, ToolResult


logger = logging.getLogger(__name__)

UNEXPECTED_DELAY = 1.0  # seconds before retrying a start that failed for an unknown reason

# Sends a trajectory's calls to one server. Raises `ToolServerError` if there is no session to send them to.
CallServer = Callable[[Tool, Mapping[str, Any]], Awaitable[ToolResult]]


class OpenServer(ABC):
    """
    One server of a pool, with as many sessions as its configuration asks for.

    Each session has a keeper, a task that starts the next one when it ends. How a session is used, and for how long, is up
    to the subclass, one for each isolation. Sessions that are free are in `queue`.
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
        self.num_starts = 0  # sessions opened so far
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
        Open the first session, start the others, and return the tools to offer. A failure is raised at once, without a
        retry: at the start of a run it is the configuration that is wrong.
        """
        session = await self._start()
        tools = offered_tools(self.config, session.tools)
        self._tasks.start_soon(self._keep, session)
        for _ in range(self.config.num_sessions - 1):
            self._tasks.start_soon(self._keep, None)
        return tools

    @abstractmethod
    def lease(self, trajectory_id: str, task: Task | None = None) -> AbstractAsyncContextManager[CallServer]:
        """
        Lend the server to a trajectory at a task, which may wait for others to leave. Raises [`ToolServerError`] if it is down.
        """

    async def close(self) -> None:
        """Close all sessions for good."""
        self._is_closed = True
        self.queue.close(ToolServerError(f"The server {self.config.name!r} cannot be called: its pool is closed."))
        async with anyio.create_task_group() as closing:
            for session in list(self._sessions):
                closing.start_soon(session.close)

    async def acquire(self, key: str) -> Session:
        """Wait for a place on a live session, to be given back by `queue.release`."""
        while not (session := await self.queue.acquire(key)).is_alive:
            self.queue.remove(session)
        return session

    def answered(self) -> None:
        """Record an answered call: the server is well."""
        self.breaker.answered()
        self.queue.error = None

    @abstractmethod
    async def _use(self, session: Session) -> None:
        """Put an open session to use; return when it has to be replaced."""

    async def _keep(self, session: Session | None) -> None:
        """Keep one session in use, replacing it whenever it ends."""
        while not self._is_closed:
            if session is None and (session := await self._start_again()) is None:
                continue
            try:
                await self._use(session)
            except Exception as error:  # a keeper that ended would leave the server one session short for good
                name, trace = self.config.name, self.config.shown_error(error)
                logger.error("Keeping a session with server %r failed.\n%s", name, trace)
                session.ended.set()
            if session.is_broken and not session.has_answered:
                with anyio.move_on_after(EXIT_TIMEOUT):  # the exit code comes a moment after the end
                    await session.finished.wait()
                self.breaker.broke(ToolServerError(session.end_reason), session.opened_at)
            if session.is_unreachable:
                self._handshake = None  # what comes back may speak another protocol
            self._report(ToolServerError(session.end_reason))
            self._tasks.start_soon(self._end, session)
            session = None

    async def _start(self, config: ServerConfig | None = None) -> Session:
        session = Session(config or self.config, self._connections, self._handshake, self._compare)
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
        except Exception as error:
            name, trace = self.config.name, self.config.shown_error(error)
            logger.error("Starting a session with server %r failed unexpectedly.\n%s", name, trace)
            self._report(ToolServerError(self.config.redact(f"{type(error).__name__}: {error}")))
            await anyio.sleep(UNEXPECTED_DELAY)
        return None

    def _report(self, error: ToolServerError) -> None:
        """Log one line for a hiccup and one for an outage, and fail waiting calls in an outage."""
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
            await session.finished.wait()  # once its last calls are answered or timed out
        await session.close()
        self._sessions.discard(session)

    def _compare(self, tools: tuple[types.Tool, ...]) -> None:
        """Warn once of each change since the run began; prompts and checks stay as they were."""
        self._listed = self._listed or tools
        changes = catalog_changes(self._listed, tools) if tools != self._listed else []
        if changes and changes != self._reported:
            self._reported = changes
            logger.warning(
                "The tools of server %r have changed: %s. The run continues with those it began with.",
                self.config.name,
                "; ".join(changes),
            )
