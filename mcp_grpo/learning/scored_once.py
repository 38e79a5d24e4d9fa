"""The rewards of a batch that were asked for early, so that no attempt is scored twice."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcp_grpo.types import Trajectory


@dataclass(frozen=True, slots=True)
class _Row:
    trajectory: Trajectory
    rewards: torch.Tensor
    turns: dict[int, list[float] | None]
    extra: dict[str, Any]


class ScoredOnce:
    """
    Keeps the rewards of each place of a batch, by reward functions that may be costly or change their mind.

    What functions log beside them is kept, too: values of the table by place, and metrics of all attempts that were scored,
    replaced ones included.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._metrics: dict[str, list[float]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._rows)

    def keep(
        self,
        places: Sequence[int],
        trajectories: Sequence[Trajectory],
        rewards: torch.Tensor,
        turns: Mapping[int, Sequence[list[float] | None]],
        extra: Mapping[str, Sequence[Any]],
        metrics: Mapping[str, Sequence[float]],
    ) -> None:
        """Keep the rewards `(n, F)` of some places. Those of an attempt that has been scored before stay as they were."""
        for index, (place, trajectory) in enumerate(zip(places, trajectories, strict=True)):
            if place in self._rows and self._rows[place].trajectory is trajectory:
                continue
            self._rows[place] = _Row(
                trajectory,
                rewards[index],
                {function: given[index] for function, given in turns.items()},
                {name: values[index] for name, values in extra.items() if len(values) == len(places)},
            )
        for name, values in metrics.items():
            self._metrics[name] += values

    def take(self) -> tuple[torch.Tensor, dict[int, Any], dict[str, list[Any]], dict[str, list[float]]]:
        """Return the rewards of all places with what was given to turns, values of the table and metrics, and forget them."""
        places = sorted(self._rows)
        names = sorted({name for row in self._rows.values() for name in row.extra})
        extra = {name: [self._rows[place].extra.get(name) for place in places] for name in names}
        functions = sorted({function for row in self._rows.values() for function in row.turns})
        turns = {function: [self._rows[place].turns.get(function) for place in places] for function in functions}
        rewards = torch.stack([self._rows[place].rewards for place in places])
        found = rewards, turns, extra, dict(self._metrics)
        self._rows, self._metrics = {}, defaultdict(list)
        return found
