"""Replace groups whose attempts all have the same reward."""

from collections.abc import Callable, Collection, Sequence

import torch


def flat_groups(rewards: torch.Tensor, weights: torch.Tensor, size: int) -> list[int]:
    """
    Return the indices of the groups with fewer than two different rewards, which teach nothing. `rewards` `(N, F)` are NaN
    where a function gave none; `size` is the number of attempts per group.
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
    flat: Callable[[torch.Tensor], list[int]],
    rank: int,
    num_ranks: int,
    score: Callable[[list[int]], torch.Tensor],
    replace: Callable[[dict[int, int]], None],
) -> list[float]:
    """
    Replace groups that teach nothing until none is left, at most `max_rounds` times.

    Every rank does the same with its own `num_own` trajectories; a group may be spread over several ranks. `score` returns
    a row for each of some of this rank's trajectories and of equally many of each other rank, in the order of ranks. `flat`
    returns the indices of the groups that teach nothing, from all rows; where some have more columns, others are NaN. `replace`
    makes new attempts for some of this rank's trajectories, given the index of each one's group among the replaced ones.
    Returns the share of groups that taught nothing, before each round and after the last.
    """
    num_groups = num_own * num_ranks // size
    rows, found, shares = torch.empty(num_groups * size, 0), list(range(num_groups)), []
    for round_index in range(max_rounds + 1):
        if round_index:
            replace({s: found.index(g) for s in range(num_own) if (g := (rank * num_own + s) // size) in found})
        slots = slots_to_score(found, size, num_own, num_ranks)
        scored = score(slots[rank])
        places = [owner * num_own + slot for owner, own in enumerate(slots) for slot in own]
        width = max(rows.shape[1], scored.shape[1])
        rows, scored = _widened(rows.to(scored), width), _widened(scored, width)
        for place, row in zip(places, scored, strict=True):
            if place // size in found:  # others are scored only to make ranks score equally many
                rows[place] = row
        found = flat(rows)
        shares.append(len(found) / num_groups)
        if not found:
            break
    return shares


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]), value=torch.nan)


def slots_to_score(groups: Collection[int], size: int, num_own: int, num_ranks: int) -> list[list[int]]:
    """
    Return which trajectories of each rank belong to some groups, by their index on the rank. All ranks get equally many, for
    they are scored together; a rank with fewer gets some of its others.
    """
    members = [[s for s in range(num_own) if (rank * num_own + s) // size in groups] for rank in range(num_ranks)]
    width = max(map(len, members))
    return [[*own, *[s for s in range(num_own) if s not in own][: width - len(own)]] for own in members]


def other_rows(names: Sequence[str], taken: Collection[str], num: int, seed: int) -> list[int]:
    """
    Draw `num` rows of a dataset by their names, avoiding those taken as long as there are others. The seed is the same on all
    ranks; no two rows are equal unless there are too few.
    """
    taken = set(taken)
    rows = [row for row, name in enumerate(names) if name not in taken] or list(range(len(names)))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed % 2**63)).tolist()
    return [rows[order[i % len(order)]] for i in range(num)]
