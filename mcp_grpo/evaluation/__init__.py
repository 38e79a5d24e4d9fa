"""Evaluation: what a policy can do."""

from mcp_grpo.evaluation.report import Evaluation, comparison_rows, comparison_table, evaluate


__all__ = ["Evaluation", "comparison_rows", "comparison_table", "evaluate"]
