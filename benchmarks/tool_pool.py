"""
Measure the tool pool, and check what it promises, on real server processes.

    make benchmark

or, in an environment that has mcp_grpo and psutil:

    python benchmarks/tool_pool.py [--quick] [--json figures.json] [--parts soak hostile overhead leases]

Four parts. **Soak**: 512 trajectories make 20 calls each on 8 shared processes, and one call in eight makes its process
crash, is never answered, or is answered with too much; nothing may hang, be lost, be mixed up or be left behind.
**Hostile**: how much longer the calls of innocent servers take while another one floods its reader. **Overhead**: what a call
costs more than with the SDK's own client, in turns. **Leases**: how long a trajectory waits for a process of its own, with
spares and without, and whether nobody has had it before.

Exits with 1, and says why, if something does not hold. Figures depend on the machine and on what else it does; ratios are
taken within one run.
"""

import argparse
import asyncio
import faulthandler
import gc
import json
import logging
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hostile import hostile
from leases import leases
from measuring import LogCounter, Part
from overhead import overhead
from rich.console import Console
from rich.table import Table
from soak import soak


PARTS = ("soak", "hostile", "overhead", "leases")
QUICK = {
    "trajectories": 64,
    "calls": 8,
    "processes": 4,
    "call_timeout": 0.5,
    "hostile_calls": 300,
    "rounds": 51,
    "leases": 2,
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the benchmark; see `--help`."""

    parts: list[str]
    quick: bool
    json: Path | None
    seed: int
    trajectories: int
    calls: int
    processes: int
    crash: float
    hang: float
    oversize: float
    call_timeout: float
    deadline: float
    hostile_calls: int
    rounds: int
    round_calls: int
    leases: int
    hold: float


def parse_arguments() -> Arguments:
    """The command line. What is given there counts more than `--quick`."""
    parser = argparse.ArgumentParser(description="Measure the tool pool, and check what it promises.")
    add = parser.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what to run")
    add("--quick", action="store_true", help="smaller sizes, for a look in 20 s")
    add("--json", type=Path, help="file for all figures")
    add("--seed", type=int, default=0, help="seed of the injected faults")
    add("--trajectories", type=int, default=512, help="soak: how many at once")
    add("--calls", type=int, default=20, help="soak: calls of each trajectory")
    add("--processes", type=int, default=8, help="soak: server processes")
    add("--crash", type=float, default=0.05, help="soak: share of calls that end their process")
    add("--hang", type=float, default=0.05, help="soak: share of calls that are never answered")
    add("--oversize", type=float, default=0.02, help="soak: share of calls that are answered with too much")
    add("--call-timeout", type=float, default=1.5, help="soak: deadline of a call, in seconds")
    add("--deadline", type=float, default=300.0, help="soak: deadline of the whole, in seconds")
    add("--hostile-calls", type=int, default=1000, help="hostile: calls of the innocent in one turn")
    add("--rounds", type=int, default=201, help="overhead: turns of each client")
    add("--round-calls", type=int, default=100, help="overhead: calls in one turn")
    add("--leases", type=int, default=25, help="leases: how many each of the workers takes")
    add("--hold", type=float, default=0.3, help="leases: how long a lease is kept, in seconds")
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)
    return Arguments(**vars(parser.parse_args()))


async def run(arguments: Arguments, folder: Path, log: LogCounter) -> dict[str, Part]:
    """Run the parts that were asked for, and show each as it ends."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    parts: dict[str, Part] = {}
    for name in arguments.parts:
        start = time.monotonic()
        if name == "soak":
            part = await soak(
                folder,
                log,
                trajectories=arguments.trajectories,
                calls=arguments.calls,
                processes=arguments.processes,
                shares={"crash": arguments.crash, "hang": arguments.hang, "oversize": arguments.oversize},
                call_timeout=arguments.call_timeout,
                deadline=arguments.deadline,
                seed=arguments.seed,
            )
        elif name == "hostile":
            part = await hostile(calls=arguments.hostile_calls)
        elif name == "overhead":
            part = await overhead(rounds=arguments.rounds, calls=arguments.round_calls)
        else:
            part = await leases(folder, num_leases=arguments.leases, hold=arguments.hold)
        parts[name] = part
        console.print(as_table(part))
        console.print(f"Took {time.monotonic() - start:.0f} s.\n")
    return parts


def as_table(part: Part) -> Table:
    """The figures of a part, and under them what had to hold."""
    table = Table(title=part.title, title_justify="left", show_header=False)
    for name, value in part.rows:
        table.add_row(name, value)
    table.add_section()
    for check in part.checks:
        table.add_row(check.claim, f"{'[green]yes[/]' if check.holds else '[bold red]NO[/]'}: {check.got}")
    return table


def about_machine() -> dict[str, Any]:
    """What the figures were taken on."""
    return {
        "python": platform.python_version(),
        "mcp": version("mcp"),
        "cpus": os.cpu_count(),
        "load": os.getloadavg(),
        "platform": platform.platform(),
    }


def main(arguments: Arguments) -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: A sentence for each thing that did not hold.
    """
    gc.freeze()  # what is imported is no garbage, and torch is much of it; looking through it would be most of the noise
    log = LogCounter()
    logging.basicConfig(handlers=[log], level=logging.WARNING)
    # Should the event loop itself hang, no deadline of ours would be kept.
    faulthandler.dump_traceback_later(2 * arguments.deadline, exit=True)
    with tempfile.TemporaryDirectory() as folder:
        parts = asyncio.run(run(arguments, Path(folder), log))
    faulthandler.cancel_dump_traceback_later()
    if arguments.json is not None:
        figures = {
            "machine": about_machine(),
            "arguments": asdict(arguments) | {"json": str(arguments.json)},
            **{name: part.figures | {"checks": [asdict(c) for c in part.checks]} for name, part in parts.items()},
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    return [
        f"{name}: it does not hold that {check.claim}; found: {check.got}."
        for name, part in parts.items()
        for check in part.checks
        if not check.holds
    ]


if __name__ == "__main__":
    if failures := main(parse_arguments()):
        sys.exit("\n".join(failures))
