"""
The one place that names what TRL keeps private.

`mcp_grpo` pins `trl>=1.16,<1.17`. `tests/test_trl.py` checks every name below, so that an upgrade which moves one fails
there, in words, and not in the middle of a run.
"""

from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.models.utils import unwrap_model_for_generation


__all__ = [
    "COMPLETIONS",
    "ROW_MEAN_LOSSES",
    "add_response_schema",
    "get_training_chat_template",
    "is_chat_template_prefix_preserving",
    "parse_response",
    "supports_tool_calling",
    "unwrap_model_for_generation",
]

# Index of the completions in what `GRPOTrainer._generate` returns.
COMPLETIONS = 3

# Losses that divide by a number of rows, not of tokens: a row left out of the loss still counts in their denominator.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")
