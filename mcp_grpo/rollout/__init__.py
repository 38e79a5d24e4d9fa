"""The rollout: from tasks to trajectories."""

from mcp_grpo.rollout.engine import RolloutEngine
from mcp_grpo.rollout.generator import Generation, Generator, Sampling
from mcp_grpo.rollout.loop import Limits, derived_seed, roll_out
from mcp_grpo.rollout.renderer import ParsedTurn, Renderer
from mcp_grpo.rollout.transformers_generator import TransformersGenerator


__all__ = [
    "Generation",
    "Generator",
    "Limits",
    "ParsedTurn",
    "Renderer",
    "RolloutEngine",
    "Sampling",
    "TransformersGenerator",
    "derived_seed",
    "roll_out",
]
