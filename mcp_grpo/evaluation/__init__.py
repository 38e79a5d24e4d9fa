"""Evaluate policies, compare evaluations, and run scripted solutions."""

from mcp_grpo.evaluation.attempts import Attempt, AttemptFile, attempt_of, is_solved, missing
from mcp_grpo.evaluation.comparison import EVALUATIONS_FILE, Judged, best_of, change, read_judged, write_judged
from mcp_grpo.evaluation.endpoint import Endpoint
from mcp_grpo.evaluation.history import EvaluationHistory
from mcp_grpo.evaluation.local_model import LocalModel
from mcp_grpo.evaluation.report import (
    Comparison,
    Evaluation,
    Prices,
    ToolUse,
    compare,
    comparison_rows,
    comparison_table,
    markdown_report,
    summarize,
    tool_use,
)
from mcp_grpo.evaluation.simulated_user import SimulatedUser
from mcp_grpo.evaluation.solutions import (
    GROUND_TRUTH,
    NOTHING,
    Scripted,
    Solution,
    check_replayed,
    check_solution_forms,
    run_solutions,
)
from mcp_grpo.evaluation.statistics import Interval, mean_difference, mean_of_tasks, pass_all, pass_at


__all__ = [
    "EVALUATIONS_FILE",
    "GROUND_TRUTH",
    "NOTHING",
    "Attempt",
    "AttemptFile",
    "Comparison",
    "Endpoint",
    "Evaluation",
    "EvaluationHistory",
    "Interval",
    "Judged",
    "LocalModel",
    "Prices",
    "Scripted",
    "SimulatedUser",
    "Solution",
    "ToolUse",
    "attempt_of",
    "best_of",
    "change",
    "check_replayed",
    "check_solution_forms",
    "compare",
    "comparison_rows",
    "comparison_table",
    "is_solved",
    "markdown_report",
    "mean_difference",
    "mean_of_tasks",
    "missing",
    "pass_all",
    "pass_at",
    "read_judged",
    "run_solutions",
    "summarize",
    "tool_use",
    "write_judged",
]
