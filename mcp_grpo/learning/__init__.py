"""The learning signal."""

from mcp_grpo.learning.batches import padded_masks, rollout_columns
from mcp_grpo.learning.checks import check_failures, check_groups
from mcp_grpo.learning.diagnostics import Ratio, reduced, trajectory_metrics
from mcp_grpo.learning.extras import kl_of_masked
from mcp_grpo.learning.grammar import GrammarRoles, SamplerRoles
from mcp_grpo.learning.schema_mask import MaskRule, SchemaMask
from mcp_grpo.learning.syntax import SyntaxRoles


__all__ = [
    "GrammarRoles",
    "MaskRule",
    "Ratio",
    "SamplerRoles",
    "SchemaMask",
    "SyntaxRoles",
    "check_failures",
    "check_groups",
    "kl_of_masked",
    "padded_masks",
    "reduced",
    "rollout_columns",
    "trajectory_metrics",
]
