"""The states of trajectories: one process for each, up to a limit."""

import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Self, TypeVar

import anyio
from anyio import to_thread

from mcp_grpo.desk.servers.python.process import Process, Reply
from mcp_grpo.desk.servers.python.sandbox import Sandbox
from mcp_grpo.errors import ToolServerError


T = TypeVar("T")

logger = logging.getLogger(__name__)

MAX_LIVE = 64  # trajectories with a state
MAX_WAIT = 20.0  # seconds for a place; less than a call may take, so that its trajectory is told why

_MAX_REMEMBERED = 10_000  # trajectories without a place, of which it is known what became of their state


def calls_at_once(max_live: int = MAX_LIVE) -> int:
    """Return how many calls a server runs at a time; waiting for a place does not count as a call's time."""
    return min(max_live, max(4, os.cpu_count() or 1))


class StateLostError(ToolServerError):
    """The idle state of a trajectory was dropped. Its next call reports this and is not run."""


class _State:
    def __init__(self) -> None:
        self.lock = anyio.Lock()  # one call at a time
        self.process: Process | None = None
        self.has_place = False
        self.is_running = False
        self.last_used = 0.0
        self.lost: str | None = None


class States:
    """
    Isolates trajectories: each has a process of its own from its first call on.

    There are places for `max_live` of them; others wait until one is reset, or was not used for `max_idle` seconds.
    """

    def __init__(
        self, sandbox: Sandbox, *, max_live: int = MAX_LIVE, max_idle: float = 600.0, max_wait: float = MAX_WAIT
    ) -> None:
        self._sandbox = sandbox
        self._max_live = max_live
        self._max_idle = max_idle
        self._max_wait = max_wait
        self._states: dict[str, _State] = {}  # the one used last comes last
        self._places = anyio.Semaphore(max_live)
        # With more at a time than there are cores, calls would use up each other's time.
        self._running = anyio.CapacityLimiter(calls_at_once(max_live))
        self._threads = anyio.CapacityLimiter(2 * max_live + 8)  # never waited for
        self._ready: Process | None = None
        self._is_preparing = False
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._tasks = await self._stack.enter_async_context(anyio.create_task_group())
        self._tasks.start_soon(self._end_idle)
        self._prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tasks.cancel_scope.cancel()
        await self._stack.aclose()
        for process in (self._ready, *(state.process for state in self._states.values())):
            if process is not None:
                process.end()

    async def run(self, trajectory_id: str, code: str) -> Reply:
        """Run code in the state of a trajectory."""
        state = self._states.setdefault(trajectory_id, _State())
        async with state.lock:
            self._states[trajectory_id] = self._states.pop(trajectory_id, state)
            if state.lost is not None:
                lost, state.lost = state.lost, None
                raise StateLostError(lost)
            await self._place(state)
            async with self._running:
                state.is_running = True
                try:
                    if state.process is None:
                        state.process = await self._take()
                    reply = await self._in_thread(partial(state.process.call, code))
                    if reply.ended is not None:
                        state.process = None
                finally:
                    state.is_running = False
                    state.last_used = anyio.current_time()
        return reply

    async def reset(self, trajectory_id: str) -> None:
        """Forget a trajectory."""
        state = self._states.get(trajectory_id)
        if state is None:
            return
        async with state.lock:
            state.lost = None
            process, state.process = state.process, None
            if process is not None:
                await self._in_thread(process.end)
            self._leave(state)
        if not state.lock.statistics().tasks_waiting:
            self._states.pop(trajectory_id, None)

    async def _place(self, state: _State) -> None:
        """Wait for a place. Raises [`ToolServerError`] if none gets free in time."""
        if state.has_place:
            return
        with anyio.move_on_after(self._max_wait):
            await self._places.acquire()
            state.has_place = True
        if not state.has_place:
            raise ToolServerError(
                f"All places of the Python server, {self._max_live}, are taken, and none got free in {self._max_wait:g} s. "
                f"Raise `--max-live`, or have no more trajectories at a time (`max_trajectories`), each with a reset at its end."
            )
        state.last_used = anyio.current_time()
        self._forget_some()

    def _leave(self, state: _State) -> None:
        if state.has_place:
            state.has_place = False
            self._places.release()

    async def _take(self) -> Process:
        """Take a process that has run nothing yet."""
        process, self._ready = self._ready, None
        self._prepare()
        return process if process is not None else await self._start()

    async def _start(self) -> Process:
        process = self._sandbox.start()  # on this thread: the process would end with another
        try:
            await self._in_thread(process.open)
        except BaseException:
            process.end()
            raise
        return process

    def _prepare(self) -> None:
        if self._ready is None and not self._is_preparing:
            self._is_preparing = True
            self._tasks.start_soon(self._start_ready)

    async def _start_ready(self) -> None:
        try:
            self._ready = await self._start()
        except ToolServerError as error:  # the call that needs one will tell
            logger.warning("%s", error)
        finally:
            self._is_preparing = False

    def _forget_some(self) -> None:
        if len(self._states) > _MAX_REMEMBERED:
            forgotten = [key for key, state in self._states.items() if not state.has_place and not _is_used(state)]
            for key in forgotten[: len(self._states) - _MAX_REMEMBERED]:
                del self._states[key]

    async def _end_idle(self) -> None:
        while True:
            await anyio.sleep(min(self._max_idle / 4, 30.0))
            now = anyio.current_time()
            for state in list(self._states.values()):
                if state.has_place and not _is_used(state) and now - state.last_used > self._max_idle:
                    self._give_up(state)

    def _give_up(self, state: _State) -> None:
        self._leave(state)
        if state.process is not None:
            process, state.process = state.process, None
            state.lost = f"it was not used for {self._max_idle:g} s"
            self._tasks.start_soon(self._in_thread, process.end)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await to_thread.run_sync(function, limiter=self._threads)


def _is_used(state: _State) -> bool:
    return state.is_running or state.lock.locked()
