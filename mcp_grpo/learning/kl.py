"""The KL term: how far the policy is from the reference, and how strongly it is held to it."""

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from mcp_grpo.errors import SettingsError
from mcp_grpo.trl_compat import LossDenominator


_MAX_CHANGE = 0.2


def per_token_kl(logps: torch.Tensor, ref_logps: torch.Tensor, old_logps: torch.Tensor | None = None) -> torch.Tensor:
    """Estimate the divergence as TRL does, token by token; with `old_logps`, corrected for the policy that sampled."""
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
    """Return the KL term of the tokens in the policy loss, as TRL has added it to its own; without gradient."""
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
    """Return the KL term of the tokens that the mask takes out of the policy loss, so that the format does not drift."""
    # Where TRL has computed none, the policy is still the one that sampled.
    old_logps = inputs.get("old_per_token_logps", logps.detach()) if is_corrected else None
    kl = per_token_kl(logps, inputs["ref_per_token_logps"], old_logps)
    return denominator(kl, inputs["masked"], inputs["completion_mask"] * inputs["tool_mask"])


def capped_reference(logps: torch.Tensor, ref_logps: torch.Tensor, cap: float) -> torch.Tensor:
    """
    Move the reference's log-probabilities so near to the policy's that the KL term of a token stays bounded.

    The term still pulls the policy to the reference, with at most `exp(cap) - 1`. No gradient flows through `logps` here.
    """
    policy = logps.detach()
    near = policy + (ref_logps - policy).clamp(-cap, cap)
    return torch.where((ref_logps - policy).abs() <= cap, ref_logps, near)  # to the bit, where there is nothing to cap


def robust_kl(logps: torch.Tensor, ref_logps: torch.Tensor, cap: float) -> torch.Tensor:
    """
    Estimate the divergence token by token, for a mean over few tokens: the reference is taken for at most `exp(cap)` times as
    probable as the policy.

    Without that, one rare token that the reference likes much better counts for thousands of others. What the policy has
    moved to counts in full: it grows only with the logarithm.
    """
    difference = (ref_logps - logps).clamp(max=cap)
    return torch.exp(difference) - difference - 1


class KLControl:
    """
    The weight of the KL term: raised while the policy is too far from the reference, then let fall back.

    It is one-sided: the weight is never below the one it starts with. A control that also lowered it would spend the
    whole of the target, which is a guard, not a goal.

    Args:
        beta (`float`):
            Weight to start with, and the lowest.
        target (`float`, *optional*, defaults to `0.4`):
            KL divergence per token above which the weight rises.
        gain (`float`, *optional*, defaults to `0.1`):
            How fast: the weight changes by `gain` times the relative error, which counts for 20 % at most.
        max_beta (`float`, *optional*, defaults to `1.0`):
            Highest weight.

    Attributes:
        beta (`float`):
            The weight now.

    Raises:
        [`SettingsError`]: If a setting cannot be. With a weight of 0, TRL would not compute the divergence at all.
    """

    def __init__(self, beta: float, *, target: float = 0.4, gain: float = 0.1, max_beta: float = 1.0) -> None:
        positive = {"beta": beta, "target": target, "gain": gain}
        if wrong := {name: value for name, value in positive.items() if not value > 0}:
            raise SettingsError(f"To control the KL divergence, {', '.join(positive)} must be above 0, got {wrong}.")
        if not beta <= max_beta:
            raise SettingsError(f"`max_beta` must not be below `beta`, got {max_beta} and {beta}.")
        self._least = beta
        self._target = target
        self._gain = gain
        self._most = max_beta
        self.beta = beta

    def update(self, kl: float) -> None:
        """Change the weight, once per optimizer step, by the mean divergence per token. NaN says nothing and changes nothing."""
        if math.isnan(kl):
            return
        error = min(max(kl / self._target - 1, -_MAX_CHANGE), _MAX_CHANGE)
        self._set(self.beta * (1 + self._gain * error))

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must keep."""
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint. The limits are those of the settings now."""
        self._set(state["beta"])

    def _set(self, beta: float) -> None:
        self.beta = min(max(beta, self._least), self._most)
