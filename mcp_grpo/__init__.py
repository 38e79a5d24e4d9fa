"""Train language models on real MCP tools."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from mcp_grpo.config import MCPGRPOConfig
    from mcp_grpo.errors import MCPGRPOError
    from mcp_grpo.evaluation import Endpoint, SimulatedUser, compare, comparison_table, summarize
    from mcp_grpo.monitor import TrainingProgress, explain, plot_curves
    from mcp_grpo.policy_evaluation import evaluate
    from mcp_grpo.publishing import export_for_serving, load_adapter, serve_command
    from mcp_grpo.rewards import exact_answer, fault_penalty
    from mcp_grpo.tools import Cassette, ToolPool, load_servers
    from mcp_grpo.trainer import MCPGRPOTrainer
    from mcp_grpo.types import StopReason, Task, ToolCall, ToolResult, Trajectory, UserTurn

# Loaded when they are asked for: a server that ships with the library is a process of its own and must not wait for torch.
_HOMES = {
    "Cassette": "tools",
    "Endpoint": "evaluation",
    "MCPGRPOConfig": "config",
    "MCPGRPOError": "errors",
    "MCPGRPOTrainer": "trainer",
    "SimulatedUser": "evaluation",
    "StopReason": "types",
    "Task": "types",
    "ToolCall": "types",
    "ToolPool": "tools",
    "ToolResult": "types",
    "TrainingProgress": "monitor",
    "Trajectory": "types",
    "UserTurn": "types",
    "compare": "evaluation",
    "comparison_table": "evaluation",
    "evaluate": "policy_evaluation",
    "exact_answer": "rewards",
    "explain": "monitor",
    "export_for_serving": "publishing",
    "fault_penalty": "rewards",
    "load_adapter": "publishing",
    "load_servers": "tools",
    "plot_curves": "monitor",
    "serve_command": "publishing",
    "summarize": "evaluation",
}

__all__ = [
    "Cassette",
    "Endpoint",
    "MCPGRPOConfig",
    "MCPGRPOError",
    "MCPGRPOTrainer",
    "SimulatedUser",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolPool",
    "ToolResult",
    "TrainingProgress",
    "Trajectory",
    "UserTurn",
    "compare",
    "comparison_table",
    "evaluate",
    "exact_answer",
    "explain",
    "export_for_serving",
    "fault_penalty",
    "load_adapter",
    "load_servers",
    "plot_curves",
    "serve_command",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mcp_grpo' has no attribute {name!r}")
    return getattr(import_module(f"mcp_grpo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
