"""The learning signal."""

from mcp_grpo.learning.checks import check_failures, check_groups
from mcp_grpo.learning.diagnostics import Ratio, trajectory_metrics


__all__ = ["Ratio", "check_failures", "check_groups", "trajectory_metrics"]
