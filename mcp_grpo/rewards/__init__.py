"""Reward functions over trajectories."""

from mcp_grpo.rewards.answers import answer_match, is_matched, matches_answer
from mcp_grpo.rewards.judge import Judge
from mcp_grpo.rewards.outcome import exact_answer, fault_penalty, is_answered
from mcp_grpo.rewards.rubric import Rubric
from mcp_grpo.rewards.shape import call_penalty, efficiency, format_reward
from mcp_grpo.rewards.states import is_as_expected, matches_state, state_match
from mcp_grpo.rewards.task import is_done, task_outcome
from mcp_grpo.rewards.words import AnswerWords


__all__ = [
    "AnswerWords",
    "Judge",
    "Rubric",
    "answer_match",
    "call_penalty",
    "efficiency",
    "exact_answer",
    "fault_penalty",
    "format_reward",
    "is_answered",
    "is_as_expected",
    "is_done",
    "is_matched",
    "matches_answer",
    "matches_state",
    "state_match",
    "task_outcome",
]
