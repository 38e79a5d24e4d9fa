"""The learning signal."""

from mcp_grpo.learning.advantages import MixingWeight, first_tokens, returns_to_go, to_tokens, turn_baseline, turn_gae
from mcp_grpo.learning.batches import rollout_columns, row_columns, token_columns
from mcp_grpo.learning.bootstrap import Bootstrap, imitation_loss, needs_bootstrap
from mcp_grpo.learning.checks import check_failures, check_groups
from mcp_grpo.learning.critic import MIN_SCALE, Critic, turn_columns
from mcp_grpo.learning.diagnostics import Ratio, pace_metrics, reduced, tool_metrics, trajectory_metrics
from mcp_grpo.learning.extras import kl_of_active, kl_of_masked
from mcp_grpo.learning.gate import RatioGate
from mcp_grpo.learning.grammar import GrammarRoles, SamplerRoles
from mcp_grpo.learning.health import REACTIONS, Health, HealthNote
from mcp_grpo.learning.kl import KLControl, capped_reference
from mcp_grpo.learning.padding import Unpadded, by_length, minds_width
from mcp_grpo.learning.reference import MovingReference
from mcp_grpo.learning.refill import other_rows, refill
from mcp_grpo.learning.schema_mask import MaskRule, SchemaMask
from mcp_grpo.learning.syntax import SyntaxRoles
from mcp_grpo.learning.token_metrics import TokenFigures, ratio_edges, ratio_quantiles, token_metrics, token_sums
from mcp_grpo.learning.turn_rewards import TurnRewards
from mcp_grpo.learning.value_head import (
    ValueRecorder,
    add_value_head,
    load_value_head,
    save_value_head,
    value_head_from_pretrained,
    without_value_head,
)


__all__ = [
    "MIN_SCALE",
    "REACTIONS",
    "Bootstrap",
    "Critic",
    "GrammarRoles",
    "Health",
    "HealthNote",
    "KLControl",
    "MaskRule",
    "MixingWeight",
    "MovingReference",
    "Ratio",
    "RatioGate",
    "SamplerRoles",
    "SchemaMask",
    "SyntaxRoles",
    "TokenFigures",
    "TurnRewards",
    "Unpadded",
    "ValueRecorder",
    "add_value_head",
    "by_length",
    "capped_reference",
    "check_failures",
    "check_groups",
    "first_tokens",
    "imitation_loss",
    "kl_of_active",
    "kl_of_masked",
    "load_value_head",
    "minds_width",
    "needs_bootstrap",
    "other_rows",
    "pace_metrics",
    "ratio_edges",
    "ratio_quantiles",
    "reduced",
    "refill",
    "returns_to_go",
    "rollout_columns",
    "row_columns",
    "save_value_head",
    "to_tokens",
    "token_columns",
    "token_metrics",
    "token_sums",
    "tool_metrics",
    "trajectory_metrics",
    "turn_baseline",
    "turn_columns",
    "turn_gae",
    "value_head_from_pretrained",
    "without_value_head",
]
