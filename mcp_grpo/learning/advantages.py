"""Advantages per turn: how much better a turn went than was to be expected."""

from typing import Any

import torch
from torch.nn.functional import pad


MIN_PEERS = 2  # trajectories that reached a turn, for their mean to be its baseline


def turn_mask(counts: torch.Tensor, num_turns: int) -> torch.Tensor:
    """
    Which turns there are.

    Args:
        counts (`torch.Tensor` of shape `(N,)`):
            Turns of each trajectory.
        num_turns (`int`):
            Turns to tell of.

    Returns:
        `torch.Tensor` of shape `(N, num_turns)`: True where a trajectory has a turn.

    Example:

        # counts: 2, 0, 3
        [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    """
    return torch.arange(num_turns, device=counts.device) < counts.unsqueeze(1)


def returns_to_go(
    rewards: torch.Tensor, counts: torch.Tensor, gamma: float, bootstrap: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Discounted sum of the rewards from each turn on. The discount is per turn, however many tokens a turn has.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Reward of each turn.
        counts (`torch.Tensor` of shape `(N,)`):
            Turns of each trajectory.
        gamma (`float`):
            Discount from one turn to the next.
        bootstrap (`torch.Tensor` of shape `(N,)`, *optional*):
            Value of what follows the last turn.

    Returns:
        `torch.Tensor` of shape `(N, K)`: Returns, 0 where there is no turn.
    """
    return turn_gae(rewards, torch.zeros_like(rewards), counts, gamma=gamma, lam=1.0, bootstrap=bootstrap)


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
    Generalised advantage estimates with a turn as the unit of time.

    Args:
        rewards (`torch.Tensor` of shape `(N, K)`):
            Reward of each turn.
        values (`torch.Tensor` of shape `(N, K)`):
            Value at the first token of each turn.
        counts (`torch.Tensor` of shape `(N,)`):
            Turns of each trajectory.
        gamma (`float`):
            Discount from one turn to the next.
        lam (`float`):
            Weight of what was seen against what the values foretell: 1 is the return less the value, 0 looks one turn
            ahead.
        bootstrap (`torch.Tensor` of shape `(N,)`, *optional*):
            Value of what follows the last turn.

    Returns:
        `torch.Tensor` of shape `(N, K)`: Advantages, 0 where there is no turn.
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


def turn_baseline(returns: torch.Tensor, counts: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """
    What the others of the group got from the same turn on. A trajectory never enters its own baseline, so that the
    baseline does not bias the gradient.

    Where fewer than two others reached the turn, the baseline is the mean of their whole returns. Where there are no
    others, there is none.

    Args:
        returns (`torch.Tensor` of shape `(N, K)`):
            Returns.
        counts (`torch.Tensor` of shape `(N,)`):
            Turns of each trajectory; one with 0 enters no baseline.
        group_size (`int`):
            Trajectories per group.

    Returns:
        `tuple[torch.Tensor, torch.Tensor]`: The baselines and whether there is one, both of shape `(N, K)`.

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


def _sums_of_others(figures: torch.Tensor, group_size: int) -> torch.Tensor:
    # Not the whole less one's own: rounding would let a trajectory into its own baseline.
    rows, turns = figures.shape
    groups = figures.reshape(rows // group_size, group_size, turns)
    others = 1 - torch.eye(group_size, dtype=figures.dtype, device=figures.device)
    return (others.unsqueeze(-1) * groups.unsqueeze(1)).sum(dim=2).reshape(rows, turns)


class MixingWeight:
    """
    How far values are trusted over the group's baseline: the weight that would have made the advantages of past batches
    vary least. It is 1 for values that are exact and 0 for values that say nothing.

    A batch is weighted before it is learnt from, and so never influences its own weight: that would bias the gradient.

    Args:
        warmup_steps (`int`, *optional*, defaults to `20`):
            Batches for which the weight is 0. Values that are not yet trained would be trusted merely for being
            constant.
        decay (`float`, *optional*, defaults to `0.9`):
            What is left of a batch's say when the next one has been seen.
    """

    def __init__(self, warmup_steps: int = 20, decay: float = 0.9) -> None:
        self.warmup_steps = warmup_steps
        self.decay = decay
        self._num_batches = 0
        self._products = 0.0
        self._squares = 0.0

    @property
    def value(self) -> float:
        """`float`: The weight for the next batch, between 0 and 1."""
        if self._num_batches < self.warmup_steps or self._squares <= 0:
            return 0.0
        return min(max(self._products / self._squares, 0.0), 1.0)

    def update(self, products: float, squares: float) -> None:
        """
        Learn from a batch, over all turns that have a baseline.

        Args:
            products (`float`):
                Sum of returns less baselines, times values less baselines.
            squares (`float`):
                Sum of the squares of values less baselines.
        """
        self._products = self.decay * self._products + products
        self._squares = self.decay * self._squares + squares
        self._num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        """
        What a checkpoint must keep.

        Returns:
            `dict[str, Any]`: Plain numbers.
        """
        return {"num_batches": self._num_batches, "products": self._products, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """
        Go on from a checkpoint.

        Args:
            state (`dict[str, Any]`):
                What `state_dict` returned.
        """
        self._num_batches = state["num_batches"]
        self._products = state["products"]
        self._squares = state["squares"]


def to_tokens(
    per_turn: torch.Tensor,  # (B, K)
    turn_ids: torch.Tensor,  # (B, T)
) -> torch.Tensor:
    """
    A figure of each turn on every token of the turn.

    Args:
        per_turn (`torch.Tensor` of shape `(B, K)`):
            The figures.
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            Turn of each token that the policy wrote, from 0; -1 on all other tokens.

    Returns:
        `torch.Tensor` of shape `(B, T)`: The figures, 0 on tokens without a turn.

    Example:

        # per_turn: [5, 7]   turn_ids: [0, 0, -1, 1, -1]
        [5, 5, 0, 7, 0]
    """
    none = per_turn.shape[1]
    return pad(per_turn, (0, 1)).gather(1, torch.where(turn_ids < 0, none, turn_ids))


def first_tokens(
    values: torch.Tensor,  # (B, T)
    turn_ids: torch.Tensor,  # (B, T)
    num_turns: int,
) -> torch.Tensor:
    """
    The figure on the first token of each turn.

    Args:
        values (`torch.Tensor` of shape `(B, T)`):
            A figure of each token.
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            Turn of each token that the policy wrote, from 0; -1 on all other tokens.
        num_turns (`int`):
            Turns to tell of.

    Returns:
        `torch.Tensor` of shape `(B, num_turns)`: The figures, 0 where a row has no such turn.

    Example:

        # values: [1, 2, 3, 4]   turn_ids: [0, 0, -1, 1]   num_turns: 3
        [1, 4, 0]
    """
    rows, none = turn_ids.shape
    positions = torch.arange(none, device=turn_ids.device).expand_as(turn_ids)
    first = torch.full((rows, num_turns + 1), none, device=turn_ids.device)
    first = first.scatter_reduce(1, torch.where(turn_ids < 0, num_turns, turn_ids), positions, "amin")
    return pad(values, (0, 1)).gather(1, first[:, :num_turns])
