"""The schema mask: leave out of the loss the tokens of a tool call that were forced."""

from mcp_grpo.masking.bootstrap import Bootstrap, bootstrap_columns, imitation_loss, needs_bootstrap
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.masking.mask import MIN_UNFORCED_TOKENS, MaskRule, SchemaMask
from mcp_grpo.masking.roles import GrammarRoles, SamplerRoles, SyntaxRoles


__all__ = [
    "MIN_UNFORCED_TOKENS",
    "Bootstrap",
    "GrammarRoles",
    "MaskRule",
    "SamplerRoles",
    "SchemaMask",
    "SyntaxRoles",
    "TurnGrammars",
    "bootstrap_columns",
    "imitation_loss",
    "needs_bootstrap",
]
