"""The command `mcp-grpo`."""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from mcp_grpo.console import InertConsole
from mcp_grpo.errors import MCPGRPOError, ServerConfigError, SettingsError, ToolServerError
from mcp_grpo.train.arguments import add_arguments as add_train_arguments
from mcp_grpo.train.arguments import read_arguments as read_train_arguments


MAX_SHOWN = 20  # problems of one kind
MAX_TOKENS = 4096  # of an attempt, or of a turn at an endpoint


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
    tasks = commands.add_parser("tasks", help="build, check, import and show tasks").add_subparsers(
        required=True, metavar="action"
    )
    source = argparse.ArgumentParser(add_help=False)
    source.add_argument("source", help="JSON, JSONL or Parquet file, folder, or Hub id")
    source.add_argument("--split", help="split of a Hub id or folder, or list of a JSON file that has several")
    check = tasks.add_parser(
        "check", parents=[source], help="check tasks against the tools of their servers, and run their solutions"
    )
    check.add_argument("--servers", help="mcpServers file that the tasks are for (default: the desk)")
    check.add_argument(
        "--world", type=int, default=0, help="invented world of the desk, without --servers (default: %(default)s)"
    )
    check.set_defaults(run=_check)
    importing = tasks.add_parser(
        "import", parents=[source], help="turn a file of your own into tasks, and report how it was read"
    )
    importing.add_argument("output", type=Path, help="JSONL file to write, or a folder for one file per list")
    importing.set_defaults(run=_import)
    show = tasks.add_parser("show", parents=[source], help="show a few tasks")
    show.add_argument("--number", type=int, default=5, help="how many (default: %(default)s)")
    show.set_defaults(run=_show)
    _add_synth(tasks)
    _add_train(commands)
    _add_doctor(commands)
    _add_eval(commands, source)
    _add_bench(commands)
    _add_chat(commands)
    replay = commands.add_parser("replay", help="show recorded trajectories of a run, turn by turn")
    replay.add_argument("folder", type=Path, help="output folder of the run")
    replay.add_argument("--step", type=int, help="only this step; the last one that was recorded, if no task is named")
    replay.add_argument("--task", help="only this task, over all steps")
    replay.add_argument("--number", type=int, default=5, help="how many (default: %(default)s)")
    replay.set_defaults(run=_replay)
    _add_report(commands)
    dashboard = commands.add_parser("dashboard", help="follow and compare runs on a page in the browser")
    dashboard.add_argument("folder", type=Path, help="folder that runs are written to, or that of one run")
    dashboard.add_argument("--port", type=int, default=8268, help="port; 0 for a free one (default: %(default)s)")
    dashboard.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at; any but this machine's needs a token, which is printed",
    )
    dashboard.set_defaults(run=_dashboard)
    if (desk := _desk()) is not None:
        desk.add_commands(commands, tasks)
    return parser


def _add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report", help="write a page about a run, in one file, and pictures for a card; or print what was learnt"
    )
    report.add_argument(
        "folders", type=Path, nargs="+", metavar="folder", help="output folder of a run, or of several runs"
    )
    form = report.add_mutually_exclusive_group()
    form.add_argument(
        "--text",
        action="store_true",
        help="print all evaluations instead, kind of task by kind of task; several runs of the same tasks are added up",
    )
    form.add_argument("--markdown", action="store_true", help="print the same as Markdown")
    report.set_defaults(run=_report)


def _add_synth(tasks: Any) -> None:
    synth = tasks.add_parser("synth", help="make tasks for any MCP servers, by calling their tools")
    synth.add_argument("--servers", required=True, help="mcpServers file")
    synth.add_argument("--out", type=Path, required=True, help="folder for the tasks, a card and a report")
    synth.add_argument("--number", type=int, default=200, help="most tasks that are made (default: %(default)s)")
    synth.add_argument("--seed", type=int, default=0, help="another seed gives other tasks (default: %(default)s)")
    synth.add_argument(
        "--allow-writes",
        action="store_true",
        help="also call tools that may change things, on servers of which each trajectory has one to itself",
    )
    synth.add_argument(
        "--max-calls", type=int, default=2000, help="most calls while looking around (default: %(default)s)"
    )
    synth.add_argument(
        "--values", type=Path, metavar="FILE", help="JSON file with values to try, by the names of arguments"
    )
    synth.add_argument(
        "--writer", metavar="URL", help="endpoint of a model that words the questions (default: templates)"
    )
    synth.add_argument("--writer-name", metavar="NAME", help="name of that model")
    synth.add_argument("--writer-key-variable", metavar="VARIABLE", help="environment variable with its key")
    synth.add_argument(
        "--policy",
        metavar="MODEL",
        help="model, adapter, or URL of an endpoint, whose success tells how difficult tasks are",
    )
    synth.add_argument("--policy-name", metavar="NAME", help="name of the model at that endpoint")
    synth.add_argument("--policy-key-variable", metavar="VARIABLE", help="environment variable with its key")
    synth.add_argument("-k", type=int, default=4, help="the policy's attempts at each task (default: %(default)s)")
    synth.set_defaults(run=_synth)


def _add_policy(parser: argparse.ArgumentParser) -> Any:
    """Add what names a policy, and return the group that one of must be given."""
    policy = parser.add_mutually_exclusive_group(required=True)
    policy.add_argument("--model", "--adapter", help="folder or Hub id of a model or an adapter")
    policy.add_argument(
        "--endpoint", metavar="URL", help="OpenAI-compatible endpoint, such as http://localhost:8000/v1"
    )
    parser.add_argument("--name", help="name of the model at the endpoint")
    parser.add_argument("--key-variable", metavar="VARIABLE", help="environment variable with the endpoint's key")
    parser.add_argument("--temperature", type=float, help="temperature of sampling")
    return policy


def _add_servers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--servers", help="mcpServers file (default: the desk)")
    parser.add_argument("--world", type=int, default=0, help="invented world of the desk (default: %(default)s)")


def _add_train(commands: Any) -> None:
    train = commands.add_parser(
        "train",
        help="train a model on MCP servers: doctor, tasks, warm start, training, evaluation, adapter and report",
    )
    add_train_arguments(train)
    train.set_defaults(run=_train)


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor", help="find what is wrong with a machine, servers, tasks, a model and settings before a run"
    )
    doctor.add_argument("--servers", help="mcpServers file: every server is started")
    doctor.add_argument("--tasks", help="JSON, JSONL or Parquet file, folder, or Hub id")
    doctor.add_argument("--split", help="split of a Hub id or folder, or list of a JSON file that has several")
    doctor.add_argument("--model", help="folder or Hub id of the model to train")
    doctor.add_argument("--config", help="YAML file of settings, as the recipes take it")
    doctor.add_argument("--json", action="store_true", help="write the findings as JSON")
    doctor.set_defaults(run=_doctor)


def _add_chat(commands: Any) -> None:
    chat = commands.add_parser("chat", help="talk to a policy that has the tools of MCP servers")
    _add_policy(chat)
    _add_servers(chat)
    chat.add_argument("--base", help="base model of an adapter, if not the one that it names")
    chat.add_argument("--system", help="system message (default: that of training)")
    chat.add_argument("--max-turns", type=int, default=10, help="turns per reply (default: %(default)s)")
    chat.add_argument("--max-tokens", type=int, default=2048, help="tokens per turn (default: %(default)s)")
    chat.set_defaults(run=_chat)


def _add_eval(commands: Any, source: argparse.ArgumentParser) -> None:
    evaluation = commands.add_parser(
        "eval", parents=[source], help="attempt tasks with a policy, and say how well it does"
    )
    _add_policy(evaluation)
    _add_servers(evaluation)
    _add_attempts(evaluation)
    evaluation.add_argument("--max-turns", type=int, default=10, help="turns per attempt (default: %(default)s)")
    evaluation.add_argument("--success", metavar="MODULE:FUNCTION", help="tells whether a trajectory did its task")
    evaluation.set_defaults(run=_eval)
    comparing = commands.add_parser("compare", help="compare two evaluations of the same tasks")
    comparing.add_argument("before", type=Path, help="folder of one evaluation")
    comparing.add_argument("after", type=Path, help="folder of the other")
    comparing.set_defaults(run=_compare)


def _add_attempts(parser: argparse.ArgumentParser) -> None:
    """Add how tasks are attempted, and where the results go."""
    parser.add_argument("-k", type=int, default=1, help="attempts at each task (default: %(default)s)")
    parser.add_argument("--number", type=int, help="only this many of the tasks")
    parser.add_argument(
        "--max-tokens", type=int, default=MAX_TOKENS, help="tokens per attempt, or per turn at an endpoint"
    )
    parser.add_argument("--vllm", action="store_true", help="sample with vLLM in process")
    parser.add_argument(
        "--prices", type=float, nargs=2, metavar=("READ", "WRITTEN"), help="prices of a million tokens"
    )
    parser.add_argument(
        "--report_to",
        "--report-to",
        nargs="+",
        default=[],
        metavar="TRACKER",
        help="trackers that get the summary and every attempt: wandb, trackio, weave",
    )
    parser.add_argument("--project", default="mcp-grpo", help="project at the trackers (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for attempts and report; an evaluation that is there goes on"
    )


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="attempt the tasks of a public benchmark with a policy")
    bench.add_argument("environment", help="workbench, bfcl, verifiers, or module:function of an environment of yours")
    bench.add_argument("--data", help="folder with the benchmark's own files, such as a clone of its repository")
    bench.add_argument("--split", default="all", help="train, test or all (default: %(default)s)")
    bench.add_argument(
        "--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"), help="option of the environment"
    )
    _add_policy(bench).add_argument(
        "--policy", help="ground-truth, nothing, or one of the following: a model, an adapter, the URL of an endpoint"
    )
    _add_attempts(bench)
    bench.add_argument("--max-turns", type=int, help="turns per attempt (default: what the environment says)")
    bench.set_defaults(run=_bench, max_tokens=None)


def _desk() -> Any:
    """Import the commands of the desk; return `None` where the desk was left out of the installation."""
    return import_module("mcp_grpo.desk.command") if find_spec("mcp_grpo.desk") else None


def _check(arguments: argparse.Namespace) -> int:
    # Here and below: what one action needs is not loaded for another.
    from mcp_grpo.evaluation.solutions import check_solution_forms
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    console = make_console()
    tasks = tasks_from_rows(load_tasks(arguments.source, arguments.split))
    console.print(f"{len(tasks)} tasks have the required columns and unique ids.")
    with_solution = [task for task in tasks if task.metadata.get("solution") is not None]
    check_solution_forms(with_solution)
    if not _check_names(tasks, arguments, console):
        if with_solution:
            console.print(f"The {len(with_solution)} solutions were not run.")
        return 1
    if not with_solution:
        console.print("No task has a `solution` to run, so nothing shows that the tasks can be solved.")
        return 0
    return int(run_and_report(with_solution, _servers(arguments), console) > 0)


def _train(arguments: argparse.Namespace) -> int:
    from mcp_grpo.train.command import train

    told, folder = read_train_arguments(arguments)
    return train(told, folder, make_console(), is_dry=arguments.dry_run)


def _doctor(arguments: argparse.Namespace) -> int:
    from mcp_grpo.doctor import examine
    from mcp_grpo.doctor.command import subject_of

    console = make_console()
    subject = subject_of(
        servers=arguments.servers,
        tasks=arguments.tasks,
        split=arguments.split,
        model=arguments.model,
        config=arguments.config,
        rewards={} if _desk() is None else {"desk_reward": "mcp_grpo.desk.reward:desk_reward"},
    )
    if arguments.json:
        report = examine(subject)
        console.print(report.as_json(), soft_wrap=True)
    else:
        with make_console(stderr=True).status("examining ..."):
            report = examine(subject)
        console.print(report.table())
        console.print(f"The doctor {report.sentence}" if not report.problems else f"The doctor: {report.sentence}")
    return int(bool(report.problems))


def _servers(arguments: argparse.Namespace) -> Any:
    if arguments.servers is not None:
        return arguments.servers
    if (desk := _desk()) is None:
        raise SettingsError("Name the servers that the tasks are for with `--servers`.")
    return desk.desk_servers(seed=arguments.world)


def _check_names(tasks: Sequence[Any], arguments: argparse.Namespace, console: Console) -> bool:
    """Compare the names in tasks with the tools of the servers, and report what was compared."""
    import anyio

    from mcp_grpo.evaluation.solutions import called_tools
    from mcp_grpo.rewards import task_outcome
    from mcp_grpo.rewards.checks import reward_problems
    from mcp_grpo.tools import Catalog, ToolPool
    from mcp_grpo.tools.setup import setup_problems

    async def opened() -> tuple[Catalog, tuple[str, ...], tuple[str, ...]]:
        async with ToolPool(servers) as pool:
            return pool.catalog, pool.state_servers, pool.setup_servers

    num_named = sum(task.servers is not None or task.tools is not None for task in tasks)
    has_more = any(task.metadata.keys() & {"solution", "expected_state", "setup"} for task in tasks)
    if arguments.servers is None and not num_named and not has_more:
        console.print("No task names servers or tools, so all tools may be used: no server was started.")
        _print_unjudged(reward_problems(tasks, task_outcome), console)
        return True
    servers, whose = _servers(arguments), arguments.servers or "the desk"
    try:
        with console.status(f"starting the servers of {whose} ..."):
            catalog, state_servers, setup_servers = anyio.run(opened)
    except (ToolServerError, ServerConfigError) as error:
        _complain(f"The servers of {whose} could not be started, so the names in the tasks were not checked: {error}")
        return False
    _print_unjudged(reward_problems(tasks, task_outcome, catalog, state_servers), console)
    unset = setup_problems(tasks, setup_servers)
    for problem in unset:
        _complain(problem)
    mismatches = catalog.mismatches(tasks, called_tools)
    if mismatches:
        advice = "\nName the servers that the tasks are for with `--servers`." if arguments.servers is None else ""
        _complain(f"Compared with {whose}: {catalog.describe(mismatches)}{advice}")
    if unset or mismatches:
        return False
    names = ", ".join(catalog.servers)
    others = f"; the other {len(tasks) - num_named} may use all of them" if num_named < len(tasks) else ""
    console.print(
        f"{num_named} of them name servers or tools, and all of these exist on {whose} ({names}: {len(catalog.tools)} "
        f"tools){others}.",
        soft_wrap=True,
    )
    return True


def _print_unjudged(problems: Sequence[str], console: Console) -> None:
    if problems:
        console.print("Some tasks can only be judged by a reward function of your own:")
    for problem in problems[:MAX_SHOWN]:
        console.print(f"  - {problem}", soft_wrap=True)


def run_and_report(tasks: Sequence[Any], servers: Any, console: Console) -> int:
    """Run the solutions of tasks, print what is wrong with them, and return how many fail."""
    from mcp_grpo.evaluation import run_solutions
    from mcp_grpo.evaluation.solutions import guesses

    with console.status(f"running {len(tasks)} solutions on the servers ..."):
        found = run_solutions(tasks, servers)
    broken = [one for one in found if one.problems]
    for one in broken[:MAX_SHOWN]:
        console.print(f"{one.trajectory.task.task_id}: {one.problems[0]}", soft_wrap=True)
    console.print(f"{len(found) - len(broken)} of {len(found)} solutions solve their tasks.")
    guessed = guesses(found)
    if len(guessed) > len(found) / 20:  # a few may be put together from what was shown
        task, value = next(iter(guessed.items()))
        console.print(
            f"{len(guessed)} of them call with an id that nothing before has shown, such as {value!r} in task {task!r}. A policy that "
            "imitates them learns to make ids up: let them look it up first.",
            soft_wrap=True,
        )
    return len(broken)


def _synth(arguments: argparse.Namespace) -> int:
    from dataclasses import replace

    import anyio

    from mcp_grpo.synth import SynthSettings, make_tasks, write_tasks
    from mcp_grpo.synth.calling import NOT_ALLOWED

    console = make_console()
    settings = SynthSettings(
        num_tasks=arguments.number,
        seed=arguments.seed,
        allow_writes=arguments.allow_writes,
        max_calls=arguments.max_calls,
        values=_read_values(arguments.values),
        writer=_named_endpoint(arguments, "writer"),
    )
    policy = arguments.policy
    if policy is not None and policy.startswith(("http://", "https://")):
        policy = _named_endpoint(arguments, "policy")
    with console.status("starting the servers ...") as status:
        made = anyio.run(make_tasks, arguments.servers, settings, lambda text: status.update(Text(text)))
    if policy is not None and made.tasks:
        made = replace(made, rows=_rated(policy, made.rows, arguments))
    files = write_tasks(made, arguments.out)
    for why, number in made.dropped.items():
        console.print(f"  dropped {number}: {why}", soft_wrap=True)
    for name, why in list(made.uncalled.items())[:MAX_SHOWN]:
        console.print(f"  `{name}` was not used: {why[:300]}", soft_wrap=True)
    if NOT_ALLOWED in made.uncalled.values():
        console.print(
            "  Those of them that only read can be named in `read_only_tools` of their server.", soft_wrap=True
        )
    counts = ", ".join(f"{len(rows)} {split}" for split, rows in made.rows.items() if rows)
    console.print(
        f"{len(made.tasks)} tasks{f' ({counts})' if counts else ''} from {made.num_calls} calls.", soft_wrap=True
    )
    if not files:
        _complain(made.remedy)
        return 1
    console.print(
        f"They are in {', '.join(map(str, files))}; {arguments.out / 'README.md'} tells about them.", soft_wrap=True
    )
    return 0


def _read_values(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SettingsError(f"`--values` must name a JSON file, got {str(path)!r}: {error}.") from error
    if not isinstance(values, dict) or not all(isinstance(value, list) for value in values.values()):
        raise SettingsError(
            f'`--values` must hold lists of values by the names of arguments, such as {{"city": ["Oslo"]}}, which {str(path)!r} does not.'
        )
    return values


def _named_endpoint(arguments: argparse.Namespace, role: str) -> Any:
    """Return the endpoint of a role, if there is one."""
    from mcp_grpo.evaluation import Endpoint

    if (url := getattr(arguments, role)) is None:
        return None
    if (name := getattr(arguments, f"{role}_name")) is None:
        raise SettingsError(f"Name the model at the endpoint with `--{role}-name`.")
    return Endpoint(base_url=url, model=name, api_key_variable=getattr(arguments, f"{role}_key_variable"))


def _rated(policy: Any, rows: dict[str, list[dict[str, Any]]], arguments: argparse.Namespace) -> Any:
    """Attempt all tasks with a policy, and return the rows with how difficult they are to it."""
    from mcp_grpo.policy_evaluation import evaluate, read_attempts
    from mcp_grpo.synth import rated
    from mcp_grpo.tasks import tasks_from_rows

    folder = arguments.out / "attempts"
    tasks = tasks_from_rows([row for found in rows.values() for row in found])
    evaluate(policy, tasks, arguments.servers, k=arguments.k, output_dir=folder)
    attempts = read_attempts(folder)
    return {split: rated(found, attempts) for split, found in rows.items()}


def _import(arguments: argparse.Namespace) -> int:
    from mcp_grpo.tasks import import_tasks
    from mcp_grpo.tasks.loading import split_names

    source, output = Path(arguments.source), arguments.output
    is_folder = output.is_dir() or not output.suffix
    names = split_names(source) if is_folder and arguments.split is None and source.is_file() else []
    for split in names or [arguments.split]:
        rows, report = import_tasks(source, split)
        path = output / f"{Path(split or source.stem).name}.jsonl" if is_folder else output
        write_rows(path, rows)
        make_console().print(f"{report}\n  written to {path}", soft_wrap=True)
    return 0


def _show(arguments: argparse.Namespace) -> int:
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    console = make_console()
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


def _eval(arguments: argparse.Namespace) -> int:
    from mcp_grpo.evaluation.trackers import check_trackers, send_evaluation
    from mcp_grpo.policy_evaluation import baselines, evaluate, read_attempts, write_report
    from mcp_grpo.tasks import load_tasks, tasks_from_rows

    policy, trackers = _policy(arguments), check_trackers(arguments.report_to)
    console, servers = make_console(), _servers(arguments)
    tasks = tasks_from_rows(load_tasks(arguments.source, arguments.split))[: arguments.number]
    is_success = _success(arguments)
    found = evaluate(
        policy, tasks, servers, is_success=is_success, output_dir=arguments.out, **_attempt_settings(arguments)
    )
    with console.status("running what to compare with ..."):
        others = baselines(tasks, servers, is_success)
    name = arguments.name or arguments.model
    path = write_report(arguments.out, name, found, others)
    attempts = read_attempts(arguments.out)
    send_evaluation(trackers, Path(name).name, found, attempts, project=arguments.project, baselines=others)
    console.print(path.read_text(encoding="utf-8"), soft_wrap=True)
    console.print(f"Every attempt is in {arguments.out / 'attempts.jsonl'}.", soft_wrap=True)
    return 0


def _attempt_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how to attempt tasks, for `evaluate`."""
    from mcp_grpo.evaluation import Prices

    prices = None if arguments.prices is None else Prices(read=arguments.prices[0], written=arguments.prices[1])
    settings = {"k": arguments.k, "temperature": arguments.temperature, "prices": prices}
    if arguments.model is not None:
        settings |= {"max_turns": arguments.max_turns, "max_completion_length": arguments.max_tokens}
        settings |= {"use_vllm": True, "vllm_mode": "colocate"} if arguments.vllm else {}
    return settings


def _bench(arguments: argparse.Namespace) -> int:
    from mcp_grpo.bench import NOTHING, SCRIPTED, bench
    from mcp_grpo.environments import load_environment
    from mcp_grpo.evaluation.trackers import check_trackers
    from mcp_grpo.policy_evaluation import write_report
    from mcp_grpo.train.settings import show_results

    named = arguments.policy
    if named is not None and named not in SCRIPTED:
        setattr(arguments, "endpoint" if "://" in named else "model", named)
    environment = load_environment(arguments.environment, arguments.data, **dict(arguments.option))
    arguments.max_turns = arguments.max_turns or environment.max_turns
    has_own_limit, arguments.max_tokens = arguments.max_tokens is not None, arguments.max_tokens or MAX_TOKENS
    settings = _attempt_settings(arguments)
    if arguments.model is not None:
        settings["max_result_tokens"] = environment.max_result_tokens
    if arguments.model is not None and environment.max_result_tokens is not None and not has_own_limit:
        show_results(settings, environment.max_result_tokens, None)  # as in training
    policy = SCRIPTED[named] if named in SCRIPTED else _policy(arguments)
    name = arguments.name or arguments.model or named
    found = bench(
        environment,
        policy,
        arguments.out,
        name=name,
        split=arguments.split,
        number=arguments.number,
        report_to=check_trackers(arguments.report_to),
        project=arguments.project,
        **settings,
    )
    console = make_console()
    others = {score.policy: score.count / score.total for score in found.scores if score.what == "succeed"}
    others = {"doing nothing": others[NOTHING.name]} if NOTHING.name in others else {}
    path = write_report(arguments.out, f"{name} on {environment.name}", found.evaluation, others)
    console.print(path.read_text(encoding="utf-8"), soft_wrap=True)
    console.print(f"Every attempt is in {arguments.out / 'attempts.jsonl'}.\n\n{found}", soft_wrap=True)
    return 0


def _policy(arguments: argparse.Namespace) -> Any:
    """Return the policy that is named: an endpoint, or where a model or an adapter is."""
    from mcp_grpo.evaluation import Endpoint

    if arguments.endpoint is None:
        return arguments.model
    if arguments.name is None:
        raise SettingsError("Name the model at the endpoint with `--name`.")
    return Endpoint(
        base_url=arguments.endpoint,
        model=arguments.name,
        api_key_variable=arguments.key_variable,
        temperature=arguments.temperature,
        max_turns=arguments.max_turns,
        max_turn_tokens=arguments.max_tokens,
    )


def _chat(arguments: argparse.Namespace) -> int:
    from mcp_grpo.chat import chat

    settings: dict[str, Any] = {}
    if arguments.endpoint is None:
        settings = {"max_turns": arguments.max_turns, "max_turn_tokens": arguments.max_tokens, "base": arguments.base}
    chat(
        _policy(arguments),
        _servers(arguments),
        console=make_console(),
        system=arguments.system,
        temperature=arguments.temperature,
        **settings,
    )
    return 0


def _success(arguments: argparse.Namespace) -> Any:
    """Return what tells whether a trajectory did its task: what was named, the desk's own, or that of any task."""
    from mcp_grpo.rewards import is_done

    if arguments.success is None:
        desk = _desk() if arguments.servers is None else None
        return is_done if desk is None else import_module("mcp_grpo.desk.reward").is_solved
    module, _, name = arguments.success.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise SettingsError(f"`--success` must be `module:function`, got {arguments.success!r}: {error}.") from error


def _compare(arguments: argparse.Namespace) -> int:
    from mcp_grpo.evaluation import compare, comparison_table
    from mcp_grpo.policy_evaluation import read_evaluation

    before, after = read_evaluation(arguments.before), read_evaluation(arguments.after)
    console = make_console()
    console.print(comparison_table(before, after, title=f"{arguments.before} and {arguments.after}"))
    console.print(str(compare(before, after)), soft_wrap=True)
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    from mcp_grpo.monitor.replay import recorded, show

    rows, step = list(recorded(arguments.folder, step=arguments.step, task_id=arguments.task)), arguments.step
    if step is None and arguments.task is None:
        step = max(row["step"] for row in rows)
        rows = [row for row in rows if row["step"] == step]
    console = make_console()
    for row in rows[: arguments.number]:
        show(row, console)
    of_what = "" if arguments.task is None else f" of task {arguments.task}"
    at_step = "" if step is None else f" of step {step}"
    console.print(f"{min(len(rows), arguments.number)} of {len(rows)} trajectories{of_what}{at_step}.", soft_wrap=True)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    if arguments.text or arguments.markdown:
        return _print_learnt(arguments.folders, as_markdown=arguments.markdown)
    from mcp_grpo.monitor.run_page import write_page

    console = make_console()
    for folder in arguments.folders:
        page, *pictures = write_page(folder)
        console.print(f"The report is {page}.", soft_wrap=True)
        if pictures:
            console.print(f"Pictures for a card: {', '.join(map(str, pictures))}.", soft_wrap=True)
    return 0


def _print_learnt(folders: Sequence[Path], *, as_markdown: bool) -> int:
    from mcp_grpo.monitor.judged_runs import learnt, read_judged_runs

    console = make_console()
    grids, notes = learnt(read_judged_runs(folders))
    if as_markdown:
        console.print("\n\n".join([*(grid.markdown() for grid in grids), *notes]), soft_wrap=True)
        return 0
    for table in (table for grid in grids for table in grid.tables(console.width)):
        console.print(table)
    for note in notes:
        console.print(note, soft_wrap=True)
    return 0


def _dashboard(arguments: argparse.Namespace) -> int:
    from mcp_grpo.dashboard import serve

    console = make_console()
    serve(
        arguments.folder,
        host=arguments.host,
        port=arguments.port,
        say=lambda line: console.print(line, soft_wrap=True),
    )
    return 0


def _complain(text: str) -> None:
    make_console(stderr=True).print(Text.assemble(("error:", "bold red"), f" {text}"), soft_wrap=True)


def make_console(*, stderr: bool = False) -> Console:
    """Make a console that prints text as it is, and shows control characters in it instead of obeying them."""
    return InertConsole(stderr=stderr, markup=False, emoji=False, highlight=False)


def write_rows(path: Path, rows: Any) -> None:
    """Write rows as JSON Lines, and create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, sort_keys=True) + "\n")
