"""The command `mcp-grpo`."""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mcp_grpo.errors import MCPGRPOError, ServerConfigError


def main(argv: Sequence[str] | None = None) -> int:
    """
    Run the command.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments; those of the process if not given.

    Returns:
        `int`: The exit status.
    """
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (MCPGRPOError, OSError) as error:
        _console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {error}"), soft_wrap=True)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mcp-grpo", description="Tools around training language models on MCP tools."
    )
    commands = parser.add_subparsers(required=True, metavar="command")
    desk = commands.add_parser("desk", help="print the desk's servers as an mcpServers file")
    desk.add_argument("--world", type=int, default=0, help="which invented world (default: %(default)s)")
    desk.add_argument(
        "--finance", choices=("fmp", "polygon"), help="live data, with its key from the environment or `.env`"
    )
    desk.add_argument("--search", choices=("tavily",), help="live search, with its key from the environment or `.env`")
    desk.add_argument(
        "--slack", choices=("live",), help="a real workspace, with its token from the environment or `.env`"
    )
    desk.add_argument("--compare", metavar="FILE", help="instead, say how the tools of this mcpServers file differ")
    desk.set_defaults(run=_desk)
    tasks = commands.add_parser("tasks", help="make, check, import and look at tasks").add_subparsers(
        required=True, metavar="action"
    )
    build = tasks.add_parser("build", help="build tasks on the desk, with answers and solutions")
    build.add_argument("folder", type=Path, help="where train.jsonl, validation.jsonl and test.jsonl go")
    build.add_argument("--train", type=int, default=1000, help="tasks to train on (default: %(default)s)")
    build.add_argument("--validation", type=int, default=100, help="tasks to watch (default: %(default)s)")
    build.add_argument(
        "--test", type=int, default=200, help="tasks of other companies and families (default: %(default)s)"
    )
    build.add_argument("--seed", type=int, default=0, help="other tasks (default: %(default)s)")
    build.add_argument(
        "--world", type=int, default=0, help="which invented world, as of the servers (default: %(default)s)"
    )
    build.add_argument("--check", action="store_true", help="also run every solution on the real servers")
    build.set_defaults(run=_build)
    check = tasks.add_parser("check", help="validate a file of tasks, and run the solutions it has")
    check.add_argument("source", help="JSON, JSONL or Parquet file, folder, or Hub id")
    check.add_argument("--split", help="of a Hub id or a folder")
    check.add_argument("--servers", help="mcpServers file to run solutions on; the desk if not given")
    check.add_argument(
        "--world", type=int, default=0, help="which invented world, without --servers (default: %(default)s)"
    )
    check.set_defaults(run=_check)
    importing = tasks.add_parser("import", help="turn a file of your own into tasks, and report what was made of it")
    importing.add_argument("source", help="JSON, JSONL or Parquet file with questions, tools, difficulty, answers")
    importing.add_argument("output", type=Path, help="JSONL file to write")
    importing.set_defaults(run=_import)
    show = tasks.add_parser("show", help="show a few tasks")
    show.add_argument("source", help="JSON, JSONL or Parquet file, folder, or Hub id")
    show.add_argument("--split", help="of a Hub id or a folder")
    show.add_argument("--number", type=int, default=5, help="how many (default: %(default)s)")
    show.set_defaults(run=_show)
    return parser


def _desk(arguments: argparse.Namespace) -> int:
    from mcp_grpo.servers import desk_servers

    if arguments.compare is not None:
        return _compare(arguments)
    backends = {name: getattr(arguments, name) for name in ("finance", "search", "slack") if getattr(arguments, name)}
    servers = desk_servers(seed=arguments.world, backends=backends)
    sys.stdout.write(json.dumps(servers, indent=2) + "\n")
    if backends:
        _note_missing_keys(servers)
    return 0


def _note_missing_keys(servers: dict[str, Any]) -> None:
    """Say on stderr which keys are not here; the file is good all the same, perhaps for another machine."""
    from mcp_grpo.tools import load_servers

    try:
        load_servers(servers)
    except ServerConfigError as error:
        _console(stderr=True).print(Text.assemble(("note:", "bold yellow"), f" {error}"), soft_wrap=True)


def _compare(arguments: argparse.Namespace) -> int:
    import anyio

    from mcp_grpo.servers import desk_servers
    from mcp_grpo.tools import Catalog, ToolPool, catalog_differences, load_servers

    async def catalog(servers: Any) -> Catalog:
        async with ToolPool(servers) as pool:
            return pool.catalog

    async def catalogs() -> tuple[Catalog, Catalog]:
        theirs = await catalog(load_servers(arguments.compare))
        ours = await catalog(desk_servers())
        tools = {tool.tool for tool in theirs.tools}
        replaced = {tool.server for tool in ours.tools if tool.tool in tools}
        replaced = replaced or set(theirs.servers) & set(ours.servers) or set(ours.servers)
        return Catalog(
            servers=tuple(name for name in ours.servers if name in replaced),
            tools=tuple(tool for tool in ours.tools if tool.server in replaced),
        ), theirs

    console = _console()
    differences = catalog_differences(*anyio.run(catalogs))
    for one in differences:
        console.print(f"- {one}", soft_wrap=True)
    if not differences:
        console.print("The tools are those of the desk, with the same arguments.")
    return 0


def _build(arguments: argparse.Namespace) -> int:
    # Here and below: what one action needs is not loaded for another.
    from mcp_grpo.tasks import tasks_from_rows
    from mcp_grpo.tasks.desk import FAMILIES, SPLITS, build_tasks

    console, failed = _console(), 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    table = Table("split", "tasks", "families", "file", title="Tasks on the desk", title_justify="left")
    families = Table("family", title="Tasks of each family", title_justify="left")
    counts: dict[str, Counter[str]] = {}
    for split in SPLITS:
        number = getattr(arguments, split)
        if number == 0:
            continue
        with console.status(f"building {split} ..."):
            rows = build_tasks(split, number, seed=arguments.seed, world=arguments.world)
        path = arguments.folder / f"{split}.jsonl"
        _write(path, rows)
        counts[split] = Counter(rows["family"])
        table.add_row(split, str(len(rows)), str(len(counts[split])), str(path))
        if arguments.check:
            failed += _run(tasks_from_rows(rows), arguments.world, None, console)
    for split in counts:
        families.add_column(split)
    for family in FAMILIES:
        families.add_row(family, *(str(found[family]) for found in counts.values()))
    console.print(table)
    console.print(families)
    return int(failed > 0)


def _check(arguments: argparse.Namespace) -> int:
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    console = _console()
    tasks = tasks_from_rows(load_tasks(arguments.source, arguments.split))
    console.print(f"{len(tasks)} tasks, all in good form.")
    with_solution = [task for task in tasks if task.metadata.get("solution") is not None]
    if not with_solution:
        console.print("None has a `solution` to run.")
        return 0
    return int(_run(with_solution, arguments.world, arguments.servers, console) > 0)


def _run(tasks: Sequence[Any], world: int, servers: str | None, console: Console) -> int:
    from mcp_grpo.evaluation import run_solutions
    from mcp_grpo.servers import desk_servers

    with console.status(f"running {len(tasks)} solutions on the servers ..."):
        found = run_solutions(tasks, desk_servers(seed=world) if servers is None else servers)
    broken = [one for one in found if one.problems]
    for one in broken[:20]:
        console.print(f"{one.trajectory.task.task_id}: {one.problems[0]}", soft_wrap=True)
    console.print(f"{len(found) - len(broken)} of {len(found)} solutions do what their tasks ask for.")
    return len(broken)


def _import(arguments: argparse.Namespace) -> int:
    from mcp_grpo.tasks import import_tasks

    rows, report = import_tasks(arguments.source)
    _write(arguments.output, rows)
    _console().print(str(report), soft_wrap=True)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    console = _console()
    tasks = tasks_from_rows(load_tasks(arguments.source, arguments.split))
    for task in tasks[: arguments.number]:
        head = f" ({task.difficulty or 'no difficulty'}, {task.max_turns or 'any'} turns)"
        console.print(Text.assemble((task.task_id, "bold"), head), soft_wrap=True)
        console.print(task.prompt[-1]["content"], soft_wrap=True)
        wanted = task.answer if task.answer is not None else task.metadata.get("expected_state")
        console.print(f"  -> {json.dumps(wanted, ensure_ascii=False)}\n", soft_wrap=True)
    difficulties = Counter(task.difficulty or "none" for task in tasks)
    console.print(
        f"{len(tasks)} tasks; by difficulty: " + ", ".join(f"{n} {name}" for name, n in difficulties.items())
    )
    return 0


def _console(*, stderr: bool = False) -> Console:
    """A console that shows what it is given as it is."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _write(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
