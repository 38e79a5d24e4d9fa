"""The rollout: from tasks to trajectories."""

from mcp_grpo.rollout.background import Background
from mcp_grpo.rollout.engine import RolloutEngine
from mcp_grpo.rollout.generator import Generation, Generator, Sampling
from mcp_grpo.rollout.imitation import conversation_tokens
from mcp_grpo.rollout.loop import Limits, derived_seed, roll_out
from mcp_grpo.rollout.progress import RolloutProgress, progress_bar
from mcp_grpo.rollout.renderer import ParsedTurn, Renderer
from mcp_grpo.rollout.scheduling import Cutoff, Schedule, TurnHistory
from mcp_grpo.rollout.transformers_generator import TransformersGenerator


__all__ = [
    "Background",
    "Cutoff",
    "Generation",
    "Generator",
    "Limits",
    "ParsedTurn",
    "Renderer",
    "RolloutEngine",
    "RolloutProgress",
    "Sampling",
    "Schedule",
    "TransformersGenerator",
    "TurnHistory",
    "conversation_tokens",
    "derived_seed",
    "progress_bar",
    "roll_out",
]
