"""The states of trajectories: one process for each, as many as there may be."""

import logging
import os
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Self, TypeVar

import anyio
from anyio import to_thread

from mcp_grpo.errors import ToolServerError
from mcp_grpo.servers.python.process import Process, Reply
from mcp_grpo.servers.python.sandbox import Sandbox


T = TypeVar("T")

logger = logging.getLogger(__name__)

_MAX_REMEMBERED = 10_000  # trajectories without a process, of which it is known what became of their state


def calls_at_once(max_live: int = 64) -> int:
    """
    How many calls a server runs at a time. More than these wait, and time that a call waits here is not its own.

    Args:
        max_live (`int`, *optional*, defaults to `64`):
            See [`States`].

    Returns:
        `int`: The number.
    """
    return min(max_live, max(4, os.cpu_count() or 1))


class StateLostError(Exception):
    """The state of a trajectory was given up while it was not used. Its next call is told so, and is not run."""


class _State:
    def __init__(self) -> None:
        self.lock = anyio.Lock()  # one call at a time
        self.process: Process | None = None
        self.is_running = False
        self.last_used = 0.0
        self.lost: str | None = None


class States:
    """
    Keeps trajectories apart: each has a process of its own, from its first call on.

    Args:
        sandbox ([`Sandbox`]):
            Starts the processes.
        max_live (`int`, *optional*, defaults to `64`):
            Number of processes that are kept. For one more, that which was not used for longest is ended.
        max_idle (`float`, *optional*, defaults to `600.0`):
            Seconds after which a process that is not used is ended.
    """

    def __init__(self, sandbox: Sandbox, *, max_live: int = 64, max_idle: float = 600.0) -> None:
        self._sandbox = sandbox
        self._max_live = max_live
        self._max_idle = max_idle
        self._states: dict[str, _State] = {}  # the one used last comes last
        # With more at a time than there are cores, calls would use up each other's time. And fewer run than live, so that
        # there is always one that is idle, to make room for another.
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
        """
        Run code in the state of a trajectory.

        Args:
            trajectory_id (`str`):
                The trajectory.
            code (`str`):
                The code.

        Returns:
            [`Reply`]: What came of it.

        Raises:
            [`StateLostError`]: If the state had to be given up since the last call.
            [`ToolServerError`]: If there is no process to be had.
        """
        state = self._states.setdefault(trajectory_id, _State())
        async with state.lock, self._running:
            self._states[trajectory_id] = self._states.pop(trajectory_id, state)
            if state.lost is not None:
                lost, state.lost = state.lost, None
                raise StateLostError(lost)
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
        """
        Forget a trajectory.

        Args:
            trajectory_id (`str`):
                The trajectory. It may not be known.
        """
        state = self._states.get(trajectory_id)
        if state is None:
            return
        async with state.lock:
            state.lost = None
            process, state.process = state.process, None
            if process is not None:
                await self._in_thread(process.end)
        if not state.lock.statistics().tasks_waiting:
            self._states.pop(trajectory_id, None)

    async def _take(self) -> Process:
        """A process in which nothing has run yet."""
        self._make_room()
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

    def _make_room(self) -> None:
        # Those that run have a process, or will have one in a moment: as the one has that room is made for.
        occupied = [state for state in self._states.values() if state.process is not None or state.is_running]
        idle = (state for state in occupied if not state.is_running)
        for _ in range(len(occupied) - self._max_live):
            self._give_up(next(idle), f"the server keeps the state of {self._max_live} sessions at a time")
        if len(self._states) > _MAX_REMEMBERED:
            forgotten = [key for key, state in self._states.items() if state.process is None and not _is_used(state)]
            for key in forgotten[: len(self._states) - _MAX_REMEMBERED]:
                del self._states[key]

    def _give_up(self, state: _State, why: str) -> None:
        assert state.process
        process, state.process, state.lost = state.process, None, why
        self._tasks.start_soon(self._in_thread, process.end)

    async def _end_idle(self) -> None:
        while True:
            await anyio.sleep(min(self._max_idle / 4, 30.0))
            now = anyio.current_time()
            for state in list(self._states.values()):
                is_idle = state.process is not None and not _is_used(state)
                if is_idle and now - state.last_used > self._max_idle:
                    self._give_up(state, f"it was not used for {self._max_idle:g} s")

    async def _in_thread(self, function: Callable[[], T]) -> T:
        return await to_thread.run_sync(function, limiter=self._threads)


def _is_used(state: _State) -> bool:
    return state.is_running or state.lock.locked()
