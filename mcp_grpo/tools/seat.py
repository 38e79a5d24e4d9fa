"""One trajectory's use of one server."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import anyio

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.session import NotSentError, Session
from mcp_grpo.types import ResultKind, ToolResult


MAX_SESSIONS = 10  # that a call may see end before it is sent
RETRY_DELAY = 0.1  # seconds before the first repetition; doubled with each


class Seat(Protocol):
    """Where a trajectory's calls to one server go."""

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Call a tool.

        Args:
            tool ([`Tool`]):
                A tool of this server.
            arguments (`Mapping[str, Any]`):
                Its arguments, which fit its schema.

        Returns:
            [`ToolResult`]: Whatever became of it. Raises [`ToolServerError`] if there is no session to send it to.
        """
        ...


class SessionSeat(ABC):
    """
    A seat on sessions, which repeats calls where that is safe.

    Args:
        config ([`ServerConfig`]):
            The server.
        on_answer (`Callable[[], None]`):
            Called when a call was answered.
        meta (`Mapping[str, Any]`, *optional*):
            Sent along with every call.
    """

    def __init__(
        self, config: ServerConfig, on_answer: Callable[[], None], meta: Mapping[str, Any] | None = None
    ) -> None:
        self._config = config
        self._on_answer = on_answer
        self._meta = meta
        self._num_sent = 0

    @abstractmethod
    async def _acquire(self) -> Session:
        """A session with a place for one call."""

    @abstractmethod
    def _release(self, session: Session) -> None:
        """Give the place back."""

    async def call(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Call a tool. A call that did not reach the server is sent to its next session; one that the server failed is sent
        again if the tool does no harm twice, within the same deadline.

        Args:
            tool ([`Tool`]):
                A tool of this server.
            arguments (`Mapping[str, Any]`):
                Its arguments, which fit its schema.

        Returns:
            [`ToolResult`]: Whatever became of it. Raises [`ToolServerError`] if there is no session to send it to.
        """
        timeout = self._config.call_timeout
        max_attempts = 1 + (self._config.retries if tool.is_repeatable else 0)
        num_attempts, seconds = 0, 0.0
        while True:
            result = await self._call_once(tool.tool, arguments, timeout - seconds)
            num_attempts += 1
            seconds += result.seconds
            if not result.kind.is_server_fault:
                self._on_answer()
            if result.kind is not ResultKind.SERVER_ERROR or num_attempts == max_attempts or seconds >= timeout:
                break
            # Jittered: the calls that a broken server failed together should not all come back together.
            await anyio.sleep(RETRY_DELAY * 2 ** (num_attempts - 1) * random.uniform(0.5, 1.0))
        return result if num_attempts == 1 else replace(result, num_attempts=num_attempts, seconds=seconds)

    async def _call_once(self, name: str, arguments: Mapping[str, Any], timeout: float) -> ToolResult:
        for _ in range(MAX_SESSIONS):
            session = await self._acquire()
            self._num_sent += 1
            try:
                return await session.call(name, arguments, timeout, self._meta)
            except NotSentError:
                self._num_sent -= 1
            finally:
                self._release(session)
        raise ToolServerError(f"The server {self._config.name!r} keeps ending before a call can be sent to it.")
