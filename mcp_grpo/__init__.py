"""Train language models on real MCP tools."""

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.errors import MCPGRPOError
from mcp_grpo.evaluation import comparison_table, evaluate
from mcp_grpo.monitor import TrainingProgress, plot_curves
from mcp_grpo.rewards import exact_answer, fault_penalty
from mcp_grpo.tools import Cassette, ToolPool, load_servers
from mcp_grpo.trainer import MCPGRPOTrainer
from mcp_grpo.types import StopReason, Task, ToolCall, ToolResult, Trajectory


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
    "fault_penalty",
    "load_servers",
    "plot_curves",
]
