"""Terms that are added to TRL's loss, with TRL's own denominators."""

from collections.abc import Mapping
from typing import Any, Literal

import torch

from mcp_grpo._trl import LossDenominator


def per_token_kl(logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor | None = None) -> torch.Tensor:
    """
    The estimate of the KL divergence from the reference that TRL uses.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the policy.
        ref_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the reference.
        old_logps (`torch.Tensor` of shape `(B, T)`, *optional*):
            Log-probabilities the tokens were sampled with; if given, the estimate is corrected for the difference.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The estimate.
    """
    difference = ref_logps - logps
    kl = torch.exp(difference) - difference - 1
    return kl if old_logps is None else kl * torch.exp(logps - old_logps)


def kl_of_active(
    logps: torch.Tensor,
    inputs: Mapping[str, Any],
    denominator: LossDenominator,
    *,
    correction: Literal["token", "sequence"] | None = None,
) -> torch.Tensor:
    """
    The KL term of the tokens in the policy loss, as TRL has added it to its own; without gradient.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the policy.
        inputs (`Mapping[str, Any]`):
            Inputs of TRL's loss.
        denominator ([`LossDenominator`]):
            What the loss is divided by.
        correction (`str`, *optional*):
            Whether the estimate is corrected for the difference from the policy that sampled, by ratios of tokens or of
            sequences.

    Returns:
        `torch.Tensor`: A scalar, to be multiplied by `beta`.
    """
    logps, mask = logps.detach(), inputs["completion_mask"] * inputs["tool_mask"]
    kl = per_token_kl(logps, inputs["ref_per_token_logps"])
    if correction is not None:
        log_ratio = logps - inputs.get("old_per_token_logps", logps)
        if correction == "sequence":
            log_ratio = (log_ratio * mask).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
        kl = kl * log_ratio.exp()
    return denominator(kl, mask, mask)


def kl_of_masked(
    logps: torch.Tensor, inputs: Mapping[str, Any], denominator: LossDenominator, *, is_corrected: bool
) -> torch.Tensor:
    """
    The KL term of the tokens that the policy loss leaves out, with the denominator of those that it does not.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the policy.
        inputs (`Mapping[str, Any]`):
            Inputs of TRL's loss, and `masked`.
        denominator ([`LossDenominator`]):
            What the loss is divided by.
        is_corrected (`bool`):
            Whether the estimate is corrected for the difference from the policy that sampled.

    Returns:
        `torch.Tensor`: A scalar, to be multiplied by `beta` and added to the loss.
    """
    # Where TRL has computed none, the policy is still the one that sampled.
    old_logps = inputs.get("old_per_token_logps", logps.detach()) if is_corrected else None
    kl = per_token_kl(logps, inputs["ref_per_token_logps"], old_logps)
    return denominator(kl, inputs["masked"], inputs["completion_mask"] * inputs["tool_mask"])
