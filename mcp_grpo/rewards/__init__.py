"""Reward functions over trajectories."""

from mcp_grpo.rewards.answers import answer_match, is_matched, matches_answer
from mcp_grpo.rewards.outcome import exact_answer, fault_penalty, is_answered


__all__ = ["answer_match", "exact_answer", "fault_penalty", "is_answered", "is_matched", "matches_answer"]
