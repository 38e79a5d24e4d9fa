"""Evaluation: what a policy can do."""

from mcp_grpo.evaluation.report import Evaluation, comparison_rows, comparison_table, evaluate
from mcp_grpo.evaluation.solutions import Solution, run_solutions


__all__ = ["Evaluation", "Solution", "comparison_rows", "comparison_table", "evaluate", "run_solutions"]
