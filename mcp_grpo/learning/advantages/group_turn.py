"""
`advantage_mode="group_turn"`: credit for turns, by comparison with the other attempts of the group.

    A_{i,k} = (G_{i,k} - mean_{j != i} G_{j,k}) / s

`G_{i,k}` is the discounted return of attempt `i` from turn `k` on. Where fewer than two others reached turn `k`, their whole
returns `G_{j,0}` are averaged instead. `s` is 1 with `scale_rewards="none"`, as in `group`; else the standard deviation of these
advantages over the batch, at least `MIN_SCALE`.
"""

from typing import Any

import torch

from mcp_grpo.learning.advantages.turns import returns_to_go, turn_mask


MIN_PEERS = 2  # trajectories that reached a turn, for their mean to be its baseline
MIN_SCALE = 0.1  # smaller standard deviations are noise that must not be blown up


def turn_baseline(returns: torch.Tensor, counts: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    Return the baseline of each turn and whether there is one, both of shape `(N, K)`.

    A trajectory never enters its own baseline, so that the baseline does not bias the gradient. One with 0 turns enters none.

    Example:

        # returns of a group: [4, 3]   [2, 1]   [6]   [] (left out)
        [[4, 4], [5, 5], [3, -], [-, -]]  # at the second turn: mean of 2 and 6, mean of 4 and 6
    """
    mask = turn_mask(counts, returns.shape[1])
    returns = torch.where(mask, returns, 0.0)
    peers = _sums_of_others(mask.to(returns.dtype), group_size)
    means = _sums_of_others(returns, group_size) / peers.clamp(min=1)
    fallback = means[:, :1].expand_as(means)
    has_baseline = mask & (peers[:, :1] > 0)
    return torch.where(has_baseline, torch.where(peers >= MIN_PEERS, means, fallback), 0.0), has_baseline


def _sums_of_others(values: torch.Tensor, group_size: int) -> torch.Tensor:
    # Not the whole less one's own: rounding would let a trajectory into its own baseline.
    rows, turns = values.shape
    groups = values.reshape(rows // group_size, group_size, turns)
    others = 1 - torch.eye(group_size, dtype=values.dtype, device=values.device)
    return (others.unsqueeze(-1) * groups.unsqueeze(1)).sum(dim=2).reshape(rows, turns)


def flat_turns(returns: torch.Tensor, group_size: int) -> list[int]:
    """
    Return the indices of the groups in which no turn did better or worse than its baseline.

    `returns` of shape `(N, K)` are those from each turn on, NaN where there is no turn.
    """
    counts = (~returns.isnan()).sum(dim=1)
    baselines, has_baseline = turn_baseline(returns.nan_to_num(), counts, group_size)
    is_same = torch.isclose(returns, baselines) | ~has_baseline  # but for rounding, as TRL counts them
    return is_same.view(-1, group_size * returns.shape[1]).all(dim=1).nonzero().flatten().tolist()


def turn_columns(
    turn_ids: torch.Tensor,
    rewards: torch.Tensor,
    group_size: int,
    *,
    gamma: float,
    accelerator: Any,
    is_scaled: bool = True,
    value_weight: float = 0.0,
) -> dict[str, torch.Tensor]:
    """
    Return what is known of each turn before the loss: its reward, its return, and what the group makes of that.

    Args:
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            Turn of each token, from 0; -1 where the policy did not write it or is not to learn from it.
        rewards (`torch.Tensor` of shape `(B, K)`):
            Reward of each turn.
        group_size (`int`):
            Attempts per group. The groups of all ranks stand one after another.
        gamma (`float`):
            Discount from one turn to the next.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
        is_scaled (`bool`, *optional*, defaults to `True`):
            Whether advantages are divided by their spread over the batch.
        value_weight (`float`, *optional*, defaults to `0.0`):
            How much of the advantages comes from values. All modes divide by the same number, unless no group has any spread
            to speak of: it would blow up what values say, which is then divided by 1.

    Returns:
        `dict[str, torch.Tensor]`: Columns of the batch: `turn_ids` as given; `turn_rewards`, `turn_returns`,
        `turn_advantages` (0 without a baseline) and `turn_has_baseline` of shape `(B, K)`, where `K` is that of the rank with
        most turns; the scalars `advantage_scale` to divide by and `num_turns` of all ranks.
    """
    size = len(turn_ids)
    own = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    rewards = accelerator.gather(accelerator.pad_across_processes(rewards, dim=1))
    counts = accelerator.gather(turn_ids.amax(dim=1) + 1)
    returns = returns_to_go(rewards, counts, gamma)
    baseline, has_baseline = turn_baseline(returns, counts, group_size)
    advantages = torch.where(has_baseline, returns - baseline, 0.0)
    divisor = rewards.new_ones(())
    if is_scaled and has_baseline.any():
        spread = advantages[has_baseline].std(correction=0)
        of_values = torch.where(spread >= MIN_SCALE, spread, 1.0)
        divisor = torch.lerp(spread.clamp(min=MIN_SCALE), of_values, value_weight)
    return {
        "turn_ids": turn_ids,
        "turn_rewards": rewards[own],
        "turn_returns": returns[own],
        "turn_advantages": advantages[own],
        "turn_has_baseline": has_baseline[own],
        "advantage_scale": divisor,
        "num_turns": counts.sum().to(rewards.dtype),
    }
