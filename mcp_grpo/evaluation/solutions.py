"""Scripted solutions of tasks, run on the real servers."""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from mcp_grpo.errors import TaskFormatError, ToolServerError
from mcp_grpo.rewards.task import is_done
from mcp_grpo.tools import Lease, ToolPool
from mcp_grpo.types import Exchange, Message, Segment, StopReason, Task, ToolCall, Trajectory


COLUMN = "solution"
_AT_ONCE = 16
_MAX_TASKS = 3  # named in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """
    What came of a scripted solution.

    Args:
        trajectory ([`Trajectory`]):
            What was done. Nobody sampled it: it has one placeholder token for each turn.
        problems (`tuple[str, ...]`):
            Why it proves nothing, one sentence each; empty if it solves its task.
    """

    trajectory: Trajectory
    problems: tuple[str, ...]


def run_solutions(tasks: Sequence[Task], servers: Any, *, timeout: float = 120.0) -> list[Solution]:
    """
    Run the scripted solutions of tasks on the servers they are for.

    A solution is the column `solution` of a row: `{"steps": [{"calls": [{"name": ..., "arguments": ...}], "evidence": [...],
    "fails": false}], "final": "..."}`. Each step is a turn. Its `evidence` must be in what the tools say, so that who goes
    on from there can know it; a step that `fails` must get an error. `final` is the message that ends it: without one, it was
    cut short and solves nothing.

    Args:
        tasks (`Sequence[Task]`):
            The tasks, such as [`tasks_from_rows`] returns.
        servers (`Any`):
            What [`MCPGRPOTrainer`] takes as `servers`.
        timeout (`float`, *optional*, defaults to `120.0`):
            Seconds that one solution may take.

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
        return portal.call(_run_all, tasks, servers, timeout)


def called_tools(task: Task) -> list[str]:
    """
    Name the tools that the scripted solution of a task calls.

    Args:
        task ([`Task`]):
            The task.

    Returns:
        `list[str]`: Their names; none if it has no solution, and not those of steps that are to fail.
    """
    script = task.metadata.get(COLUMN)
    if script is None:
        return []
    return [call["name"] for step in script["steps"] if not step.get("fails") for call in step["calls"]]


def check_solution_forms(tasks: Sequence[Task]) -> None:
    """
    Refuse tasks without a scripted solution that could be run.

    Args:
        tasks (`Sequence[Task]`):
            The tasks.

    Raises:
        [`TaskFormatError`]: If there is one; the message has all of them.
    """
    without = [repr(task.task_id) for task in tasks if not isinstance(task.metadata.get(COLUMN), Mapping)]
    if without:
        of_them = f"Task {without[0]} has" if len(without) == 1 else f"{len(without)} tasks ({_few(without)}) have"
        raise TaskFormatError(
            f"{of_them} no `{COLUMN}` to run. Tasks of `mcp-grpo tasks build` have one; write one for yours, or leave them "
            "out."
        )
    wrong = [repr(task.task_id) for task in tasks if not _is_script(task.metadata[COLUMN])]
    if wrong:
        raise TaskFormatError(
            f"The `{COLUMN}` of {_few(wrong)} cannot be run. It must be of the form "
            '{"steps": [{"calls": [{"name": "...", "arguments": {...}}]}], "final": "..."}.'
        )


def _is_script(script: Any) -> bool:
    try:
        named = [(call["name"], dict(call["arguments"])) for step in script["steps"] for call in step["calls"]]
    except (KeyError, TypeError, ValueError):
        return False
    return all(isinstance(name, str) for name, _ in named) and isinstance(script.get("final"), str)


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_MAX_TASKS]) + (f" and {len(names) - _MAX_TASKS} more" if len(names) > _MAX_TASKS else "")


async def _run_all(tasks: Sequence[Task], servers: Any, timeout: float) -> list[Solution]:
    found: dict[int, Solution] = {}
    room = anyio.CapacityLimiter(_AT_ONCE)

    async def run(index: int, task: Task) -> None:
        async with room:
            found[index] = await _run(task, pool, timeout)

    async with ToolPool(servers) as pool, anyio.create_task_group() as group:
        for index, task in enumerate(tasks):
            group.start_soon(run, index, task)
    return [found[index] for index in range(len(tasks))]


async def _run(task: Task, pool: ToolPool, timeout: float) -> Solution:
    script = task.metadata[COLUMN]
    attempt = _Attempt(task)
    states: dict[str, Any] = {}
    try:
        async with AsyncExitStack() as stack:
            with anyio.fail_after(timeout):
                lease = await stack.enter_async_context(pool.lease(task))
                for step in script["steps"]:
                    await attempt.take(step, lease)
                states = await lease.states()
    except (ToolServerError, TimeoutError) as error:
        attempt.problems.append(f"The servers failed: {error}")
    return attempt.finish(script.get("final") or "", states)


class _Attempt:
    """What has been done so far."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.problems: list[str] = []
        self._messages: list[Message] = []
        self._exchanges: list[Exchange] = []
        self._num_turns = 0

    async def take(self, step: Mapping[str, Any], lease: Lease) -> None:
        calls = [ToolCall(name=call["name"], arguments=call["arguments"]) for call in step["calls"]]
        results = await lease.call_all(calls)
        self._messages.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                    for call in calls
                ],
            }
        )
        for call, result in zip(calls, results, strict=True):
            self._exchanges.append(Exchange(call=call, result=result, turn=self._num_turns))
            self._messages.append({"role": "tool", "name": call.name, "content": result.text})
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

    def finish(self, final: str, states: Mapping[str, Any]) -> Solution:
        self._messages.append({"role": "assistant", "content": final})
        turn = Segment(token_ids=(0,), logprobs=(0.0,))
        trajectory = Trajectory(
            task=self.task,
            prompt_ids=(0,),
            segments=(turn,) * (self._num_turns + 1),
            messages=tuple(self._messages),
            exchanges=tuple(self._exchanges),
            stop_reason=StopReason.ANSWERED,
            states=states,
        )
        if trajectory.answer is None:
            self.problems.append(
                "It does not come to an answer: `final` is empty. Let it be the message that the policy is to end with."
            )
        if not self.problems and not is_done(trajectory):
            self.problems.append(f"What it comes to is not what the task wants: {final!r}, {dict(states)}")
        if self.task.max_turns is not None and trajectory.num_turns > self.task.max_turns:
            self.problems.append(f"It takes {trajectory.num_turns} turns, and the task allows {self.task.max_turns}.")
        return Solution(trajectory=trajectory, problems=tuple(self.problems))
