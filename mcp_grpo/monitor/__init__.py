"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.card import RunSummary, installed_versions, rewrite_card
from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.metrics_file import METRICS_FILE, MetricsFile
from mcp_grpo.monitor.profile import Phases, profile_table
from mcp_grpo.monitor.progress import TrainingProgress
from mcp_grpo.monitor.tables import trajectory_columns
from mcp_grpo.monitor.trackio_scope import TrackioScope
from mcp_grpo.monitor.trajectory_log import TrajectoryLog


__all__ = [
    "METRICS_FILE",
    "MetricsFile",
    "Phases",
    "RunSummary",
    "TrackioScope",
    "TrainingProgress",
    "TrajectoryLog",
    "installed_versions",
    "plot_curves",
    "profile_table",
    "rewrite_card",
    "trajectory_columns",
]
