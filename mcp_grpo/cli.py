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
        _complain(str(error))
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
    check = tasks.add_parser(
        "check", help="check tasks against the tools of their servers, and run the solutions they have"
    )
    check.add_argument("source", help="JSON, JSONL or Parquet file, folder, or Hub id")
    check.add_argument("--split", help="of a Hub id, a folder, or a JSON file with several lists")
    check.add_argument("--servers", help="mcpServers file that the tasks are for; the desk if not given")
    check.add_argument(
        "--world", type=int, default=0, help="which invented world, without --servers (default: %(default)s)"
    )
    check.set_defaults(run=_check)
    importing = tasks.add_parser("import", help="turn a file of your own into tasks, and report what was made of it")
    importing.add_argument("source", help="JSON, JSONL or Parquet file with questions, tools, difficulty, answers")
    importing.add_argument(
        "output", type=Path, help="JSONL file to write; or a folder, for a file for each list of the source"
    )
    importing.add_argument("--split", help="which list of a JSON file that has several, such as train")
    importing.set_defaults(run=_import)
    show = tasks.add_parser("show", help="show a few tasks")
    show.add_argument("source", help="JSON, JSONL or Parquet file, folder, or Hub id")
    show.add_argument("--split", help="of a Hub id, a folder, or a JSON file with several lists")
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
    from mcp_grpo.evaluation.solutions import check_solution_forms
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    console = _console()
    tasks = tasks_from_rows(load_tasks(arguments.source, arguments.split))
    console.print(f"{len(tasks)} tasks with the columns that they need, and no id twice.")
    with_solution = [task for task in tasks if task.metadata.get("solution") is not None]
    check_solution_forms(with_solution)
    if not _check_names(tasks, arguments, console):
        if with_solution:
            console.print(f"The {len(with_solution)} solutions were not run.")
        return 1
    if not with_solution:
        console.print("None has a `solution` to run, so that nothing shows that the tasks can be done.")
        return 0
    return int(_run(with_solution, arguments.world, arguments.servers, console) > 0)


def _check_names(tasks: Sequence[Any], arguments: argparse.Namespace, console: Console) -> bool:
    """Compare what tasks name with the tools of the servers, and say what was compared, and what was not."""
    import anyio

    from mcp_grpo.errors import ServerConfigError, ToolServerError
    from mcp_grpo.evaluation.solutions import called_tools
    from mcp_grpo.rewards import task_outcome
    from mcp_grpo.rewards.checks import reward_problems
    from mcp_grpo.servers import desk_servers
    from mcp_grpo.tools import Catalog, ToolPool

    async def opened() -> tuple[Catalog, tuple[str, ...]]:
        servers = desk_servers(seed=arguments.world) if arguments.servers is None else arguments.servers
        async with ToolPool(servers) as pool:
            return pool.catalog, pool.state_servers

    num_named = sum(task.servers is not None or task.tools is not None for task in tasks)
    has_more = any(task.metadata.keys() & {"solution", "expected_state"} for task in tasks)
    if arguments.servers is None and not num_named and not has_more:
        console.print("None names servers or tools, so that all may use whatever there is: no server was started.")
        _print_unjudged(reward_problems(tasks, task_outcome), console)
        return True
    whose = "the desk" if arguments.servers is None else arguments.servers
    try:
        with console.status(f"starting the servers of {whose} ..."):
            catalog, state_servers = anyio.run(opened)
    except (ToolServerError, ServerConfigError) as error:
        _complain(
            f"The servers of {whose} could not be started, so that the names of servers and tools in the tasks were not "
            f"checked: {error}"
        )
        return False
    _print_unjudged(reward_problems(tasks, task_outcome, catalog, state_servers), console)
    mismatches = catalog.mismatches(tasks, called_tools)
    if mismatches:
        advice = "\nName the servers that the tasks are for with `--servers`." if arguments.servers is None else ""
        _complain(f"Compared with {whose}: {catalog.told(mismatches)}{advice}")
        return False
    names = ", ".join(catalog.servers)
    all_of_them = f"; the other {len(tasks) - num_named} may use all of them" if num_named < len(tasks) else ""
    console.print(
        f"{num_named} of them name servers or tools, and all of these exist on {whose} ({names}: {len(catalog.tools)} "
        f"tools){all_of_them}.",
        soft_wrap=True,
    )
    return True


def _print_unjudged(problems: Sequence[str], console: Console) -> None:
    if problems:
        console.print("Some tasks can only be judged by a reward function of your own:")
    for problem in problems[:20]:
        console.print(f"  - {problem}", soft_wrap=True)


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
    from mcp_grpo.tasks.loading import split_names

    source, output = Path(arguments.source), arguments.output
    is_folder = output.is_dir() or not output.suffix
    names = split_names(source) if is_folder and arguments.split is None and source.is_file() else []
    for split in names or [arguments.split]:
        rows, report = import_tasks(source, split)
        path = output / f"{Path(split or source.stem).name}.jsonl" if is_folder else output
        _write(path, rows)
        _console().print(f"{report}\n  written to {path}", soft_wrap=True)
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


def _complain(text: str) -> None:
    _console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {text}"), soft_wrap=True)


def _console(*, stderr: bool = False) -> Console:
    """A console that shows what it is given as it is."""
    return Console(stderr=stderr, markup=False, emoji=False, highlight=False)


def _write(path: Path, rows: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
