"""Trajectories as rows of a table."""

import json
from collections.abc import Sequence
from typing import Any

from mcp_grpo.types import Exchange, Trajectory


MAX_RESULT_CHARACTERS = 500  # of a result in a table; the whole of it is in the messages


def trajectory_columns(trajectories: Sequence[Trajectory]) -> dict[str, list]:
    """Return the columns of a table of trajectories beside their prompts, messages and rewards."""
    return {
        "task_id": [trajectory.task.task_id for trajectory in trajectories],
        "calls": ["\n".join(map(_line, trajectory.exchanges)) for trajectory in trajectories],
        "turns": [trajectory.num_turns for trajectory in trajectories],
        "stop_reason": [str(trajectory.stop_reason) for trajectory in trajectories],
    }


def table_messages(messages: Any) -> Any:
    """
    Return messages with the arguments of their calls as JSON text: a table wants the same fields in every row, each of one type,
    and a policy writes what it likes.
    """
    if not isinstance(messages, list):
        return messages
    return [_with_text_arguments(message) if message.get("tool_calls") else message for message in messages]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call.get("function", call) for call in message["tool_calls"]]
    written = [{"name": str(call.get("name")), "arguments": _as_object(call.get("arguments"))} for call in calls]
    return {**message, "tool_calls": [{"type": "function", "function": function} for function in written]}


def _as_object(arguments: Any) -> str:
    """Return arguments as the JSON text of an object, which is what TRL's table reads."""
    if isinstance(arguments, str):
        try:
            if isinstance(json.loads(arguments), dict):
                return arguments
        except (ValueError, RecursionError):
            pass
    named = arguments if isinstance(arguments, dict) else {"arguments": arguments}
    return json.dumps(named, ensure_ascii=False, default=str)


def _line(exchange: Exchange) -> str:
    call, result = exchange.call, exchange.result
    arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
    text = result.text if len(result.text) <= MAX_RESULT_CHARACTERS else result.text[:MAX_RESULT_CHARACTERS] + " ..."
    return f"{call.name}({arguments}) -> {result.kind}: {' '.join(text.split())}"
