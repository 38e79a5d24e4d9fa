"""One server of a pool, whatever sessions that takes."""

import logging
from collections.abc import Mapping
from typing import Any

import anyio
import httpx2
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.errors import CatalogError, ToolServerError
from mcp_grpo.tools.catalog import Tool, nearest_first
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.session import Session, SessionEndedError
from mcp_grpo.types import ToolResult


logger = logging.getLogger(__name__)

MAX_SESSIONS_PER_CALL = 10  # that a call may see die while it queues


class OpenServer:
    """
    One server of a pool, with a session that is replaced when it dies.

    Args:
        config ([`ServerConfig`]):
            The server.
        tasks (`TaskGroup`):
            Where its sessions run.
        spawning (`CapacityLimiter`):
            Limits how many servers are started at a time.
        connections (`httpx2.AsyncBaseTransport`, *optional*):
            Connections of HTTP servers.
    """

    def __init__(
        self,
        config: ServerConfig,
        tasks: TaskGroup,
        spawning: anyio.CapacityLimiter,
        connections: httpx2.AsyncBaseTransport | None,
    ) -> None:
        self.config = config
        self._tasks = tasks
        self._spawning = spawning
        self._connections = connections
        self._session: Session | None = None
        self._opening = anyio.Lock()
        self._is_closed = False
        self._num_attempts = 0
        self._last_error: ToolServerError | None = None
        self._tools: tuple[types.Tool, ...] | None = None

    async def open(self) -> tuple[types.Tool, ...]:
        """
        Open the first session.

        Returns:
            `tuple[mcp.types.Tool, ...]`: The tools that the configuration allows.
        """
        session = await self._live_session()
        allowed = self.config.allowed_tools
        if allowed is None:
            return session.tools
        offered = [tool.name for tool in session.tools]
        for name in allowed:
            if name not in offered:
                raise CatalogError(
                    f"`allowed_tools` of server {self.config.name!r} names {name!r}, which it does not offer. "
                    f"Its tools are {nearest_first(name, offered)}."
                )
        return tuple(tool for tool in session.tools if tool.name in allowed)

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Call a tool, on a new session if the old one has died.

        Args:
            tool ([`Tool`]):
                A tool of this server.
            arguments (`Mapping[str, Any]`):
                Its arguments.

        Returns:
            [`ToolResult`]: Whatever became of it. Raises [`ToolServerError`] if the server cannot be opened again.
        """
        for _ in range(MAX_SESSIONS_PER_CALL):
            session = await self._live_session()
            try:
                return await session.call(tool.tool, arguments, self.config.call_timeout)
            except SessionEndedError:  # it died while this call was queueing; nothing was sent, so this is no retry
                continue
        raise ToolServerError(f"The server {self.config.name!r} keeps ending before a call can be sent to it.")

    async def close(self) -> None:
        """Close the session, for good."""
        self._is_closed = True
        if self._session is not None:
            await self._session.close()

    async def _live_session(self) -> Session:
        if self._session is not None and self._session.is_alive:
            return self._session
        num_attempts = self._num_attempts
        async with self._opening:
            if self._session is not None and self._session.is_alive:
                return self._session
            if self._num_attempts > num_attempts and self._last_error is not None:
                # Another call tried while this one waited. Trying once per waiting call would add up to hours.
                raise ToolServerError(str(self._last_error))
            if self._is_closed:
                raise ToolServerError(f"The server {self.config.name!r} cannot be called: its pool is closed.")
            self._session = session = Session(self.config, self._connections)
            self._num_attempts += 1
            try:
                async with self._spawning:
                    await session.open(self._tasks)
            except ToolServerError as error:
                self._last_error = error
                raise
            self._last_error = None
            self._compare(session.tools)
            return session

    def _compare(self, tools: tuple[types.Tool, ...]) -> None:
        if self._tools is not None and self._tools != tools:
            logger.warning(
                "The server %r offers other tools than at the start of the run; prompts still show the first ones.",
                self.config.name,
            )
        self._tools = self._tools or tools
