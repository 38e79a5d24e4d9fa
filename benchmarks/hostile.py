"""How much longer the calls of innocent servers take while another server does its worst."""

import asyncio
import sys
from contextlib import suppress
from pathlib import Path

from measuring import Check, Part, drive, peak_memory, percentiles, server_config, shown

from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ToolCall


SERVER = Path(__file__).parents[1] / "tests" / "servers" / "hostile.py"
PROCESSES = 4
CALLERS = 8
TURNS = 3  # of each, without the hostile server and with it
MAX_RATIO = 2.0  # of the 95th percentiles
MAX_GROWTH = 100.0  # MB
BEGINS = 1.0  # seconds that it is given to do its worst
ECHO = ToolCall(name="echo", arguments={"text": "hi"})

# What it is asked for once, and then does until it ends.
FLOODS = ("lines", "objects", "replies", "notes", "pings", "unread pings", "long line", "stderr")
# What it is asked for again and again.
REPLIES = ("parts", "many parts", "values")


async def hostile(*, calls: int) -> Part:
    """
    Call innocent servers while a hostile one floods its reader, and while it does not, in turns.

    Args:
        calls (`int`):
            How many calls are made in one turn.

    Returns:
        [`Part`]: What was found.
    """
    calm: list[float] = []
    seconds: dict[str, list[float]] = {how: [] for how in (*FLOODS, *REPLIES)}
    memory_before = peak_memory()
    for _ in range(TURNS):
        for how, found in seconds.items():
            calm += await _calls(None, calls)
            found += await _calls(how, calls)
    growth = peak_memory() - memory_before
    alone = percentiles(calm)
    beside = {how: percentiles(found) for how, found in seconds.items()}
    ratios = {how: found["p95"] / alone["p95"] for how, found in beside.items()}
    worst = max(ratios, key=ratios.__getitem__)
    return Part(
        title=f"A hostile server beside {PROCESSES} innocent processes, {CALLERS} callers",
        rows=[
            ("alone", shown(alone)),
            *[(f"  {how}", f"{shown(found)}; p95 × {ratios[how]:.2f}") for how, found in beside.items()],
            ("peak memory", f"grew by {growth:.0f} MB"),
        ],
        figures={"alone_ms": alone, "beside_ms": beside, "p95_ratios": ratios, "memory_growth_mb": growth},
        checks=[
            Check(
                claim="the 95th percentile of innocent calls at most doubles",
                holds=ratios[worst] <= MAX_RATIO,
                got=f"× {ratios[worst]:.2f} beside {worst!r}",
            ),
            Check(claim="memory is bounded", holds=growth <= MAX_GROWTH, got=f"{growth:.0f} MB more at the peak"),
        ],
    )


async def _calls(how: str | None, calls: int) -> list[float]:
    """How long the calls of the innocent take, with the hostile server at work or idle."""
    enemy = ServerConfig(
        name="hostile", transport="stdio", command=sys.executable, args=("-S", str(SERVER)), protocol="legacy"
    )
    async with ToolPool([server_config(pool_size=PROCESSES), enemy]) as pool:
        await drive(lambda: pool.call(ECHO), callers=CALLERS, calls=20 * CALLERS)  # until all processes are there
        work = asyncio.create_task(_provoke(pool, how)) if how is not None else None
        if work is not None:
            await asyncio.sleep(BEGINS)
        found = await drive(lambda: pool.call(ECHO), callers=CALLERS, calls=calls)
        if work is not None:
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
    return found


async def _provoke(pool: ToolPool, how: str) -> None:
    while True:
        await pool.call(ToolCall(name="do", arguments={"how": how}))
        if how in FLOODS:
            await asyncio.Event().wait()
