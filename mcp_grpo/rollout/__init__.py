"""The rollout: from tasks to trajectories."""

from mcp_grpo.rollout.call_format import CallFormat, output_rows, set_call_format
from mcp_grpo.rollout.collect import Batch, BatchCollector, check_failures
from mcp_grpo.rollout.engine import RolloutEngine
from mcp_grpo.rollout.imitation import conversation_tokens
from mcp_grpo.rollout.loop import Limits, derived_seed, roll_out
from mcp_grpo.rollout.progress import RolloutProgress, progress_bar
from mcp_grpo.rollout.refill import flat_groups, other_rows, refill
from mcp_grpo.rollout.renderer import ParsedTurn, Renderer
from mcp_grpo.rollout.scheduling import TurnHistory


__all__ = [
    "Batch",
    "BatchCollector",
    "CallFormat",
    "Limits",
    "ParsedTurn",
    "Renderer",
    "RolloutEngine",
    "RolloutProgress",
    "TurnHistory",
    "check_failures",
    "conversation_tokens",
    "derived_seed",
    "flat_groups",
    "other_rows",
    "output_rows",
    "progress_bar",
    "refill",
    "roll_out",
    "set_call_format",
]
