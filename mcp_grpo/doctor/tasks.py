"""The tasks: names, rewards, set-ups and scripted solutions."""

from collections.abc import Callable, Sequence
from typing import Any

from mcp_grpo.doctor.findings import Findings, counted
from mcp_grpo.errors import CatalogError, TaskFormatError
from mcp_grpo.evaluation.solutions import called_tools, check_solution_forms
from mcp_grpo.rewards.checks import reward_message, reward_name, reward_problems, rewardable_tasks
from mcp_grpo.rollout import RolloutEngine
from mcp_grpo.tools.setup import setup_problems
from mcp_grpo.types import Task


def examine_tasks(
    findings: Findings,
    datasets: Sequence[Any],
    rewards: Sequence[Callable[..., Any]] | None,
    engine: RolloutEngine | None,
) -> list[Task]:
    """Compare tasks with the rewards and, where servers are open, with their tools; return the tasks that could be read."""
    tasks = findings.run(
        "tasks", lambda: rewardable_tasks(None, *datasets), remedy="`mcp-grpo tasks import` reads others."
    )
    if tasks is None:
        return []
    findings.run("solutions", lambda: _examine_solutions(findings, tasks), remedy="Mend or leave out `solution`.")
    is_readable = not findings.has_failed("solutions")
    if engine is not None:
        findings.run(
            "tools",
            lambda: _examine_names(findings, tasks, engine, is_readable),
            remedy="Take the nearest name, or name other servers.",
        )
        findings.run(
            "setup", lambda: _examine_setups(findings, tasks, engine), remedy="Set `setup_tool` of the server."
        )
    if rewards is not None:
        findings.run(
            "rewards",
            lambda: _examine_rewards(findings, tasks, datasets, list(rewards), engine),
            remedy="Give every task what its rewards need, or name other rewards.",
        )
    return tasks


def _examine_solutions(findings: Findings, tasks: Sequence[Task]) -> None:
    scripted = [task for task in tasks if task.metadata.get("solution") is not None]
    check_solution_forms(scripted)
    if scripted:
        findings.ok("solutions", f"{len(scripted)} of {len(tasks)} tasks have one, of the right form")


def _examine_names(findings: Findings, tasks: Sequence[Task], engine: RolloutEngine, reads_solutions: bool) -> None:
    mismatches = engine.catalog.mismatches(tasks, called_tools if reads_solutions else None)
    if mismatches:
        raise CatalogError(engine.catalog.describe(mismatches))
    servers, catalog = ", ".join(sorted(engine.catalog.servers)), engine.catalog
    findings.ok(
        "tools",
        f"all that {counted(len(tasks), 'task')} name exists on {servers}: {counted(len(catalog.tools), 'tool')} "
        f"(catalog {catalog.hash[:16]})",
    )


def _examine_setups(findings: Findings, tasks: Sequence[Task], engine: RolloutEngine) -> None:
    if problems := setup_problems(tasks, engine.setup_servers):
        raise TaskFormatError("\n".join(problems))
    if number := sum(task.metadata.get("setup") is not None for task in tasks):
        findings.ok("setup", f"{number} tasks set servers up that can be")


def _examine_rewards(
    findings: Findings,
    tasks: Sequence[Task],
    datasets: Sequence[Any],
    rewards: list[Any],
    engine: RolloutEngine | None,
) -> None:
    rewardable_tasks(rewards, *datasets)
    catalog, states = (engine.catalog, engine.state_servers) if engine else (None, _every_state(tasks))
    if problems := reward_problems(tasks, rewards, catalog, states):
        raise TaskFormatError(reward_message(problems))
    findings.ok("rewards", f"{', '.join(map(reward_name, rewards))}: can be computed for all {len(tasks)} tasks")


def _every_state(tasks: Sequence[Task]) -> tuple[str, ...]:
    """Return the servers whose states tasks expect: without servers at hand, they are believed to have one."""
    expected = [task.metadata.get("expected_state") for task in tasks]
    return tuple(dict.fromkeys(name for each in expected if isinstance(each, dict) for name in each))
