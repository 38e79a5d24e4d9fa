"""The view: what a run does, while it does it."""

from mcp_grpo.monitor.card import rewrite_card
from mcp_grpo.monitor.curves import plot_curves
from mcp_grpo.monitor.progress import TrainingProgress


__all__ = ["TrainingProgress", "plot_curves", "rewrite_card"]
