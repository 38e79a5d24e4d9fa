"""
What is taken from TRL without TRL's promise to keep it.

`mcp_grpo` pins `trl>=1.16,<1.17`. `tests/test_package.py` checks what is taken here and what the trainer overrides and
reads, so that an upgrade which moves something fails there, in words, and not in the middle of a run.
"""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.models.utils import unwrap_model_for_generation
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import disable_dropout_in_model


__all__ = [
    "COMPLETIONS",
    "ROW_MEAN_LOSSES",
    "add_response_schema",
    "disable_dropout_in_model",
    "get_training_chat_template",
    "is_chat_template_prefix_preserving",
    "parse_response",
    "policy_for_generation",
    "supports_tool_calling",
]

# Index of the completions in what `GRPOTrainer._generate` returns.
COMPLETIONS = 3

# Losses that divide by a number of rows, not of tokens: a row left out of the loss still counts in their denominator.
ROW_MEAN_LOSSES = ("grpo", "sapo", "dr_grpo", "luspo")


@contextmanager
def policy_for_generation(trainer: GRPOTrainer) -> Generator[PreTrainedModel]:
    """
    The policy of a trainer, whole on this process and in evaluation mode.

    Args:
        trainer (`GRPOTrainer`):
            The trainer.

    Yields:
        `PreTrainedModel`: The model to generate with.
    """
    args: Any = trainer.args
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as model,
        torch.no_grad(),
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        was_training = model.training
        model.eval()
        try:
            yield model
        finally:
            model.train(was_training)
