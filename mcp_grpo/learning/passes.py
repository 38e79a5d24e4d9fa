"""Which rows of a batch share a pass, and how many passes become one."""

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from mcp_grpo.learning.checkpointing import FILLED, JOINED, NO_CAPACITY, Capacity
from mcp_grpo.learning.padding import in_order
from mcp_grpo.learning.shared_prompts import MIN_SAVED


COST_KEPT, COST_AGAIN = 3, 4  # forward passes' worth of a token, without and with gradient checkpointing


class _Passes(NamedTuple):
    """Rows, pass by pass: their order, and how many tokens each pass runs at most."""

    order: np.ndarray
    num_tokens: list[int]


class BatchRows:
    """
    The rows of a batch that is cut into passes with as many rows each, to be put into another order.

    Args:
        batches (`Sequence[dict[str, Any]]`):
            Columns of each pass.
    """

    def __init__(self, batches: Sequence[dict[str, Any]]) -> None:
        self._batches = batches
        masks = (torch.cat([batch[name] for batch in batches]) for name in ("prompt_mask", "completion_mask"))
        self._prompts, self._own = (mask.sum(dim=1).cpu().numpy() for mask in masks)
        self._lengths = self._prompts + self._own

    def by_length(self) -> list[dict[str, Any]]:
        """Put rows of similar length into one pass, the longest first; as many passes with as many rows as before."""
        return self._arranged(self._alike(1))

    def by_prompt(self, num_joined: int = 1) -> list[dict[str, Any]]:
        """
        Put rows with the same prompt into one pass, where that saves enough, and else rows of similar length.

        Args:
            num_joined (`int`, *optional*, defaults to `1`):
                How many passes are to be run as one, by [`joined`].
        """
        return self._arranged(self._together(num_joined))

    def num_joined(self, capacity: Capacity) -> int:
        """
        Choose how many passes to run as one: of what fits, that which costs least.

        Args:
            capacity ([`Capacity`]):
                How many tokens fit into a pass that several became.

        Returns:
            `int`: A divisor of the number of passes.
        """
        if capacity == NO_CAPACITY:
            return 1
        found = []
        for num in (each for each in range(1, len(self._batches) + 1) if len(self._batches) % each == 0):
            num_tokens = self._together(num).num_tokens
            # A pass by itself is run whether it fits or not, and may take more of the memory.
            is_kept = max(num_tokens) <= capacity.kept * (FILLED / JOINED if num == 1 else 1)
            if num == 1 or is_kept or max(num_tokens) <= capacity.computed_again:
                found.append(((COST_KEPT if is_kept else COST_AGAIN) * sum(num_tokens), -num))
        return -min(found)[1]

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Return the number of the prompt of each row."""
        ids = torch.cat([batch["prompt_ids"] for batch in self._batches]).cpu().numpy()
        return np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _groups(self) -> list[np.ndarray]:
        """Return the rows of each prompt, the longest first, and first those with the longest one."""
        rows = np.argsort(-self._lengths, kind="stable")
        groups = [rows[self._numbers[rows] == number] for number in range(self._numbers.max() + 1)]
        return sorted(groups, key=lambda group: -self._lengths[group[0]])

    def _alike(self, num_joined: int) -> _Passes:
        order = np.argsort(-self._lengths, kind="stable")
        return _Passes(order, [len(each) * int(self._lengths[each].max()) for each in self._split(order, num_joined)])

    def _together(self, num_joined: int) -> _Passes:
        alike, order = self._alike(num_joined), self._balanced(num_joined)
        num_tokens = [self._num_shared(each) for each in self._split(order, num_joined)]
        is_worth_it = sum(num_tokens) <= (1 - MIN_SAVED) * sum(alike.num_tokens)
        return _Passes(order, num_tokens) if is_worth_it else alike

    def _balanced(self, num_joined: int) -> np.ndarray:
        """Return the rows group by group, so that passes of whole groups have about as many tokens each."""
        groups, num_passes = self._groups, len(self._batches) // num_joined
        if len({len(group) for group in groups}) > 1 or len(groups) % num_passes:
            return np.concatenate(groups)
        # The largest group that is left goes to the smallest pass that has room.
        room = len(groups) // num_passes
        growing: list[tuple[int, int, list[np.ndarray]]] = [(0, number, []) for number in range(num_passes)]
        grown = []
        for group in sorted(groups, key=self._num_shared, reverse=True):
            num_tokens, number, held = heapq.heappop(growing)
            larger = (num_tokens + self._num_shared(group), number, [*held, group])
            if len(held) + 1 < room:
                heapq.heappush(growing, larger)
            else:
                grown.append(larger)
        grown.sort(key=lambda each: (-each[0], each[1]))  # what does not fit shows at once
        return np.concatenate([group for *_, held in grown for group in held])

    def _num_shared(self, rows: np.ndarray) -> int:
        """Return the tokens of a pass with each prompt once, but for its last token, which is of each row."""
        _, firsts = np.unique(self._numbers[rows], return_index=True)
        return int(self._own[rows].sum() + self._prompts[rows[firsts]].sum()) + len(rows)

    def _split(self, order: np.ndarray, num_joined: int) -> list[np.ndarray]:
        return np.split(order, len(self._batches) // num_joined)

    def _arranged(self, passes: _Passes) -> list[dict[str, Any]]:
        return in_order(self._batches, torch.from_numpy(passes.order).to(self._batches[0]["prompt_mask"].device))


def joined(batches: Sequence[dict[str, Any]], index: int, num_joined: int) -> dict[str, Any]:
    """
    Return the columns of a pass where each `num_joined` passes are run as one, in the place of the last of them.

    Of the others nothing is left. It is the last that stays, because data parallelism adds up gradients in the last pass of an update.
    """
    if num_joined == 1:
        return batches[index]
    if (index + 1) % num_joined:
        return {}
    parts = batches[index + 1 - num_joined : index + 1]
    columns = [name for name, value in parts[0].items() if value is not None and value.ndim]
    return parts[0] | {name: torch.cat([part[name] for part in parts]) for name in columns}
