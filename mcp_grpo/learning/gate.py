"""How far the policy is from the one that sampled, token by token."""

import torch

from mcp_grpo.errors import SettingsError


class RatioGate:
    """
    Finds the tokens whose ratio to the sampler is too far off to learn from.

    PPO's clip leaves a token unbounded whose probability has risen although it did worse than expected; a gate does not.

    Args:
        low (`float`, *optional*, defaults to `0.25`):
            Lowest ratio to learn from.
        high (`float`, *optional*, defaults to `4.0`):
            Highest ratio to learn from.

    Raises:
        [`SettingsError`]: If a ratio of 1 is not between them.
    """

    def __init__(self, low: float = 0.25, high: float = 4.0) -> None:
        if not 0 <= low < 1 < high:
            raise SettingsError(
                f"A gate must let through a ratio of 1, so `low` must be from 0 to 1 and `high` above 1; got {low} and "
                f"{high}."
            )
        self._low = low
        self._high = high

    def __call__(self, logps: torch.Tensor, old_logps: torch.Tensor) -> torch.Tensor:
        """
        Find them.

        To learn nothing from a token in TRL's loss, set its advantage to 0 and its old log-probability to the policy's:
        a ratio that is not finite is not a number even if multiplied by 0.

        Args:
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities under the policy.
            old_logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities that the tokens were sampled with.

        Returns:
            `torch.Tensor` of shape `(B, T)`: True where the ratio is outside the limits, or not a number.
        """
        ratios = torch.exp(logps.detach() - old_logps)
        return ~((ratios >= self._low) & (ratios <= self._high))
