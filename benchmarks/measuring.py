"""What all parts of the benchmark use: the server, its journal, clocks, and what a process holds on to."""

import asyncio
import gc
import json
import logging
import resource
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from mcp import Client, StdioServerParameters

from mcp_grpo.tools import ServerConfig
from mcp_grpo.types import Task


SERVER = Path(__file__).parent / "bench_server.py"
# Without `site`, which in an environment full of packages takes as long as the rest.
ARGS = ("-S", str(SERVER))
TASK = Task(task_id="benchmark", prompt=())
SETTLE_TIME = 5.0  # seconds that the last thread may take to be gone
MAX_LINE = 100  # characters shown of what is logged

Figures = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Check:
    """
    One thing that must be true.

    Args:
        claim (`str`):
            What.
        holds (`bool`):
            Whether it is.
        got (`str`):
            What was found.
    """

    claim: str
    holds: bool
    got: str


@dataclass(frozen=True, kw_only=True)
class Part:
    """
    What one part of the benchmark found.

    Args:
        title (`str`):
            What was measured.
        rows (`list[tuple[str, str]]`):
            The figures, as they are shown.
        figures (`Figures`):
            All figures.
        checks (`list[Check]`):
            What had to be true.
    """

    title: str
    rows: list[tuple[str, str]]
    figures: Figures
    checks: list[Check]


class Journal:
    """
    What the server processes say about themselves.

    Args:
        path (`Path`):
            File that they write to.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def times(self, event: str) -> list[float]:
        """When something happened, on the clock of `time.monotonic`, in order."""
        return sorted(entry["time"] for entry in self._entries() if entry["event"] == event)

    def count(self, event: str) -> int:
        """How often something happened: `start`, `crash` or `end`."""
        return len(self.times(event))

    def survivors(self) -> list[int]:
        """The processes that still exist, wherever they are."""
        return sorted({entry["pid"] for entry in self._entries()} & set(psutil.pids()))

    def _entries(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]


@dataclass(frozen=True)
class Footprint:
    """What this process holds on to."""

    processes: int
    tasks: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> "Footprint":
        """Take it. Call it from a task."""
        gc.collect()
        process = psutil.Process()
        return cls(
            processes=len(process.children(recursive=True)),
            tasks=len(asyncio.all_tasks()),
            threads=threading.active_count(),
            files=process.num_fds(),
        )

    @classmethod
    async def settled(cls, before: "Footprint") -> "Footprint":
        """Take it as soon as it is no larger than before: the thread that waited for a process ends after the process."""
        deadline = time.monotonic() + SETTLE_TIME
        while (after := cls.now()) != before and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return after

    def check(self, before: "Footprint", journal: Journal) -> Check:
        """That nothing has come to stay since before, and that no server process is left, wherever it is."""
        survivors = journal.survivors()
        extra = {name: value for name, value in asdict(self).items() if value != getattr(before, name)}
        return Check(
            claim="nothing is left after closing",
            holds=not extra and not survivors,
            got=f"before {asdict(before)}, after {asdict(self)}, server processes alive: {survivors or 'none'}",
        )


@dataclass
class Cpu:
    """CPU time that is used from here on, by this process and by its children that have ended."""

    _own: float = field(default_factory=time.process_time)
    _children: float = field(default_factory=lambda: _children_time())

    @property
    def own(self) -> float:
        """Seconds of this process."""
        return time.process_time() - self._own

    @property
    def children(self) -> float:
        """Seconds of all children that were waited for."""
        return _children_time() - self._children


class LogCounter(logging.Handler):
    """Counts what is logged, instead of showing it a thousand times."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts = Counter[str]()

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler`."""
        self.counts[f"{record.levelname} {record.name}: {record.getMessage().splitlines()[0][:MAX_LINE]}"] += 1

    def take(self) -> dict[str, int]:
        """The counts since the last time."""
        counts, self.counts = dict(self.counts), Counter()
        return counts


def server_config(journal: Journal | None = None, **options: Any) -> ServerConfig:
    """The benchmark's server, with these options of a [`ServerConfig`]."""
    args = ARGS if journal is None else (*ARGS, str(journal.path))
    return ServerConfig(
        name="bench", transport="stdio", command=sys.executable, args=args, protocol="legacy", **options
    )


async def open_bare_client(stack: AsyncExitStack) -> Client:
    """The SDK's own client of the same server. Its tools are listed, since the first call would do so otherwise."""
    parameters = StdioServerParameters(command=sys.executable, args=list(ARGS))
    client = await stack.enter_async_context(Client(parameters, mode="legacy"))
    await client.list_tools()
    return client


async def drive(call: Callable[[], Awaitable[object]], *, callers: int, calls: int) -> list[float]:
    """
    Make calls from several callers, each of which makes the next one when it has its answer.

    Args:
        call (`Callable`):
            Makes one call.
        callers (`int`):
            How many calls are under way at a time.
        calls (`int`):
            How many are made in all.

    Returns:
        `list[float]`: How long each took, in seconds.
    """
    seconds: list[float] = []
    left = iter(range(calls))

    async def work() -> None:
        for _ in left:
            start = time.perf_counter()
            await call()
            seconds.append(time.perf_counter() - start)

    await asyncio.gather(*[work() for _ in range(callers)])
    return seconds


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """The median, the 95th and the 99th percentile and the largest, in milliseconds."""
    if len(seconds) < 2:
        return dict.fromkeys(("p50", "p95", "p99", "max"), 1e3 * sum(seconds))
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50": 1e3 * cuts[49], "p95": 1e3 * cuts[94], "p99": 1e3 * cuts[98], "max": 1e3 * max(seconds)}


def difference(ours: dict[str, float], theirs: dict[str, float]) -> dict[str, float]:
    """Our percentiles less theirs."""
    return {name: ours[name] - theirs[name] for name in ours}


def shown(milliseconds: dict[str, float], *names: str) -> str:
    """Percentiles in one line."""
    return ", ".join(f"{name} {milliseconds[name]:.2f} ms" for name in names or ("p50", "p95", "p99"))


def peak_memory() -> float:
    """The most memory this process has had, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _children_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
