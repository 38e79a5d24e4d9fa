"""Find rewards that cannot be computed, before anything is attempted."""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from datasets import Dataset

from mcp_grpo.errors import CatalogError, SettingsError, TaskFormatError
from mcp_grpo.rewards.judge import Judge
from mcp_grpo.rewards.rubric import Rubric
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tasks.rows import few
from mcp_grpo.tools import Catalog
from mcp_grpo.tools.setup import setup_problems, state_calls
from mcp_grpo.types import Segment, StopReason, Task, Trajectory


GIVEN = ("prompts", "completions", "completion_ids", "trajectory", "trainer_state", "log_extra", "log_metric")
"""Arguments of every reward function, beside the columns of the dataset."""

_NOT_GIVEN = ("prompt", "completion")  # columns that are not passed on
_MAX_TASKS = 3  # named for one problem
_MAX_PROBLEMS = 50  # in one message


def check_tasks(
    tasks: Sequence[Task],
    reward_funcs: Any,
    catalog: Catalog,
    state_servers: Collection[str] = (),
    setup_servers: Collection[str] = (),
) -> None:
    """Refuse tasks that name what does not exist, or that cannot be set up or rewarded; all of them at once."""
    mismatches = catalog.mismatches(tasks)
    unrewarded = reward_problems(tasks, reward_funcs, catalog, state_servers)
    told = [catalog.describe(mismatches)] if mismatches else []
    told += setup_problems(tasks, setup_servers)
    if unrewarded:
        told.append(reward_message(unrewarded))
    if told:
        raise (CatalogError if mismatches else TaskFormatError)("\n".join(told))


def rewardable_tasks(reward_funcs: Any, *datasets: Any) -> list[Task]:
    """Read the tasks of datasets, and refuse reward functions that cannot be called with their columns."""
    listed = [rows for one in datasets for rows in (one.values() if isinstance(one, Mapping) else [one])]
    seen = [rows for rows in listed if isinstance(rows, Dataset)]
    tasks = [task for rows in seen for task in tasks_from_rows(rows)]
    check_calls(reward_funcs, *(rows.column_names for rows in seen))
    return tasks


def reward_problems(
    tasks: Iterable[Task], reward_funcs: Any, catalog: Catalog | None = None, state_servers: Collection[str] = ()
) -> list[str]:
    """
    Compute the rewards of an idle trajectory for every task, and return what went wrong.

    Only functions of this library are called, and none that asks a model ([`Judge`]): others may need a real trajectory,
    or cost something.
    """
    functions = [function for given in _listed(reward_funcs) for function in _own(given)]
    first: dict[tuple[str, str], str] = {}
    tasks_of: dict[tuple[str, str], list[str]] = {}
    states: dict[Any, dict[str, Any]] = {}  # the same for all tasks that name the same tools
    for task in tasks if functions else ():
        asked = {*state_servers, *state_calls(task)}
        named = task.servers, task.tools, frozenset(asked)
        if named not in states:
            states[named] = _states(task, catalog, asked)
        attempt = _idle_attempt(task, states[named])
        for function in functions:
            try:
                function(trajectory=[attempt])
            except TaskFormatError as error:
                # Tasks with the same problem are told of together; the message names one of them.
                problem = reward_name(function), str(error).replace(repr(task.task_id), "")
                first.setdefault(problem, str(error))
                tasks_of.setdefault(problem, []).append(repr(task.task_id))
    return [f"`{name}`, {_together(tasks_of[name, key])}: {said}" for (name, key), said in first.items()]


def reward_message(problems: Sequence[str]) -> str:
    """Join problems with rewards into one message."""
    lines = "".join(f"\n  - {problem}" for problem in problems[:_MAX_PROBLEMS])
    more = f"\n  and {len(problems) - _MAX_PROBLEMS} more" if len(problems) > _MAX_PROBLEMS else ""
    return f"The rewards of these tasks cannot be computed:{lines}{more}"


def check_calls(reward_funcs: Any, *datasets: Iterable[str]) -> None:
    """Refuse reward functions that cannot be called with what they will be given."""
    told = [
        f"The reward function `{reward_name(function)}` cannot be called: {error}. It is given {', '.join(given)}. Take what it "
        "does not use as `**kwargs`, and give the tasks the columns that it needs."
        for given in ([*GIVEN, *(name for name in one if name not in (*GIVEN, *_NOT_GIVEN))] for one in datasets)
        for function in _listed(reward_funcs)
        if (error := _misfit(function, given)) is not None
    ]
    if told:
        raise SettingsError("\n".join(dict.fromkeys(told)))


def is_computed_early(reward_func: Any) -> bool:
    """
    Tell whether a reward function consists of this library's only, so that [`reward_problems`] computes all of it.
    """
    if isinstance(reward_func, Rubric):
        return all(map(is_computed_early, reward_func.parts.values()))
    return any(True for _ in _own(reward_func))


def reward_name(reward_func: Any) -> str:
    """Name a reward function in a message."""
    if isinstance(reward_func, partial):
        return reward_name(reward_func.func)
    return (
        reward_func if isinstance(reward_func, str) else getattr(reward_func, "__name__", type(reward_func).__name__)
    )


def _listed(reward_funcs: Any) -> list[Any]:
    if reward_funcs is None:
        return []
    return list(reward_funcs) if isinstance(reward_funcs, list | tuple) else [reward_funcs]


def _own(function: Any) -> Iterator[Callable[..., list[Any]]]:
    """Yield the functions of this library in a reward function that ask no model."""
    if isinstance(function, Rubric):
        for part in function.parts.values():
            yield from _own(part)
        return
    home = function.func if isinstance(function, partial) else function
    if isinstance(home, Judge) or not getattr(home, "__module__", "").startswith("mcp_grpo."):
        return
    outcome = getattr(home, "outcome", None)  # that `efficiency` asks first
    if outcome is None or is_computed_early(outcome):
        yield function


def _states(task: Task, catalog: Catalog | None, state_servers: Collection[str]) -> dict[str, Any]:
    """Return empty states of the servers that a trajectory of the task is asked about."""
    used: Collection[str] = state_servers
    if catalog is not None and not catalog.mismatches([task]):  # which are told by themselves
        used = {tool.server for tool in catalog.tools_for(task)}
    return {server: {} for server in state_servers if server in used}


def _idle_attempt(task: Task, states: Mapping[str, Any]) -> Trajectory:
    return Trajectory(
        task=task,
        prompt_ids=(0,),
        segments=(Segment(token_ids=(0,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": "Nothing."},),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
        states=states,
    )


def _misfit(function: Any, given: Sequence[str]) -> str | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # the name of a reward model, or something that does not say what it takes
        return None
    if hasattr(function, "forward"):
        return None  # a reward model
    try:
        signature.bind(**dict.fromkeys(given))
    except TypeError as error:
        return str(error)
    return None


def _together(tasks: Sequence[str]) -> str:
    number = "1 task" if len(tasks) == 1 else f"{len(tasks)} tasks"
    return f"{number} ({few(tasks, _MAX_TASKS)})"
