"""Which rows of a batch share a pass."""

import heapq
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mcp_grpo.learning.padding import in_order
from mcp_grpo.learning.shared_prompts import MIN_SAVED


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
        return self._arranged(self._alike())

    def by_prompt(self) -> list[dict[str, Any]]:
        """Put rows with the same prompt into one pass, where that saves enough, and else rows of similar length."""
        alike, order = self._alike(), self._balanced()
        shared = sum(map(self._num_shared, self._split(order)))
        padded = sum(len(rows) * int(self._lengths[rows].max()) for rows in self._split(alike))
        return self._arranged(order if shared <= (1 - MIN_SAVED) * padded else alike)

    @cached_property
    def _numbers(self) -> np.ndarray:
        """Return the number of the prompt of each row."""
        ids = torch.cat([batch["prompt_ids"] for batch in self._batches]).cpu().numpy()
        return np.unique(ids, axis=0, return_inverse=True)[1].reshape(-1)

    @cached_property
    def _groups(self) -> list[np.ndarray]:
        """Return the rows of each prompt, the longest first, and first those with the longest one."""
        rows = self._alike()
        groups = [rows[self._numbers[rows] == number] for number in range(self._numbers.max() + 1)]
        return sorted(groups, key=lambda group: -self._lengths[group[0]])

    def _alike(self) -> np.ndarray:
        return np.argsort(-self._lengths, kind="stable")

    def _balanced(self) -> np.ndarray:
        """Return the rows group by group, so that passes of whole groups have about as many tokens each."""
        groups, num_passes = self._groups, len(self._batches)
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

    def _split(self, order: np.ndarray) -> list[np.ndarray]:
        return np.split(order, len(self._batches))

    def _arranged(self, order: np.ndarray) -> list[dict[str, Any]]:
        return in_order(self._batches, torch.from_numpy(order).to(self._batches[0]["prompt_mask"].device))
