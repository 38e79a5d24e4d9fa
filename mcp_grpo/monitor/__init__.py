"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.card import RunSummary, rewrite_card
from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.metrics_file import METRICS_FILE, MetricsFile
from mcp_grpo.monitor.progress import TrainingProgress
from mcp_grpo.monitor.tables import trajectory_columns


__all__ = [
    "METRICS_FILE",
    "MetricsFile",
    "RunSummary",
    "TrainingProgress",
    "plot_curves",
    "rewrite_card",
    "trajectory_columns",
]
