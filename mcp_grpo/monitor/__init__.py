"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.card import rewrite_card
from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.files import MetricsFile, TrajectoryLog
from mcp_grpo.monitor.profile import Phases, profile_table
from mcp_grpo.monitor.progress import TrainingProgress


__all__ = [
    "MetricsFile",
    "Phases",
    "TrainingProgress",
    "TrajectoryLog",
    "plot_curves",
    "profile_table",
    "rewrite_card",
]
