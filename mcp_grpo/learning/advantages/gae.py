"""
`advantage_mode="gae"`: generalised advantage estimation with a turn as the unit of time.

    A_k = delta_k + gamma * lam * A_{k+1},    delta_k = r_k + gamma * V_{k+1} - V_k

`V_k` is the value head's at the first token of turn `k`. `lam=1` is the return less the value, `lam=0` looks one turn ahead. The
value after the last turn is 0, or that of the state in which the trajectory was cut, with `truncation="bootstrap"`.
"""

import torch

from mcp_grpo.learning.advantages.turns import turn_mask


def turn_gae(
    rewards: torch.Tensor,
    values: torch.Tensor,
    counts: torch.Tensor,
    *,
    gamma: float,
    lam: float,
    bootstrap: torch.Tensor | None = None,
) -> torch.Tensor:
    """
    Return the advantage of each turn, of shape `(N, K)`, 0 where there is no turn.

    `rewards` and `values` have shape `(N, K)`; `counts` is the number of turns of each trajectory; `bootstrap` of shape `(N,)`
    is the value of what follows the last turn, 0 if not given.
    """
    mask = turn_mask(counts, rewards.shape[1])
    after = rewards.new_zeros(rewards.shape[0]) if bootstrap is None else bootstrap
    advantages = torch.zeros_like(rewards)
    advantage, value = torch.zeros_like(after), after
    for turn in reversed(range(rewards.shape[1])):
        delta = rewards[:, turn] + gamma * value - values[:, turn]
        advantage = torch.where(mask[:, turn], delta + gamma * lam * advantage, 0.0)
        value = torch.where(mask[:, turn], values[:, turn], after)
        advantages[:, turn] = advantage
    return advantages
