"""The commands `mcp-grpo desk` and `mcp-grpo tasks build`."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mcp_grpo.cli import make_console, run_and_report, write_rows
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.servers.environment import LIVE_SOURCES
from mcp_grpo.errors import ServerConfigError


def add_commands(commands: Any, tasks: Any) -> None:
    """Add the desk's commands to those of `mcp-grpo` and of `mcp-grpo tasks`."""
    desk = commands.add_parser("desk", help="print the desk's servers as an mcpServers file")
    desk.add_argument("--world", type=int, default=0, help="which invented world (default: %(default)s)")
    for name, sources in LIVE_SOURCES.items():
        desk.add_argument(
            f"--{name}", choices=tuple(sources), help=f"live source of {name}; its key is in the environment or `.env`"
        )
    desk.add_argument("--compare", metavar="FILE", help="instead, report how the tools of this mcpServers file differ")
    desk.set_defaults(run=_desk)
    build = tasks.add_parser("build", help="build tasks on the desk, with answers and solutions")
    build.add_argument("folder", type=Path, help="folder for train.jsonl, validation.jsonl and test.jsonl")
    for split, number in (("train", 1000), ("validation", 100), ("test", 200)):
        build.add_argument(
            f"--{split}", type=int, default=number, help=f"number of {split} tasks (default: %(default)s)"
        )
    build.add_argument("--seed", type=int, default=0, help="another seed gives other tasks (default: %(default)s)")
    build.add_argument("--world", type=int, default=0, help="invented world of the servers (default: %(default)s)")
    build.add_argument("--check", action="store_true", help="also run every solution on the real servers")
    build.set_defaults(run=_build)


def _desk(arguments: argparse.Namespace) -> int:
    if arguments.compare is not None:
        return _compare(arguments.compare)
    backends = {name: source for name in LIVE_SOURCES if (source := getattr(arguments, name)) is not None}
    servers = desk_servers(seed=arguments.world, backends=backends)
    sys.stdout.write(json.dumps(servers, indent=2) + "\n")
    if backends:
        _note_missing_keys(servers)
    return 0


def _note_missing_keys(servers: dict[str, Any]) -> None:
    """Print missing keys on stderr; the file is valid all the same, perhaps for another machine."""
    from mcp_grpo.tools import load_servers

    try:
        load_servers(servers)
    except ServerConfigError as error:
        make_console(stderr=True).print(Text.assemble(("note:", "bold yellow"), f" {error}"), soft_wrap=True)


def _compare(path: str) -> int:
    import anyio

    from mcp_grpo.tools import Catalog, ToolPool, catalog_differences, load_servers

    async def catalog(servers: Any) -> Catalog:
        async with ToolPool(servers) as pool:
            return pool.catalog

    async def catalogs() -> tuple[Catalog, Catalog]:
        theirs = await catalog(load_servers(path))
        ours = await catalog(desk_servers())
        tools = {tool.tool for tool in theirs.tools}
        replaced = {tool.server for tool in ours.tools if tool.tool in tools}
        replaced = replaced or set(theirs.servers) & set(ours.servers) or set(ours.servers)
        return Catalog(
            servers=tuple(name for name in ours.servers if name in replaced),
            tools=tuple(tool for tool in ours.tools if tool.server in replaced),
        ), theirs

    console = make_console()
    differences = catalog_differences(*anyio.run(catalogs))
    for one in differences:
        console.print(f"- {one}", soft_wrap=True)
    if not differences:
        console.print("The tools are those of the desk, with the same arguments.")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    from mcp_grpo.desk.tasks import FAMILIES, SPLITS, build_tasks
    from mcp_grpo.tasks import tasks_from_rows

    console, failed = make_console(), 0
    table = Table("split", "tasks", "families", "file", title="Tasks on the desk", title_justify="left")
    families = Table("family", title="Tasks of each family", title_justify="left")
    counts: list[Counter[str]] = []
    for split in SPLITS:
        number = getattr(arguments, split)
        if number == 0:
            continue
        with console.status(f"building {split} ..."):
            rows = build_tasks(split, number, seed=arguments.seed, world=arguments.world)
        path = arguments.folder / f"{split}.jsonl"
        write_rows(path, rows)
        counts.append(Counter(rows["family"]))
        families.add_column(split)
        table.add_row(split, str(len(rows)), str(len(counts[-1])), str(path))
        if arguments.check:
            failed += run_and_report(tasks_from_rows(rows), desk_servers(seed=arguments.world), console)
    for family in FAMILIES:
        families.add_row(family, *(str(found[family]) for found in counts))
    console.print(table)
    console.print(families)
    return int(failed > 0)
