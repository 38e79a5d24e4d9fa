"""When a failing server may be started again."""

import math
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio

from mcp_grpo.errors import ToolServerError


MAX_FAILURES = 7  # in a row, before calls fail at once instead of waiting
FIRST_DELAY = 0.2  # seconds after the first failure; doubled with each, they add up to about 10 s
FIRST_PAUSE = 5.0  # seconds before an open breaker probes the server; doubled with each further failure
MAX_PAUSE = 60.0
SLOW_START = 10.0  # seconds; a start that fails this late opens the breaker, since callers have waited enough


class Breaker:
    """
    Counts the failures of one server in a row, and spaces out the attempts to start it.

    A failure is a failed start, or a session that broke before it answered a single call. The first few are followed by
    short, growing delays during which calls wait. After `MAX_FAILURES` the breaker is *open*: calls fail at once, and the
    server is only probed now and then, one attempt at a time. The first answer to a call closes it.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self._num_failed_starts = 0
        self._num_unanswered = 0  # sessions that broke before any answer
        self._not_before = 0.0
        self._last_failure = -math.inf
        self._last_error: ToolServerError | None = None
        self._recovered = anyio.Event()
        self._probing = anyio.Lock()

    @property
    def num_failures(self) -> int:
        """Number of failures in a row."""
        return self._num_failed_starts + self._num_unanswered

    @property
    def error(self) -> ToolServerError | None:
        """The error of calls that fail at once, while the breaker is open."""
        if self.num_failures < MAX_FAILURES:
            return None
        wait = max(0.0, self._not_before - anyio.current_time())
        return ToolServerError(
            f"The server {self._server!r} has failed {self.num_failures} times in a row; the next attempt is in {wait:.0f} s. "
            f"The last failure: {self._last_error}"
        )

    @asynccontextmanager
    async def attempt(self) -> AsyncGenerator[None, None]:
        """Wait until the server may be started, and count a [`ToolServerError`] as a failure."""
        if self.num_failures == 0:
            async with self._counted():
                yield
            return
        async with self._probing:  # a server in trouble is tried once at a time
            with anyio.move_on_after(max(0.0, self._not_before - anyio.current_time())):
                await self._recovered.wait()
            async with self._counted():
                yield

    def answered(self) -> None:
        """Reset after an answered call, and wake those who wait."""
        if self.num_failures:
            self._num_failed_starts = self._num_unanswered = 0
            self._not_before = 0.0
            self._recovered.set()
            self._recovered = anyio.Event()

    def broke(self, error: ToolServerError, since: float) -> None:
        """Count a session, opened at `since` on the event loop's clock, that broke before it answered a call."""
        if self._is_new(since):
            self._num_unanswered += 1
            self._pause(error)

    @asynccontextmanager
    async def _counted(self) -> AsyncGenerator[None, None]:
        start = anyio.current_time()
        try:
            yield
        except ToolServerError as error:
            if self._is_new(start):
                is_slow = anyio.current_time() - start >= SLOW_START
                self._num_failed_starts += MAX_FAILURES if is_slow else 1
                self._pause(error)
            raise
        self._num_failed_starts = 0

    def _is_new(self, since: float) -> bool:
        """Return whether this is a separate failure: eight sessions that go down together are one incident."""
        return since >= self._last_failure

    def _pause(self, error: ToolServerError) -> None:
        self._last_error, self._last_failure = error, anyio.current_time()
        excess = self.num_failures - MAX_FAILURES
        if excess < 0:
            delay = FIRST_DELAY * 2 ** (self.num_failures - 1)
        else:
            delay = min(MAX_PAUSE, FIRST_PAUSE * 2 ** min(excess, 10))
        # Jittered, so that the servers of many ranks do not all come back at the same time.
        self._not_before = anyio.current_time() + delay * random.uniform(0.5, 1.0)
