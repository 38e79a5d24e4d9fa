"""Run scripted solutions of tasks on the real servers."""

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from mcp_grpo.errors import SettingsError, TaskFormatError, ToolServerError
from mcp_grpo.rewards.task import is_done
from mcp_grpo.rollout.replay import COLUMN, call_message, rounds_of
from mcp_grpo.tasks.grounding import unseen_values
from mcp_grpo.tasks.rows import few
from mcp_grpo.tools import Lease, ToolPool
from mcp_grpo.tools.users import User
from mcp_grpo.types import Exchange, Message, Segment, StopReason, Task, ToolCall, Trajectory


_MAX_TASKS = 3  # named in a message
_MAX_ROUNDS = 64  # of a script that repeats itself
_ID = re.compile(r"(?=.*[\d@])[\w.@:/#-]{4,64}")
_DATE = re.compile(r"\d{4}-\d\d(-\d\d)?|\d\d?:\d\d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """
    Result of a scripted solution.

    Args:
        trajectory ([`Trajectory`]):
            The trajectory, with one placeholder token for each turn.
        problems (`tuple[str, ...]`):
            Problems, one sentence each; empty if it solves its task.
        tools (`tuple[Mapping[str, Any], ...]`, *optional*):
            Schemas of the tools that it could call.
    """

    trajectory: Trajectory
    problems: tuple[str, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripted:
    """
    A policy that follows a script for each task, for [`~mcp_grpo.evaluate`].

    Args:
        name (`str`):
            Name of the policy.
        script (`Callable[[Task], Mapping[str, Any]]`, *optional*):
            Returns the script of a task, in the form of a `solution`; the task's own, if not given.
    """

    name: str
    script: Callable[[Task], Any] = lambda task: task.metadata.get(COLUMN)

    def tasks(self, tasks: Iterable[Task]) -> list[Task]:
        """Return tasks whose solutions are the scripts."""
        return [replace(task, metadata={**task.metadata, COLUMN: self.script(task)}) for task in tasks]


GROUND_TRUTH = Scripted(name="ground-truth")
"""The scripted solutions of the tasks themselves."""
NOTHING = Scripted(
    name="nothing",
    script=lambda task: {"rounds": [{"steps": [], "final": "I do not know."}] * (1 + len(task.user_turns))},
)
"""A policy that calls nothing and says so."""


def run_solutions(
    tasks: Sequence[Task],
    servers: Any,
    *,
    timeout: float = 120.0,
    is_success: Callable[[Trajectory], bool] = is_done,
    max_concurrent: int = 16,
    user: User | None = None,
) -> list[Solution]:
    """
    Run the scripted solutions of tasks on the servers they are for.

    A solution is the column `solution` of a row: `{"steps": [{"calls": [{"name": ..., "arguments": ...}], "evidence": [...],
    "fails": false}], "final": "..."}`. Each step is a turn. The tools' results must contain its `evidence`, which the next
    turns rely on; a step that `fails` must get an error. `final` is the final message, without which nothing is solved. Where the
    user says more (`user_turns`), it is `{"rounds": [...]}`, one such script for each message of the user.

    Args:
        tasks (`Sequence[Task]`):
            The tasks, such as [`tasks_from_rows`] returns.
        servers (`Any`):
            What [`MCPGRPOTrainer`] takes as `servers`.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds per solution.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task; whether it gave the task's answer and left the state it asks for, if not given.
        max_concurrent (`int`, *optional*, defaults to `16`):
            Solutions under way at a time.
        user (`Callable`, *optional*):
            Says what users say next, as [`MCPGRPOTrainer`] takes it. A script whose last words are an answer without calls repeats
            them for as long as the user has more to say.

    Returns:
        `list[Solution]`: One for each task, in their order.

    Example:

    ```python
    tasks = tasks_from_rows(build_tasks("test", 20))
    broken = [one for one in run_solutions(tasks, desk_servers()) if one.problems]
    ```
    """
    check_solution_forms(tasks)
    with start_blocking_portal(name="mcp-grpo-solutions") as portal:  # a notebook has a loop in this thread already
        return portal.call(_run_all, tasks, servers, timeout, is_success, max_concurrent, user)


def called_tools(task: Task) -> list[str]:
    """Name the tools that the scripted solution of a task calls."""
    if task.metadata.get(COLUMN) is None:
        return []
    steps = [step for script in rounds_of(task) for step in script["steps"]]
    return [call["name"] for step in steps if not step.get("fails") for call in step["calls"]]


def check_solution_forms(tasks: Sequence[Task]) -> None:
    """Refuse tasks without a scripted solution that could be run."""
    without = [repr(task.task_id) for task in tasks if not isinstance(task.metadata.get(COLUMN), Mapping)]
    if without:
        of_them = (
            f"Task {without[0]} has"
            if len(without) == 1
            else f"{len(without)} tasks ({few(without, _MAX_TASKS)}) have"
        )
        raise TaskFormatError(
            f"{of_them} no `{COLUMN}` to run. Tasks of `mcp-grpo tasks build` have one; write one for yours, or leave them "
            "out."
        )
    wrong = [repr(task.task_id) for task in tasks if not _is_solution(task.metadata[COLUMN])]
    if wrong:
        raise TaskFormatError(
            f"The `{COLUMN}` of {few(wrong, _MAX_TASKS)} cannot be run. It must be of the form "
            '{"steps": [{"calls": [{"name": "...", "arguments": {...}}]}], "final": "..."}, or {"rounds": [...]} with one of these for each message of the user.'
        )
    torn = [
        f"{task.task_id!r} ({len(rounds_of(task))} of {1 + len(task.user_turns)})"
        for task in tasks
        if task.user_turns and len(rounds_of(task)) != 1 + len(task.user_turns)
    ]
    if torn:
        raise TaskFormatError(
            f"The `{COLUMN}` of {few(torn, _MAX_TASKS)} needs one of its `rounds` for the prompt and each of the `user_turns`."
        )
    if (call := _filled_call(tasks)) is not None:
        raise TaskFormatError(
            f"Every call of a `{COLUMN}` has the arguments of all tools: the one of {call['name']!r} has {call['arguments']}. "
            "`Dataset.from_list` and Parquet add what others have as `None`, and a policy would learn to write it. Write the rows "
            'to a file of JSON Lines, and read it with `mcp_grpo.tasks.load_tasks("tasks.jsonl")`.'
        )


def _filled_call(tasks: Sequence[Task]) -> Mapping[str, Any] | None:
    """Return a call to which Arrow has added arguments of other tools; `None` if there is none."""
    steps = [step for task in tasks for script in rounds_of(task) for step in script["steps"]]
    calls = [call for step in steps for call in step["calls"]]
    if len({call["name"] for call in calls}) < 2 or len({frozenset(call["arguments"]) for call in calls}) > 1:
        return None
    return next((call for call in calls if None in dict(call["arguments"]).values()), None)


def check_replayed(tasks: Sequence[Task]) -> None:
    """Refuse tasks of which none has a scripted solution to replay, or one has a wrong form."""
    scripted = [task for task in tasks if task.metadata.get(COLUMN)]
    if tasks and not scripted:
        raise SettingsError(
            f"`replay_solutions` is on, but no task has a `{COLUMN}` to replay. Tasks of `mcp-grpo tasks build` have one; write "
            "some for yours, or set it off."
        )
    check_solution_forms(scripted)


def _is_solution(solution: Any) -> bool:
    rounds = solution.get("rounds")
    return _is_script(solution) if rounds is None else bool(rounds) and all(_is_script(each) for each in rounds)


def _is_script(script: Any) -> bool:
    try:
        named = [(call["name"], dict(call["arguments"])) for step in script["steps"] for call in step["calls"]]
        _ = script["final"]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(name, str) for name, _ in named) and isinstance(script["final"], str)


async def _run_all(
    tasks: Sequence[Task],
    servers: Any,
    timeout: float,
    is_success: Callable[[Trajectory], bool],
    max_concurrent: int,
    user: User | None,
) -> list[Solution]:
    found: dict[int, Solution] = {}
    room = anyio.CapacityLimiter(max_concurrent)

    async def run(index: int, task: Task) -> None:
        async with room:
            found[index] = await _run(task, pool, timeout, is_success)

    async with ToolPool(servers, user=user) as pool, anyio.create_task_group() as group:
        for index, task in enumerate(tasks):
            group.start_soon(run, index, task)
    return [found[index] for index in range(len(tasks))]


async def _run(task: Task, pool: ToolPool, timeout: float, is_success: Callable[[Trajectory], bool]) -> Solution:
    attempt = _Attempt(task, is_success)
    states: dict[str, Any] = {}
    try:
        async with AsyncExitStack() as stack:
            with anyio.fail_after(timeout):
                lease = await stack.enter_async_context(pool.lease(task))
                await attempt.run(lease)
                states = await lease.states()
    except (ToolServerError, TimeoutError) as error:
        attempt.error = str(error)
        attempt.problems.append(f"The servers failed: {error}")
    return attempt.finish(states)


class _Attempt:
    """A solution while it runs."""

    def __init__(self, task: Task, is_success: Callable[[Trajectory], bool]) -> None:
        self.task = task
        self._is_success = is_success
        self.problems: list[str] = []
        self.error: str | None = None
        self._messages: list[Message] = []
        self._exchanges: list[Exchange] = []
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._num_turns = 0
        self._start = time.monotonic()

    async def run(self, lease: Lease) -> None:
        self._tools = tuple(tool.schema for tool in lease.tools)
        rounds = rounds_of(self.task)
        last = [] if rounds[-1]["steps"] else [rounds[-1]] * (_MAX_ROUNDS - len(rounds))
        for number, script in enumerate([*rounds, *last], start=1):
            for step in script["steps"]:
                await self._take(step, lease)
            self._messages.append({"role": "assistant", "content": script.get("final") or ""})
            self._num_turns += 1
            said = await lease.next_user_turn(lambda: self._trajectory({}))
            if said is None:
                if number < len(rounds):
                    self.problems.append(f"The user has no more to say after {number} of its {len(rounds)} rounds.")
                return
            self._messages.append({"role": "user", "content": said[0].content})
        self._messages.pop()
        self.problems.append("The user has more to say than it answers. Give it a round for each message of the user.")

    async def _take(self, step: Mapping[str, Any], lease: Lease) -> None:
        calls = [ToolCall(name=call["name"], arguments=call["arguments"]) for call in step["calls"]]
        results = await lease.call_all(calls)
        self._messages.append(call_message(step))
        for call, result in zip(calls, results, strict=True):
            self._exchanges.append(Exchange(call=call, result=result, turn=self._num_turns))
            self._messages.append({"role": "tool", "name": call.name, "content": result.text})
            if result.kind.is_server_fault and self.error is None:
                self.error = f"`{call.name}`: {result.text}"
            if result.is_error != step.get("fails", False):
                self.problems.append(
                    f"Turn {self._num_turns}: `{call.name}` was {'an error' if result.is_error else 'no error'}, which is not "
                    f"what the script says: {result.text[:200]}"
                )
        said = "\n".join(result.text for result in results)
        self.problems += [
            f"Turn {self._num_turns}: the results do not say {evidence!r}: {said[:200]}"
            for evidence in step.get("evidence", ())
            if evidence not in said
        ]
        self._num_turns += 1

    def _trajectory(self, states: Mapping[str, Any]) -> Trajectory:
        return Trajectory(
            task=self.task,
            prompt_ids=(0,),
            segments=(Segment(token_ids=(0,), logprobs=(0.0,)),) * self._num_turns,
            messages=tuple(self._messages),
            exchanges=tuple(self._exchanges),
            stop_reason=StopReason.ANSWERED if self.error is None else StopReason.SERVER_FAILED,
            seconds=time.monotonic() - self._start,
            error=self.error,
            states=states,
        )

    def finish(self, states: Mapping[str, Any]) -> Solution:
        if self.problems and (not self._messages or self._messages[-1]["role"] != "assistant"):
            self._messages.append({"role": "assistant", "content": ""})  # the servers broke it off
        trajectory = self._trajectory(states)
        if trajectory.answer is None and not self.problems:
            self.problems.append(
                "It does not come to an answer: `final` is empty. Let it be the message that the policy is to end with."
            )
        if not self.problems and not self._is_success(trajectory):
            self.problems.append(f"What it comes to is not what the task wants: {trajectory.answer!r}, {dict(states)}")
        num_turns = max(len(script["steps"]) + 1 for script in rounds_of(self.task))
        if self.task.max_turns is not None and num_turns > self.task.max_turns:
            self.problems.append(f"It takes {num_turns} turns, and the task allows {self.task.max_turns}.")
        return Solution(trajectory=trajectory, problems=tuple(self.problems), tools=self._tools)


def guesses(solutions: Sequence[Solution]) -> dict[str, str]:
    """
    Find solutions that call with an id that nothing before has shown, which a policy that imitates them learns to make up.

    Args:
        solutions (`Sequence[Solution]`):
            Solutions that were run.

    Returns:
        `dict[str, str]`: The first such value, by the id of the task. Dates, and texts with spaces, can be worked out or written, and are
        left out.
    """
    found: dict[str, str] = {}
    for one in solutions:
        task, messages = one.trajectory.task, one.trajectory.messages
        values = (str(value) for value in unseen_values(task.prompt, messages, one.tools))
        first = next((value for value in values if _ID.fullmatch(value) and not _DATE.match(value)), None)
        if first is not None:
            found[task.task_id] = first
    return found
