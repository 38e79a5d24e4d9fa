"""Many trajectories on few processes that crash, hang and say too much: nothing hangs, is lost, mixed up or left."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import anyio
from measuring import (
    TASK,
    Check,
    Cpu,
    Figures,
    Footprint,
    Journal,
    LogCounter,
    Part,
    difference,
    drive,
    open_bare_client,
    peak_memory,
    percentiles,
    server_config,
    shown,
)

from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, ToolCall, ToolResult


TITLE = "Soak: shared processes that crash, hang and say too much"
MAX_RESULT_BYTES = 100_000
MAX_INFLIGHT = 8
MAX_LATE = 0.001  # share of calls that may miss their deadline because the machine is busy
RECOVERY_TIME = 15.0  # seconds after the last call until all processes must be back
# What may become of a call. Whatever is in flight when its process crashes is a server error, through no fault of its own.
OUTCOMES = {
    "echo": {ResultKind.OK, ResultKind.SERVER_ERROR, ResultKind.TIMEOUT},
    "crash": {ResultKind.SERVER_ERROR},
    "hang": {ResultKind.TIMEOUT, ResultKind.SERVER_ERROR},
    "oversize": {ResultKind.TOOL_ERROR, ResultKind.SERVER_ERROR},
}


@dataclass(frozen=True, kw_only=True)
class Record:
    """A call, what came back, and how long it took with all waiting."""

    call: ToolCall
    result: ToolResult
    seconds: float


@dataclass(kw_only=True)
class Observed:
    """What was seen of a soak."""

    num_expected: int
    records: list[Record] = field(default_factory=list[Record])
    seconds: float = 0.0
    close_seconds: float = 0.0
    client_cpu: float = 0.0
    server_cpu: float = 0.0
    live: set[int] = field(default_factory=set[int])
    """The processes that answered afterwards."""
    num_starts: int = 0
    num_crashes: int = 0
    num_ended: int = 0
    """How many processes had to leave because they did not react any more."""

    def kinds(self, fault: str) -> Counter[ResultKind]:
        """What became of the calls with a fault."""
        return Counter(record.result.kind for record in self.records if record.call.name == fault)

    @property
    def echoes(self) -> list[Record]:
        """The calls that had to succeed, and did."""
        return [r for r in self.records if r.call.name == "echo" and r.result.kind is ResultKind.OK]

    @property
    def num_collateral(self) -> int:
        """How many calls failed because their process crashed by another one, or was replaced."""
        return sum(self.kinds(fault)[ResultKind.SERVER_ERROR] for fault in OUTCOMES if fault != "crash")

    @property
    def num_mixed_up(self) -> int:
        """How many echoes are not of the text that was sent."""
        return sum(record.result.text != record.call.arguments["text"] for record in self.echoes)


async def soak(
    folder: Path,
    log: LogCounter,
    *,
    trajectories: int,
    calls: int,
    processes: int,
    shares: Mapping[str, float],
    call_timeout: float,
    deadline: float,
    seed: int,
) -> Part:
    """
    Run the soak test.

    Args:
        folder (`Path`):
            For the servers' journal.
        log (`LogCounter`):
            Counts what is logged.
        trajectories (`int`):
            How many there are, all at once.
        calls (`int`):
            How many calls each of them makes, one after the other.
        processes (`int`):
            How many server processes they share.
        shares (`Mapping[str, float]`):
            How many of all calls are a `crash`, a `hang` and an `oversize`; the others are an `echo`.
        call_timeout (`float`):
            Deadline of a call, in seconds.
        deadline (`float`):
            Deadline of the whole, in seconds.
        seed (`int`):
            Seed of the faults.

    Returns:
        [`Part`]: What was found.
    """
    journal = Journal(folder / "soak.jsonl")
    config = server_config(
        journal,
        pool_size=processes,
        max_inflight=MAX_INFLIGHT,
        call_timeout=call_timeout,
        max_result_bytes=MAX_RESULT_BYTES,
    )
    seen = Observed(num_expected=trajectories * calls)
    before, memory_before = Footprint.now(), peak_memory()
    with anyio.move_on_after(deadline) as scope:
        await _soak(config, journal, seen, [f"{seed}/{n}" for n in range(trajectories)], calls, shares)
    if scope.cancelled_caught:
        got = f"after {deadline:g} s, {len(seen.records)} of {seen.num_expected} calls had returned"
        check = Check(claim="nothing hangs", holds=False, got=got)
        return Part(title=TITLE, rows=[], figures={"log": log.take()}, checks=[check])
    after, memory_after, logged = await Footprint.settled(before), peak_memory(), log.take()
    # The same without faults: as many callers on as many processes, through the pool and with clients of the SDK; and, since
    # the pool has callers wait where a client does not, with as many callers as the pool has calls in flight.
    calm, calm_service = await _pool_latency(processes, callers=trajectories, calls=len(seen.echoes))
    bare = await _bare_latency(processes, callers=trajectories, calls=len(seen.echoes))
    bare_service = await _bare_latency(processes, callers=processes * MAX_INFLIGHT, calls=len(seen.echoes))

    latency = percentiles([record.seconds for record in seen.echoes])
    service = percentiles([record.result.seconds for record in seen.echoes])
    num_calls = len(seen.records)
    figures: Figures = {
        "trajectories": trajectories,
        "calls": num_calls,
        "processes": processes,
        "shares": dict(shares),
        "call_timeout": call_timeout,
        "seconds": seen.seconds,
        "close_seconds": seen.close_seconds,
        "calls_per_second": num_calls / seen.seconds,
        "kinds_by_fault": {fault: dict(seen.kinds(fault)) for fault in OUTCOMES},
        "collateral_server_errors": seen.num_collateral,
        "echo_latency_ms": {"soak": latency, "pool_without_faults": calm, "bare_without_faults": bare},
        "echo_service_ms": {"soak": service, "pool_without_faults": calm_service, "bare_without_faults": bare_service},
        "added_latency_ms": difference(latency, bare),
        "added_service_ms": difference(service, bare_service),
        "starts": seen.num_starts,
        "crashes": seen.num_crashes,
        "ended_for_silence": seen.num_ended,
        "client_cpu_ms_per_call": 1e3 * seen.client_cpu / num_calls,
        "server_cpu_ms_per_call": 1e3 * seen.server_cpu / num_calls,
        "peak_memory_mb": {"before": memory_before, "after": memory_after},
        "footprint": {"before": asdict(before), "after": asdict(after)},
        "log": logged,
    }
    rows = [
        ("calls", f"{num_calls} of {trajectories} trajectories on {processes} processes, in {seen.seconds:.1f} s"),
        ("throughput", f"{num_calls / seen.seconds:.0f} calls/s"),
        *[(f"  {fault}", _in_words(seen.kinds(fault))) for fault in OUTCOMES],
        ("collateral", f"{seen.num_collateral} calls were in flight on a process that crashed or was replaced"),
        (f"echo, with all waiting ({trajectories} callers)", shown(latency)),
        ("  pool, same callers, no faults", shown(calm)),
        ("  bare clients, same callers, no faults", shown(bare)),
        ("  added to bare clients", shown(difference(latency, bare))),
        (f"echo, from sending to reply ({processes * MAX_INFLIGHT} in flight)", shown(service)),
        ("  pool, no faults", shown(calm_service)),
        ("  bare clients, as many callers, no faults", shown(bare_service)),
        ("  added to bare clients", shown(difference(service, bare_service))),
        ("starts of processes", f"{seen.num_starts}: {processes} first ones, {seen.num_starts - processes} restarts"),
        ("ends of processes", f"{seen.num_crashes} crashes, {seen.num_ended} replaced for their silence"),
        (
            "CPU per call",
            f"client {1e3 * seen.client_cpu / num_calls:.2f} ms, "
            f"servers with their starts {1e3 * seen.server_cpu / num_calls:.2f} ms",
        ),
        ("peak memory", f"{memory_after:.0f} MB, of which {memory_before:.0f} MB before the first call"),
        ("closing", f"{seen.close_seconds:.2f} s"),
        ("logged", "; ".join(f"{count}× {line}" for line, count in logged.items()) or "nothing"),
    ]
    checks = [*_checks(seen, processes), after.check(before, journal), _no_errors(logged)]
    return Part(title=TITLE, rows=rows, figures=figures, checks=checks)


async def _soak(
    config: ServerConfig,
    journal: Journal,
    seen: Observed,
    names: list[str],
    num_calls: int,
    shares: Mapping[str, float],
) -> None:
    cpu = Cpu()
    async with ToolPool([config]) as pool:
        start = time.perf_counter()
        await asyncio.gather(*[_trajectory(pool, name, num_calls, shares, seen.records) for name in names])
        seen.seconds, seen.client_cpu = time.perf_counter() - start, cpu.own
        seen.live = await _live_processes(pool, config.num_sessions)
        seen.num_starts, seen.num_crashes = journal.count("start"), journal.count("crash")
        seen.num_ended = journal.count("end")
        start = time.perf_counter()
    seen.close_seconds, seen.server_cpu = time.perf_counter() - start, cpu.children


async def _trajectory(
    pool: ToolPool, name: str, num_calls: int, shares: Mapping[str, float], records: list[Record]
) -> None:
    faults = random.Random(name)
    async with pool.lease(TASK) as lease:
        for index in range(num_calls):
            call = _drawn_call(faults.random(), shares, text=f"{name}/{index}")
            start = time.perf_counter()
            result = await lease.call(call)
            records.append(Record(call=call, result=result, seconds=time.perf_counter() - start))


def _drawn_call(number: float, shares: Mapping[str, float], text: str) -> ToolCall:
    for fault, share in shares.items():
        if number < share:
            return ToolCall(name=fault, arguments={"size": 2 * MAX_RESULT_BYTES} if fault == "oversize" else {})
        number -= share
    return ToolCall(name="echo", arguments={"text": text})


async def _live_processes(pool: ToolPool, processes: int) -> set[int]:
    """The processes that answer, once as many do as there should be; those that do at the deadline, if not."""
    pids: set[int] = set()

    async def ask() -> None:
        result = await pool.call(ToolCall(name="whoami", arguments={}))
        if not result.is_error:
            pids.add(json.loads(result.text)["pid"])

    with anyio.move_on_after(RECOVERY_TIME):
        while len(pids) < processes:
            pids.clear()
            await asyncio.gather(*[ask() for _ in range(processes * MAX_INFLIGHT)])
    return pids


async def _bare_latency(processes: int, *, callers: int, calls: int) -> dict[str, float]:
    """What a call takes with clients of the SDK, one for each process, when nothing fails."""
    async with AsyncExitStack() as stack:
        clients = itertools.cycle([await open_bare_client(stack) for _ in range(processes)])
        return percentiles(
            await drive(lambda: next(clients).call_tool("echo", {"text": "hi"}), callers=callers, calls=calls)
        )


async def _pool_latency(processes: int, *, callers: int, calls: int) -> tuple[dict[str, float], dict[str, float]]:
    """What a call takes with the pool when nothing fails: with all waiting, and from sending to reply."""
    service: list[float] = []
    async with ToolPool([server_config(pool_size=processes, max_inflight=MAX_INFLIGHT)]) as pool:
        await _live_processes(pool, processes)
        async with pool.lease(TASK) as lease:

            async def call() -> None:
                service.append((await lease.call(ToolCall(name="echo", arguments={"text": "hi"}))).seconds)

            return percentiles(await drive(call, callers=callers, calls=calls)), percentiles(service)


def _checks(seen: Observed, processes: int) -> list[Check]:
    num_calls, num_late = len(seen.records), seen.kinds("echo")[ResultKind.TIMEOUT]
    strange = [f"{fault}: {kind}" for fault in OUTCOMES for kind in seen.kinds(fault).keys() - OUTCOMES[fault]]
    return [
        Check(
            claim="every call returned one result",
            holds=num_calls == seen.num_expected,
            got=f"{num_calls} results of {seen.num_expected} calls",
        ),
        Check(
            claim="every result is of a kind that its fault explains",
            holds=not strange,
            got=", ".join(strange) or "no other",
        ),
        Check(
            claim="no reply was mixed up",
            holds=seen.num_mixed_up == 0,
            got=f"{seen.num_mixed_up} of {len(seen.echoes)} echoes",
        ),
        Check(
            claim="calls that can be answered are answered in time",
            holds=num_late <= MAX_LATE * num_calls,
            got=f"{num_late} were not",
        ),
        Check(
            claim="every process that ended was replaced",
            holds=seen.num_starts == processes + seen.num_crashes + seen.num_ended,
            got=f"{seen.num_starts} starts for {processes} processes, {seen.num_crashes} crashes, {seen.num_ended} replaced",
        ),
        Check(
            claim="afterwards all processes answer",
            holds=len(seen.live) == processes,
            got=f"{len(seen.live)} of {processes}",
        ),
    ]


def _no_errors(logged: Mapping[str, int]) -> Check:
    errors = [line for line in logged if line.startswith(("ERROR", "CRITICAL"))]
    return Check(claim="no error was logged", holds=not errors, got="; ".join(errors) or "none")


def _in_words(counts: Counter[ResultKind]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) or "none"
