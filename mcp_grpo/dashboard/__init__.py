"""The page that follows runs while they train: curves, health, and every trajectory, token by token."""

from mcp_grpo.dashboard.server import serve


__all__ = ["serve"]
