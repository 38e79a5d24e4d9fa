"""How strongly the policy is held to the reference."""

import math
from collections.abc import Mapping

import torch

from mcp_grpo.errors import SettingsError


_MAX_CHANGE = 0.2


class KLControl:
    """
    Raises the weight of the KL term while the policy is too far from the reference, and lets it fall back after.

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
        """
        Change the weight, once per optimizer step.

        Args:
            kl (`float`):
                Mean KL divergence per token of the step, over all processes. One that is not a number says nothing: the
                weight stays. An infinite one is as any that is far too large.
        """
        if math.isnan(kl):
            return
        error = min(max(kl / self._target - 1, -_MAX_CHANGE), _MAX_CHANGE)
        self._set(self.beta * (1 + self._gain * error))

    def state_dict(self) -> dict[str, float]:
        """
        What must be kept to go on later.

        Returns:
            `dict[str, float]`: The weight.
        """
        return {"beta": self.beta}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """
        Go on from an earlier state. The limits are those of the settings now.

        Args:
            state (`Mapping[str, float]`):
                What `state_dict` returned.
        """
        self._set(state["beta"])

    def _set(self, beta: float) -> None:
        self.beta = min(max(beta, self._least), self._most)


def capped_reference(logps: torch.Tensor, ref_logps: torch.Tensor, cap: float) -> torch.Tensor:
    """
    The reference's log-probabilities, moved so near to the policy's that the KL term of a token stays bounded.

    The term still pulls the policy to the reference, with at most `exp(cap) - 1`.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the policy. No gradient flows through them here.
        ref_logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the reference.
        cap (`float`):
            Largest difference.

    Returns:
        `torch.Tensor` of shape `(B, T)`: Log-probabilities to use in place of the reference's.
    """
    policy = logps.detach()
    near = policy + (ref_logps - policy).clamp(-cap, cap)
    return torch.where((ref_logps - policy).abs() <= cap, ref_logps, near)  # to the bit, where there is nothing to cap
