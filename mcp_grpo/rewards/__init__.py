"""Reward functions over trajectories."""

from mcp_grpo.rewards.outcome import exact_answer, fault_penalty, is_answered


__all__ = ["exact_answer", "fault_penalty", "is_answered"]
