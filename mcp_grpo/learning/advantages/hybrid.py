"""
`advantage_mode="hybrid"`: the group's baseline and the value head's, mixed by how well the value head does.

    A = (1 - w) * A_group_turn + w * A_gae

`w` is the weight that would have made the advantages of past batches vary least: with `d = V - b` (value less the group's baseline)
and `e = G - b`, `w = sum(e * d) / sum(d * d)` over turns, with decaying weights, between 0 and 1. It is 1 for exact values and 0
for values that say nothing. A batch never influences its own weight: that would bias the gradient.
"""

from typing import Any


WARMUP_BATCHES = 20  # values that are not yet trained would be trusted merely for being constant
DECAY = 0.9  # what is left of a batch's say when the next one has been seen


class MixingWeight:
    """The weight `w` for the next batch, learnt from the batches before it."""

    def __init__(self, warmup: int | None = None, decay: float = DECAY) -> None:
        self._warmup = WARMUP_BATCHES if warmup is None else warmup
        self._decay = decay
        self._num_batches = 0
        self._products = 0.0
        self._squares = 0.0

    @property
    def value(self) -> float:
        """Return the weight for the next batch, between 0 and 1."""
        if self._num_batches < self._warmup or self._squares <= 0:
            return 0.0
        return min(max(self._products / self._squares, 0.0), 1.0)

    def update(self, products: float, squares: float) -> None:
        """Learn from a batch: `sum(e * d)` and `sum(d * d)` over all turns that have a baseline."""
        self._products = self._decay * self._products + products
        self._squares = self._decay * self._squares + squares
        self._num_batches += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        return {"num_batches": self._num_batches, "products": self._products, "squares": self._squares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._num_batches, self._products, self._squares = state["num_batches"], state["products"], state["squares"]
