"""What a call through the pool costs more than one through the SDK's own client, measured side by side."""

import gc
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from measuring import (
    TASK,
    Check,
    Part,
    difference,
    drive,
    open_bare_client,
    percentiles,
    server_config,
    shown,
)

from mcp_grpo.tools import ToolPool
from mcp_grpo.types import ToolCall


MAX_RATIO = 1.15  # of CPU time per call, against the client that has no deadline
CALLERS = 16
TIMEOUT = 30.0
ARGUMENTS = {"text": "The quick brown fox jumps over the lazy dog."}


async def overhead(*, rounds: int, calls: int) -> Part:
    """
    Compare the pool with a bare client.

    Args:
        rounds (`int`):
            How many rounds there are, in which each has a turn; the median over them counts.
        calls (`int`):
            How many calls a turn has. Few, so that what else the machine does meets all alike.

    Returns:
        [`Part`]: What was found.
    """
    async with AsyncExitStack() as stack:
        client = await open_bare_client(stack)
        config = server_config(max_inflight=CALLERS, call_timeout=TIMEOUT)
        pool = await stack.enter_async_context(ToolPool([config]))
        lease = await stack.enter_async_context(pool.lease(TASK))
        tool_call = ToolCall(name="echo", arguments=ARGUMENTS)
        lanes: dict[str, Callable[[], Awaitable[object]]] = {
            "bare": lambda: client.call_tool("echo", ARGUMENTS),
            "bare with a deadline": lambda: client.call_tool("echo", ARGUMENTS, read_timeout_seconds=TIMEOUT),
            "pool": lambda: lease.call(tool_call),
        }
        cpu: dict[str, list[float]] = {name: [] for name in lanes}
        latency: dict[str, list[float]] = {name: [] for name in lanes}
        for name in lanes:
            await drive(lanes[name], callers=CALLERS, calls=calls)  # once for nothing: caches and lazy imports
        for number in range(rounds):
            gc.collect()
            first = number % len(lanes)
            for name in (list(lanes) * 2)[first : first + len(lanes)]:  # each has every place as often as the others
                start = time.process_time()
                latency[name] += await drive(lanes[name], callers=CALLERS, calls=calls)
                cpu[name].append((time.process_time() - start) / calls)

    waits = {name: percentiles(seconds) for name, seconds in latency.items()}
    bares = [name for name in lanes if name != "pool"]
    ratios = {name: [ours / theirs for ours, theirs in zip(cpu["pool"], cpu[name], strict=True)] for name in bares}
    ratio = {name: statistics.median(values) for name, values in ratios.items()}
    added = {name: difference(waits["pool"], waits[name]) for name in bares}
    figures = {
        "rounds": rounds,
        "calls_per_round": calls,
        "callers": CALLERS,
        "cpu_us_per_call": {
            name: {"median": 1e6 * statistics.median(v), "min": 1e6 * min(v)} for name, v in cpu.items()
        },
        "cpu_ratio": {name: {"median": ratio[name], "rounds": ratios[name]} for name in bares},
        "latency_ms": waits,
        "added_latency_ms": added,
    }
    rows = [("callers, rounds", f"{CALLERS} callers, {rounds} rounds of {calls} calls each, in turns")]
    for name, values in cpu.items():
        per_call = f"{1e6 * statistics.median(values):.0f} µs of CPU per call (least {1e6 * min(values):.0f})"
        rows.append((name, f"{per_call}; {shown(waits[name])}"))
    for name in bares:
        low, _, high = statistics.quantiles(ratios[name], n=4)
        spread = f"half of the rounds between {low:.2f} and {high:.2f}"
        rows.append((f"pool against {name}", f"{ratio[name]:.3f}× the CPU ({spread}); added: {shown(added[name])}"))
    check = Check(
        claim=f"a call takes at most {MAX_RATIO}× the CPU of a bare client's",
        holds=ratio["bare"] <= MAX_RATIO,
        got=f"{ratio['bare']:.3f}×, the median of {rounds} pairs",
    )
    return Part(title="Overhead over the SDK's client", rows=rows, figures=figures, checks=[check])
