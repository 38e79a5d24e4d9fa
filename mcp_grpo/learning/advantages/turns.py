"""What all turn-level modes share: which turns there are, their returns, and the way from turns to tokens and back."""

import torch
from torch.nn.functional import pad


def turn_mask(counts: torch.Tensor, num_turns: int) -> torch.Tensor:
    """
    Return which of `num_turns` turns each of N trajectories has, of shape `(N, num_turns)`.

    Example:

        # counts: 2, 0, 3
        [[1, 1, 0], [0, 0, 0], [1, 1, 1]]
    """
    return torch.arange(num_turns, device=counts.device) < counts.unsqueeze(1)


def returns_to_go(
    rewards: torch.Tensor, counts: torch.Tensor, gamma: float, bootstrap: torch.Tensor | None = None
) -> torch.Tensor:
    """
    Return the discounted sum of the rewards from each turn on: `G_k = r_k + gamma * G_{k+1}`.

    The discount is per turn, however many tokens a turn has. `rewards` has shape `(N, K)`, `counts` the number of turns of
    each trajectory; `bootstrap` of shape `(N,)` is the value of what follows the last turn, 0 if not given.
    """
    mask = turn_mask(counts, rewards.shape[1])
    after = rewards.new_zeros(rewards.shape[0]) if bootstrap is None else bootstrap
    returns, following = torch.zeros_like(rewards), after
    for turn in reversed(range(rewards.shape[1])):
        following = torch.where(mask[:, turn], rewards[:, turn] + gamma * following, after)
        returns[:, turn] = torch.where(mask[:, turn], following, 0.0)
    return returns


def to_tokens(per_turn: torch.Tensor, turn_ids: torch.Tensor) -> torch.Tensor:
    """
    Spread a quantity of each turn, of shape `(B, K)`, over its tokens; tokens without a turn (-1) get 0.

    Example:

        # per_turn: [5, 7]   turn_ids: [0, 0, -1, 1, -1]
        [5, 5, 0, 7, 0]
    """
    none = per_turn.shape[1]
    return pad(per_turn, (0, 1)).gather(1, torch.where(turn_ids < 0, none, turn_ids))


def first_tokens(values: torch.Tensor, turn_ids: torch.Tensor, num_turns: int) -> torch.Tensor:
    """
    Read a quantity of each token, of shape `(B, T)`, at the first token of each turn; 0 where a row has no such turn.

    Example:

        # values: [1, 2, 3, 4]   turn_ids: [0, 0, -1, 1]   num_turns: 3
        [1, 4, 0]
    """
    rows, none = turn_ids.shape
    positions = torch.arange(none, device=turn_ids.device).expand_as(turn_ids)
    first = torch.full((rows, num_turns + 1), none, device=turn_ids.device)
    first = first.scatter_reduce(1, torch.where(turn_ids < 0, num_turns, turn_ids), positions, "amin")
    return pad(values, (0, 1)).gather(1, first[:, :num_turns])
