"""Trajectories as rows of a table."""

import json
from collections.abc import Sequence

from mcp_grpo.types import Exchange, Trajectory


MAX_RESULT_CHARACTERS = 500  # of a result in a table; the whole of it is in the messages


def trajectory_columns(trajectories: Sequence[Trajectory]) -> dict[str, list]:
    """
    What a table says about trajectories beside their prompts, messages and rewards.

    Args:
        trajectories (`Sequence[Trajectory]`):
            The trajectories.

    Returns:
        `dict[str, list]`: Columns `task_id`, `calls` (each call with its result, a line each), `turns` and `stop_reason`.
    """
    return {
        "task_id": [trajectory.task.task_id for trajectory in trajectories],
        "calls": ["\n".join(map(_line, trajectory.exchanges)) for trajectory in trajectories],
        "turns": [trajectory.num_turns for trajectory in trajectories],
        "stop_reason": [str(trajectory.stop_reason) for trajectory in trajectories],
    }


def _line(exchange: Exchange) -> str:
    call, result = exchange.call, exchange.result
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
    text = result.text if len(result.text) <= MAX_RESULT_CHARACTERS else result.text[:MAX_RESULT_CHARACTERS] + " ..."
    return f"{call.name}({arguments}) -> {result.kind}: {' '.join(text.split())}"
