"""Evaluation: what a policy can do."""

from mcp_grpo.evaluation.judged import (
    EVALUATIONS_FILE,
    Interval,
    Judged,
    best_of,
    change,
    mean_of_tasks,
    read_judged,
    write_judged,
)
from mcp_grpo.evaluation.report import Evaluation, comparison_rows, comparison_table, evaluate
from mcp_grpo.evaluation.solutions import Solution, run_solutions


__all__ = [
    "EVALUATIONS_FILE",
    "Evaluation",
    "Interval",
    "Judged",
    "Solution",
    "best_of",
    "change",
    "comparison_rows",
    "comparison_table",
    "evaluate",
    "mean_of_tasks",
    "read_judged",
    "run_solutions",
    "write_judged",
]
