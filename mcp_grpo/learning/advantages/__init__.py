"""Advantages: one file per `advantage_mode`, each with its equation."""

from mcp_grpo.learning.advantages.gae import turn_gae
from mcp_grpo.learning.advantages.group_turn import flat_turns, turn_baseline, turn_columns
from mcp_grpo.learning.advantages.hybrid import MixingWeight
from mcp_grpo.learning.advantages.turns import first_tokens, returns_to_go, to_tokens, turn_mask


MODES_WITH_VALUES = ("gae", "hybrid")

__all__ = [
    "MODES_WITH_VALUES",
    "MixingWeight",
    "first_tokens",
    "flat_turns",
    "returns_to_go",
    "to_tokens",
    "turn_baseline",
    "turn_columns",
    "turn_gae",
    "turn_mask",
]
