"""A session with a server of functions in this process, without a connection."""

import time
from collections.abc import Awaitable, Mapping
from copy import deepcopy
from typing import Any

import anyio
import mcp.types as types
from anyio.abc import TaskGroup

from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.functions import FunctionServer
from mcp_grpo.tools.observation import observed
from mcp_grpo.tools.sessions.session import NotSentError, Session
from mcp_grpo.types import ResultKind, ToolResult


class DirectSession(Session):
    """
    Calls the functions of a server in place of a client. Its results, deadlines and failures are those of a [`Session`].

    Args:
        config (`ServerConfig`):
            Configuration of the server.
        server ([`FunctionServer`]):
            The server.
        tasks (`TaskGroup`):
            Where functions run that have to be waited for.
    """

    def __init__(self, config: ServerConfig, server: FunctionServer, tasks: TaskGroup) -> None:
        super().__init__(config, None, None, lambda tools: None)
        self._server = server
        self._tasks = tasks
        self._waiting: set[anyio.Event] = set()  # for answers
        self.opened_at = anyio.current_time()

    @property
    def is_alive(self) -> bool:
        """See [`Session.is_alive`]."""
        return not self.ended.is_set()

    async def close(self, *, force: bool = False) -> None:
        """See [`Session.close`]."""
        self.end()

    def end(self) -> None:
        """Take no more calls. What runs is cancelled, and not waited for."""
        self.was_closed = self.was_closed or not self.ended.is_set()
        self.ended.set()
        self.finished.set()
        for done in self._waiting:
            done.set()

    async def call(
        self, name: str, arguments: Mapping[str, Any], timeout: float, meta: Mapping[str, Any] | None
    ) -> ToolResult:
        """See [`Session.call`]."""
        if not self.is_alive:
            raise NotSentError(f"The session with server {self._config.name!r} is over.")
        start = time.monotonic()
        # What the function does with its arguments must not change what the policy wrote.
        found = self._server.answer(name, deepcopy(dict(arguments)))
        if not isinstance(found, types.CallToolResult):
            found = await self._waited(found, timeout)
        seconds = time.monotonic() - start
        if found is None and self.ended.is_set():
            return self._result(self.end_reason, ResultKind.SERVER_ERROR, seconds)
        if found is None:
            return self._timed_out(timeout, seconds, since=start)
        result = observed(found, config=self._config, tool=name, seconds=seconds)
        self.has_answered = True
        return result

    async def _waited(self, answer: Awaitable[types.CallToolResult], timeout: float) -> types.CallToolResult | None:
        """Wait for an answer in a task of the pool, so that the caller's deadline is exact; `None` if there was none in time."""
        done, scope = anyio.Event(), anyio.CancelScope()
        found: types.CallToolResult | None = None

        async def run() -> None:
            nonlocal found
            try:
                with scope:
                    found = await answer
            finally:
                done.set()

        self._tasks.start_soon(run)
        self._waiting.add(done)
        try:
            with anyio.move_on_after(timeout):
                await done.wait()
        finally:
            self._waiting.discard(done)
            scope.cancel()
        return found
