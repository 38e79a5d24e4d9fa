"""Split tasks by chain, so that no chain is in two splits."""

import random
from collections.abc import Sequence
from typing import Any


SHARES = {"test": 0.2, "validation": 0.1}  # the rest is for training
MIN_CHAINS = 4


def split_by_chain(rows: Sequence[dict[str, Any]], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of `train`, `validation` and `test`; all of them for training where there are too few chains."""
    chains = sorted({row["chain"] for row in rows})
    random.Random(f"{seed} split").shuffle(chains)
    splits: dict[str, list[dict[str, Any]]] = {"train": list(rows), "validation": [], "test": []}
    if len(chains) < MIN_CHAINS:
        return splits
    sizes = {chain: sum(row["chain"] == chain for row in rows) for chain in chains}
    place: dict[str, str] = {}
    for split, share in SHARES.items():
        taken = 0
        for chain in chains:
            is_large = sizes[chain] > max(1, len(rows) // 5)
            if chain not in place and not is_large and taken < share * len(rows) and len(place) + 1 < len(chains):
                place[chain], taken = split, taken + sizes[chain]
    return {split: [row for row in rows if place.get(row["chain"], "train") == split] for split in splits}
