"""Temporary help for a policy that cannot write tool calls yet."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch


MIN_ACTIVE_FRACTION = 0.3
MIN_VALID_RATE = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bootstrap:
    """
    What is added to the loss in the first steps: imitation of the syntax of calls that worked, and an entropy bonus.

    Both weights decay linearly and are exactly 0 from `num_steps` on.
    """

    num_steps: int
    imitation_coef: float
    entropy_coef: float

    def strength(self, step: int) -> float:
        """Return the factor of both weights after so many optimizer steps, from 1 to 0."""
        return max(0.0, 1.0 - step / self.num_steps) if self.num_steps else 0.0


def needs_bootstrap(active_fraction: float, valid_rate: float) -> bool:
    """Return whether little is learnt from, or calls are often wrong, or there are none (NaN)."""
    return active_fraction < MIN_ACTIVE_FRACTION or math.isnan(valid_rate) or valid_rate < MIN_VALID_RATE


def bootstrap_columns(
    columns: Mapping[str, Any], valid_rate: float | None, accelerator: Any
) -> dict[str, torch.Tensor]:
    """
    Return what to imitate while the policy cannot form calls: the syntax of valid calls, where they did well.

    Args:
        columns (`Mapping[str, Any]`):
            Columns of a batch, with `forced` and `turn_ids`.
        valid_rate (`float`, *optional*):
            Share of the calls that could be made; `None` if there were none.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
    """
    forced = columns["forced"] * (columns["completion_mask"] > 0)
    imitated = forced * (columns["advantages"] > 0).unsqueeze(1)
    active, sampled = columns["completion_mask"] * columns["tool_mask"], columns["turn_ids"] >= 0
    sums = torch.stack([each.sum().float() for each in (imitated, active, sampled)])
    num_imitated, active, sampled = accelerator.reduce(sums, reduction="sum")
    is_needed = needs_bootstrap((active / sampled.clamp(min=1)).item(), math.nan if valid_rate is None else valid_rate)
    return {
        "imitated": imitated,
        "num_imitated": num_imitated,
        "needs_bootstrap": torch.tensor(float(is_needed), device=imitated.device),
    }


def imitation_loss(logps: torch.Tensor, imitated: torch.Tensor, num_imitated: torch.Tensor | float) -> torch.Tensor:
    """Return minus the mean log-probability of the tokens to imitate; `num_imitated` are those of an update, per process."""
    return -(logps * imitated).sum() / num_imitated
