"""How long a trajectory waits for a process of its own, and whether it is really its own."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from measuring import TASK, Check, Footprint, Journal, Part, percentiles, server_config, shown

from mcp_grpo.tools import ToolPool
from mcp_grpo.types import ToolCall


WORKERS = 8
SPARES = 8
NUM_CALLS = 3
MAX_WAIT_MS = 20.0  # 95th percentile, with spares
MAX_LOAD = 0.6  # of the rate at which processes can be replaced
START_TIME = 60.0  # seconds for the pool to start its processes
READY_TIME = 0.3  # seconds that a process may take to be ready when it has started


@dataclass
class Waits:
    """What the leases of one pool found."""

    first: list[float] = field(default_factory=list[float])
    """How long those waited that came right after the pool was opened, in seconds."""
    later: list[float] = field(default_factory=list[float])
    """How long those waited that came when all processes had been started."""
    pids: list[int] = field(default_factory=list[int])
    num_stale: int = 0
    """How many leases found a process that had been called before."""
    num_failed: int = 0
    """How many calls failed."""
    num_starts: int = 0
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Later leases per second."""
        return len(self.later) / self.seconds


async def leases(folder: Path, *, num_leases: int, hold: float) -> Part:
    """
    Lease processes for trajectories: with spares, without, and with a tool that resets them.

    Args:
        folder (`Path`):
            For the servers' journal.
        num_leases (`int`):
            How many leases each worker takes, one after the other.
        hold (`float`):
            How long it keeps one, in seconds. Longer if processes cannot be replaced at that rate.

    Returns:
        [`Part`]: What was found.
    """
    journal, before = Journal(folder / "leases.jsonl"), Footprint.now()
    saturated = await _lease_all(journal, num_leases=max(3, num_leases // 4), hold=0.0, spares=0)
    hold = max(hold, WORKERS / (MAX_LOAD * saturated.rate))
    spared = await _lease_all(journal, num_leases=num_leases, hold=hold, spares=SPARES)
    unspared = await _lease_all(journal, num_leases=num_leases, hold=hold, spares=0)
    reset = await _lease_all(journal, num_leases=num_leases, hold=hold, spares=SPARES, reset_tool="reset")
    after = await Footprint.settled(before)

    runs = {f"{SPARES} spares": spared, "no spares": unspared, "reset tool": reset}
    rows = [
        ("processes can be replaced", f"{saturated.rate:.1f} times a second, with nothing else to do"),
        ("workers", f"{WORKERS}, each {num_leases} leases of {hold:.2f} s with {NUM_CALLS} calls"),
    ]
    for name, run in runs.items():
        rows.append((f"wait for a lease, {name}", shown(percentiles(run.later), "p50", "p95", "max")))
        rows.append(("  right after opening", shown(percentiles(run.first), "p50", "p95", "max")))
        rows.append(("  load", f"{run.rate:.1f} leases/s, {run.num_starts} starts of processes"))
    figures = {
        "workers": WORKERS,
        "leases_per_worker": num_leases,
        "hold": hold,
        "replacements_per_second": saturated.rate,
        "runs": {
            name: {
                "wait_ms": percentiles(run.later),
                "first_wait_ms": percentiles(run.first),
                "leases_per_second": run.rate,
                "starts": run.num_starts,
                "stale": run.num_stale,
                "failed_calls": run.num_failed,
            }
            for name, run in runs.items()
        },
    }
    p95 = percentiles(spared.later)["p95"]
    checks = [
        Check(
            claim=f"with spares, 95 % of leases wait less than {MAX_WAIT_MS:g} ms",
            holds=p95 < MAX_WAIT_MS,
            got=f"{p95:.2f} ms",
        ),
        *[_is_private(name, run) for name, run in runs.items() if run is not reset],
        Check(
            claim="reset tool: no process is started anew",
            holds=reset.num_starts == WORKERS + SPARES,
            got=f"{reset.num_starts} starts",
        ),
        Check(
            claim="reset tool: every lease finds a process without memory",
            holds=reset.num_stale == 0,
            got=f"{reset.num_stale} did not",
        ),
        Check(
            claim="no call fails",
            holds=not any(run.num_failed for run in runs.values()),
            got=", ".join(f"{name}: {run.num_failed}" for name, run in runs.items()),
        ),
        after.check(before, journal),
    ]
    return Part(title="Leases of whole processes", rows=rows, figures=figures, checks=checks)


def _is_private(name: str, run: Waits) -> Check:
    return Check(
        claim=f"{name}: every lease has a process that nobody has had",
        holds=len(set(run.pids)) == len(run.pids) and run.num_stale == 0,
        got=f"{len(run.pids)} leases, {len(set(run.pids))} processes, {run.num_stale} that had been called",
    )


async def _lease_all(
    journal: Journal, *, num_leases: int, hold: float, spares: int, reset_tool: str | None = None
) -> Waits:
    config = server_config(journal, isolation="exclusive", pool_size=WORKERS, spares=spares, reset_tool=reset_tool)
    waits, num_before = Waits(), journal.count("start")

    async def work(pool: ToolPool, times: list[float], number: int, hold: float) -> None:
        for _ in range(number):
            await _lease_once(pool, waits, times, hold)

    async with ToolPool([config]) as pool:
        await asyncio.gather(*[work(pool, waits.first, 1, 0.0) for _ in range(WORKERS)])
        # As while a run loads its model: all processes start, and those that have just been given back are replaced.
        num_replaced = 0 if reset_tool else WORKERS
        await _wait_for_starts(journal, num_before + config.num_sessions + num_replaced)
        start = time.perf_counter()
        await asyncio.gather(*[work(pool, waits.later, num_leases, hold) for _ in range(WORKERS)])
        waits.seconds = time.perf_counter() - start
        waits.num_starts = journal.count("start") - num_before
    return waits


async def _lease_once(pool: ToolPool, waits: Waits, times: list[float], hold: float) -> None:
    start = time.perf_counter()
    async with pool.lease(TASK) as lease:
        times.append(time.perf_counter() - start)
        result = await lease.call(ToolCall(name="whoami", arguments={}))
        if result.is_error:
            waits.num_failed += 1
        else:
            found = json.loads(result.text)
            waits.pids.append(found["pid"])
            waits.num_stale += found["num_calls"] != 1
        for _ in range(NUM_CALLS - 1):
            waits.num_failed += (await lease.call(ToolCall(name="echo", arguments={"text": "hi"}))).is_error
        await asyncio.sleep(hold)


async def _wait_for_starts(journal: Journal, number: int) -> None:
    deadline = time.monotonic() + START_TIME
    while journal.count("start") < number and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    await asyncio.sleep(READY_TIME)
