"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.card import RunSummary, installed_versions, rewrite_card
from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.gpu import GPUWatch
from mcp_grpo.monitor.metrics_file import METRICS_FILE, MetricsFile
from mcp_grpo.monitor.profile import Phases, profile_table
from mcp_grpo.monitor.progress import TrainingProgress
from mcp_grpo.monitor.projects import project_of_trackers
from mcp_grpo.monitor.report import health_lines, learning_sentence, learning_table, training_sentence
from mcp_grpo.monitor.tables import trajectory_columns
from mcp_grpo.monitor.terminal import TerminalHandler, speak_in_terminal
from mcp_grpo.monitor.trackio_scope import TrackioScope
from mcp_grpo.monitor.trajectory_log import TrajectoryLog


__all__ = [
    "METRICS_FILE",
    "GPUWatch",
    "MetricsFile",
    "Phases",
    "RunSummary",
    "TerminalHandler",
    "TrackioScope",
    "TrainingProgress",
    "TrajectoryLog",
    "health_lines",
    "installed_versions",
    "learning_sentence",
    "learning_table",
    "plot_curves",
    "profile_table",
    "project_of_trackers",
    "rewrite_card",
    "speak_in_terminal",
    "training_sentence",
    "trajectory_columns",
]
