"""Help for a policy that cannot form tool calls yet, gone after a number of steps."""

import math
from dataclasses import dataclass

import torch


MIN_ACTIVE_FRACTION = 0.3
MIN_VALID_RATE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """
    What is added to the loss in the first steps: imitation of the syntax of calls that worked, and an entropy bonus.

    Both fade in a straight line and are exactly 0 from `num_steps` on.

    Args:
        num_steps (`int`):
            Steps until they are gone.
        imitation_coef (`float`):
            Weight of the imitation at the first step.
        entropy_coef (`float`):
            Weight of the entropy bonus at the first step.
    """

    num_steps: int
    imitation_coef: float
    entropy_coef: float

    def strength(self, step: int) -> float:
        """
        What the weights are multiplied by.

        Args:
            step (`int`):
                Optimizer steps done.

        Returns:
            `float`: From 1 to 0.
        """
        return max(0.0, 1.0 - step / self.num_steps) if self.num_steps else 0.0


def needs_bootstrap(active_fraction: float, valid_rate: float) -> bool:
    """
    Whether a policy needs help with the format of tool calls.

    Args:
        active_fraction (`float`):
            Share of the sampled tokens that the policy loss sees.
        valid_rate (`float`):
            Share of the calls that could be made; NaN if there were none.

    Returns:
        `bool`: Whether little is learnt from, or calls are often wrong, or there are none.
    """
    return active_fraction < MIN_ACTIVE_FRACTION or math.isnan(valid_rate) or valid_rate < MIN_VALID_RATE


def imitation_loss(logps: torch.Tensor, imitated: torch.Tensor, num_imitated: torch.Tensor | float) -> torch.Tensor:
    """
    How unlikely the syntax of good calls is under the policy.

    Args:
        logps (`torch.Tensor` of shape `(B, T)`):
            Log-probabilities under the policy.
        imitated (`torch.Tensor` of shape `(B, T)`):
            1 for the tokens to imitate.
        num_imitated (`torch.Tensor` or `float`):
            How many there are in an update, per process.

    Returns:
        `torch.Tensor`: Minus the mean of their log-probabilities.
    """
    return -(logps * imitated).sum() / num_imitated
