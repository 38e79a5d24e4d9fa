"""Evaluation: what a policy can do."""

from mcp_grpo.evaluation.report import Evaluation, comparison_table, evaluate


__all__ = ["Evaluation", "comparison_table", "evaluate"]
