"""Train language models on real MCP tools."""

from importlib import import_module
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from mcp_grpo.config import MCPGRPOConfig
    from mcp_grpo.errors import MCPGRPOError
    from mcp_grpo.evaluation import comparison_table, evaluate
    from mcp_grpo.hub import export_for_serving, load_adapter, serve_command
    from mcp_grpo.monitor import TrainingProgress, plot_curves
    from mcp_grpo.rewards import exact_answer, fault_penalty
    from mcp_grpo.tools import Cassette, ToolPool, load_servers
    from mcp_grpo.trainer import MCPGRPOTrainer
    from mcp_grpo.types import StopReason, Task, ToolCall, ToolResult, Trajectory

# Loaded when they are asked for: a server that ships with the library is a process of its own and must not wait for torch.
_HOMES = {
    "Cassette": "tools",
    "MCPGRPOConfig": "config",
    "MCPGRPOError": "errors",
    "MCPGRPOTrainer": "trainer",
    "StopReason": "types",
    "Task": "types",
    "ToolCall": "types",
    "ToolPool": "tools",
    "ToolResult": "types",
    "TrainingProgress": "monitor",
    "Trajectory": "types",
    "comparison_table": "evaluation",
    "evaluate": "evaluation",
    "exact_answer": "rewards",
    "export_for_serving": "hub",
    "fault_penalty": "rewards",
    "load_adapter": "hub",
    "load_servers": "tools",
    "plot_curves": "monitor",
    "serve_command": "hub",
}

__all__ = [
    "Cassette",
    "MCPGRPOConfig",
    "MCPGRPOError",
    "MCPGRPOTrainer",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolPool",
    "ToolResult",
    "TrainingProgress",
    "Trajectory",
    "comparison_table",
    "evaluate",
    "exact_answer",
    "export_for_serving",
    "fault_penalty",
    "load_adapter",
    "load_servers",
    "plot_curves",
    "serve_command",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mcp_grpo' has no attribute {name!r}")
    return getattr(import_module(f"mcp_grpo.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
