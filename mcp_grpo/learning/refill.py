"""Groups whose attempts all have the same reward, and what is done about them."""

from collections.abc import Callable, Collection, Sequence

import torch


def flat_groups(rewards: torch.Tensor, weights: torch.Tensor, size: int) -> list[int]:
    """
    The groups that teach nothing.

    Args:
        rewards (`torch.Tensor` of shape `(N, F)`):
            Reward of each trajectory by each function; NaN where there is none.
        weights (`torch.Tensor` of shape `(F,)`):
            Weight of each function.
        size (`int`):
            Attempts per group.

    Returns:
        `list[int]`: Indices of the groups in which fewer than two different rewards were given.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=1)
    total = total.masked_fill(rewards.isnan().all(dim=1), torch.nan).view(-1, size)
    least = total.nan_to_num(nan=torch.inf).amin(dim=1)
    most = total.nan_to_num(nan=-torch.inf).amax(dim=1)
    # As TRL counts them: equal but for rounding.
    return ((most < least) | torch.isclose(most, least)).nonzero().flatten().tolist()


def refill(
    num_own: int,
    size: int,
    *,
    max_rounds: int,
    weights: torch.Tensor,
    rank: int,
    num_ranks: int,
    score: Callable[[list[int]], torch.Tensor],
    replace: Callable[[dict[int, int]], None],
) -> list[float]:
    """
    Replace groups that teach nothing until none is left, or often enough.

    Every rank does the same, with its own trajectories; a group may lie on several of them.

    Args:
        num_own (`int`):
            Trajectories of this rank, as many as of any other.
        size (`int`):
            Attempts per group.
        max_rounds (`int`):
            How many times to replace groups, at most.
        weights (`torch.Tensor` of shape `(F,)`):
            Weight of each reward function.
        rank (`int`):
            Index of this rank.
        num_ranks (`int`):
            How many there are.
        score (`Callable[[list[int]], torch.Tensor]`):
            Rewards of some of this rank's trajectories, and of equally many of each other rank, in the order of ranks.
        replace (`Callable[[dict[int, int]], None]`):
            Puts other attempts in the place of some of this rank's trajectories; tells which group each belongs to,
            counted among those that are replaced.

    Returns:
        `list[float]`: Share of groups that taught nothing, before each round and after the last.
    """
    num_groups = num_own * num_ranks // size
    rewards, flat, shares = torch.empty(0), list(range(num_groups)), []
    for round_index in range(max_rounds + 1):
        if round_index:
            replace({s: flat.index(g) for s in range(num_own) if (g := (rank * num_own + s) // size) in flat})
        slots = slots_to_score(flat, size, num_own, num_ranks)
        scored = score(slots[rank])
        places = [owner * num_own + slot for owner, own in enumerate(slots) for slot in own]
        if not round_index:
            rewards = scored
        for place, row in zip(places, scored, strict=True):
            if place // size in flat:  # others are only scored so that every rank scores equally many
                rewards[place] = row
        flat = flat_groups(rewards, weights, size)
        shares.append(len(flat) / num_groups)
        if not flat:
            break
    return shares


def slots_to_score(groups: Collection[int], size: int, num_own: int, num_ranks: int) -> list[list[int]]:
    """
    Which trajectories of each rank belong to some groups. All ranks get equally many, for they are scored together.

    Args:
        groups (`Collection[int]`):
            The groups.
        size (`int`):
            Attempts per group.
        num_own (`int`):
            Trajectories of one rank.
        num_ranks (`int`):
            Ranks.

    Returns:
        `list[list[int]]`: For each rank, indices among its own. Where a rank has fewer than another, some of its others
        follow.
    """
    members = [[s for s in range(num_own) if (rank * num_own + s) // size in groups] for rank in range(num_ranks)]
    width = max(map(len, members))
    return [[*own, *[s for s in range(num_own) if s not in own][: width - len(own)]] for own in members]


def other_rows(names: Sequence[str], taken: Collection[str], num: int, seed: int) -> list[int]:
    """
    Rows of a dataset to fill groups with.

    Args:
        names (`Sequence[str]`):
            Name of each row.
        taken (`Collection[str]`):
            Those that are not to be drawn, as long as there are others.
        num (`int`):
            How many to draw.
        seed (`int`):
            The same on all ranks.

    Returns:
        `list[int]`: Indices of drawn rows, no two of them equal unless there are too few.
    """
    taken = set(taken)
    rows = [row for row, name in enumerate(names) if name not in taken] or list(range(len(names)))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    return [rows[order[i % len(order)]] for i in range(num)]
