"""How long an event loop was held up, on a machine that may be busy with other work."""

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import anyio


MAX_WAIT = 10.0  # seconds of the clock; what holds a loop up without computing does it for longer, or for good


@asynccontextmanager
async def longest_stall() -> AsyncGenerator[Callable[[], float], None]:
    """
    Tell for how long the event loop was held up at most: seconds that its thread computed between two beats, as what other
    processes take from it is nobody's fault here. Time of the clock counts in full where it is far too much.
    """
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            start, computed = time.perf_counter(), time.thread_time()
            await anyio.sleep(0.01)
            waited = time.perf_counter() - start - 0.01
            longest = max(longest, waited if waited > MAX_WAIT else min(waited, time.thread_time() - computed))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        yield lambda: longest
        tasks.cancel_scope.cancel()
