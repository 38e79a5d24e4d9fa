"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.gpu import GPUWatch
from mcp_grpo.monitor.health import Health, HealthNote
from mcp_grpo.monitor.kinds import kinds_report, stuck_sentence
from mcp_grpo.monitor.metrics_file import METRICS_FILE, MetricsFile
from mcp_grpo.monitor.phases import Phases, profile_table
from mcp_grpo.monitor.recorder import ROW, TrajectoryRecorder
from mcp_grpo.monitor.report import health_lines, learning_sentence, learning_table, training_sentence
from mcp_grpo.monitor.results import RESULTS_FILE, Results, read_results, results_content, write_results
from mcp_grpo.monitor.run_file import RUN_FILE, RunFile
from mcp_grpo.monitor.run_monitor import RunMonitor, pass_metrics
from mcp_grpo.monitor.tables import table_messages, trajectory_columns
from mcp_grpo.monitor.terminal import InertFormatter, TerminalHandler, any_text_in_terminal, speak_in_terminal, tell
from mcp_grpo.monitor.token_view import TokenView, explain
from mcp_grpo.monitor.trackers import project_of_trackers
from mcp_grpo.monitor.trackio_scope import TrackioScope
from mcp_grpo.monitor.training_progress import TrainingProgress
from mcp_grpo.monitor.trajectory_log import ScoredBatch, TrajectoryLog


__all__ = [
    "METRICS_FILE",
    "RESULTS_FILE",
    "ROW",
    "RUN_FILE",
    "GPUWatch",
    "Health",
    "HealthNote",
    "InertFormatter",
    "MetricsFile",
    "Phases",
    "Results",
    "RunFile",
    "RunMonitor",
    "ScoredBatch",
    "TerminalHandler",
    "TokenView",
    "TrackioScope",
    "TrainingProgress",
    "TrajectoryLog",
    "TrajectoryRecorder",
    "any_text_in_terminal",
    "explain",
    "health_lines",
    "kinds_report",
    "learning_sentence",
    "learning_table",
    "pass_metrics",
    "plot_curves",
    "profile_table",
    "project_of_trackers",
    "read_results",
    "results_content",
    "speak_in_terminal",
    "stuck_sentence",
    "table_messages",
    "tell",
    "training_sentence",
    "trajectory_columns",
    "write_results",
]
