"""Roll out scripted solutions, token by token as the policy would write them."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from typing import Any

from mcp_grpo.errors import RolloutError
from mcp_grpo.rollout.renderer import Renderer
from mcp_grpo.sampling.generator import Generation, Sampling
from mcp_grpo.types import Message, StopReason, Task, Trajectory


COLUMN = "solution"
"""Column of a task's row that has its scripted solution."""


class ScriptedGenerator:
    """
    Generator that writes given turns instead of sampling them, so that a rollout runs them on the real servers.

    Their log-probabilities are 0 here: only the policy can tell them, and it does when it is trained on them.

    Args:
        turns (`Mapping[int, Sequence[Sequence[int]]]`):
            Token ids of each turn, by the number of the trajectory ([`Sampling.trajectory`]).
    """

    def __init__(self, turns: Mapping[int, Sequence[Sequence[int]]]) -> None:
        self._left = {trajectory: list(found) for trajectory, found in turns.items()}

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        left = self._left[sampling.trajectory]
        if not left:
            raise RolloutError(
                "A scripted solution was to go on after its last turn: its `final`, or what it says beside a call, reads as a tool call. "
                "Write it in other words."
            )
        token_ids = tuple(left.pop(0))
        written = token_ids[: sampling.max_tokens]
        return Generation(
            token_ids=written,
            logprobs=(0.0,) * len(written),
            finish_reason="stop" if len(written) == len(token_ids) else "length",
        )

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]. There is nothing to compute; this only waits."""
        wait([until])


def scripted_turns(task: Task, renderer: Renderer) -> list[tuple[int, ...]]:
    """Return the tokens of each turn of the scripted solution of a task, as the policy would write them."""
    return [renderer.turn_ids(message) for script in rounds_of(task) for message in _messages(script)]


def rounds_of(task: Task) -> list[Mapping[str, Any]]:
    """Return the scripted solution of a task, by the messages of the user: its `rounds`, or the whole as one."""
    script = task.metadata[COLUMN]
    return list(script.get("rounds") or [script])


def _messages(script: Mapping[str, Any]) -> list[Message]:
    return [*map(call_message, script["steps"]), {"role": "assistant", "content": script["final"]}]


def call_message(step: Mapping[str, Any]) -> Message:
    """Return the message of a step of a solution."""
    calls = [
        {"type": "function", "function": {"name": call["name"], "arguments": dict(call["arguments"])}}
        for call in step["calls"]
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


_CUT = {
    StopReason.MAX_TOKENS: "it is longer than `max_completion_length`, or a turn of it than `max_turn_tokens`",
    StopReason.MAX_TURNS: "it has more turns than `max_turns`",
    StopReason.CONTEXT_FULL: "it does not fit into the model's context",
}


def why_unfit(trajectory: Trajectory, is_solved: Callable[[Trajectory], bool]) -> str | None:
    """Return why a solution that was run is not to be learnt from, as a clause; `None` if it is."""
    if trajectory.is_failed:
        return "the servers failed"
    if trajectory.stop_reason in _CUT:
        return _CUT[trajectory.stop_reason]
    # It would teach to say what cannot be seen.
    if any(exchange.result.num_cut for exchange in trajectory.exchanges):
        return "a tool result is longer than `max_result_tokens`"
    return None if is_solved(trajectory) else "it does not solve its task"


def limits_sentence(attempts: Sequence[Trajectory], is_success: Callable[[Trajectory], bool]) -> str | None:
    """Say how many scripted solutions the limits of a run do not allow; `None` if they allow all."""
    unfit = [(problem, attempt.task.kind) for attempt in attempts if (problem := why_unfit(attempt, is_success))]
    if not unfit:
        return None
    problems = Counter(problem for problem, _ in unfit)
    kinds = {
        problem: sorted({f"`{kind}`" for each, kind in unfit if each == problem and kind}) for problem in problems
    }
    reasons = "; ".join(
        f"{count} because {problem}" + (f" ({', '.join(kinds[problem])})" if kinds[problem] else "")
        for problem, count in problems.most_common()
    )
    return (
        f"{len(unfit)} of {len(attempts)} tasks to judge by cannot be done as their solutions do within the limits of this run: "
        f"{reasons}. The policy may never succeed in these."
    )
