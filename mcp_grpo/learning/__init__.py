"""The learning signal: trajectories or tensors in, tensors and metrics out."""

from mcp_grpo.learning.advantages import MODES_WITH_VALUES, flat_turns, returns_to_go, to_tokens, turn_columns
from mcp_grpo.learning.checkpointing import Checkpointing, activation_bytes
from mcp_grpo.learning.columns import ends_cut, rollout_columns, row_columns, sampled_column, token_columns, turns_of
from mcp_grpo.learning.credit import Credit
from mcp_grpo.learning.kl import KLControl
from mcp_grpo.learning.loss import Objective
from mcp_grpo.learning.padding import LabelledOnly, SampledOnly, Unpadded, depends_on_width
from mcp_grpo.learning.passes import BatchRows
from mcp_grpo.learning.pictures import Seeing, picture_columns
from mcp_grpo.learning.reference import MovingReference
from mcp_grpo.learning.scored_once import ScoredOnce
from mcp_grpo.learning.shared_prompts import PromptSharing, SharedPrompts
from mcp_grpo.learning.token_metrics import TokenMetrics, ratio_edges, token_metrics
from mcp_grpo.learning.turn_rewards import TurnRewards
from mcp_grpo.learning.value_head import (
    ValueRecorder,
    add_value_head,
    load_value_head,
    save_value_head,
    value_head_from_pretrained,
    without_value_head,
)
from mcp_grpo.learning.values import ValueEstimator
from mcp_grpo.learning.views import AsSeen, Views


__all__ = [
    "MODES_WITH_VALUES",
    "AsSeen",
    "BatchRows",
    "Checkpointing",
    "Credit",
    "KLControl",
    "LabelledOnly",
    "MovingReference",
    "Objective",
    "PromptSharing",
    "SampledOnly",
    "ScoredOnce",
    "Seeing",
    "SharedPrompts",
    "TokenMetrics",
    "TurnRewards",
    "Unpadded",
    "ValueEstimator",
    "ValueRecorder",
    "Views",
    "activation_bytes",
    "add_value_head",
    "depends_on_width",
    "ends_cut",
    "flat_turns",
    "load_value_head",
    "picture_columns",
    "ratio_edges",
    "returns_to_go",
    "rollout_columns",
    "row_columns",
    "sampled_column",
    "save_value_head",
    "to_tokens",
    "token_columns",
    "token_metrics",
    "turn_columns",
    "turns_of",
    "value_head_from_pretrained",
    "without_value_head",
]
