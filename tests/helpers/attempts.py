"""Finished trajectories, made by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

from mcp_grpo.types import Exchange, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


def attempt(
    message: str | None = "done",
    *,
    answer: Any = None,
    task_id: str = "t",
    kinds: Sequence[Sequence[ResultKind]] = (),
    states: Mapping[str, Any] | None = None,
    stop_reason: StopReason | None = None,
    **metadata: Any,
) -> Trajectory:
    """
    A trajectory with some calls in each turn and a final message; without one, it ran out of turns.
    """
    task = Task(task_id=task_id, prompt=({"role": "user", "content": "How much?"},), answer=answer, metadata=metadata)
    exchanges = tuple(
        Exchange(call=ToolCall(name="look", arguments={}), result=ToolResult(text="", kind=kind), turn=turn)
        for turn, made in enumerate(kinds)
        for kind in made
    )
    num_turns = len(kinds) + (message is not None)
    segments = [
        s for _ in range(num_turns) for s in (Segment(token_ids=(1,), logprobs=(0.0,)), Segment(token_ids=(2,)))
    ]
    messages = [{"role": "assistant", "content": "I call."}] * len(kinds)
    return Trajectory(
        task=task,
        prompt_ids=(0,),
        segments=tuple(segments),
        messages=(*messages, {"role": "assistant", "content": message or ""}),
        exchanges=exchanges,
        stop_reason=stop_reason or (StopReason.ANSWERED if message is not None else StopReason.MAX_TURNS),
        states=states or {},
    )
