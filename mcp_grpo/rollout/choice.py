"""Which tasks a batch attempts: more of those whose attempts earned different rewards."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset

from mcp_grpo.precision import in_double


KIND_COLUMNS = ("family", "difficulty")  # the first that a task has says of what kind it is, as in `Task.kind`
LEAST = 0.1  # chance of a task of the flattest kind, beside 1 for the kind that spreads most
MEMORY = 0.9  # what an average keeps of what it knew with each group, as the policy changes
KIND_STRENGTH = 2.0  # groups that what is known of its kind counts for, beside a task's own
MAX_DRAWS = 50  # for one place, after which the last task drawn is taken


@dataclass(slots=True)
class _Average:
    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float) -> None:
        self.total = MEMORY * self.total + value
        self.weight = MEMORY * self.weight + 1

    def towards(self, prior: float, strength: float) -> float:
        """Return the average as if some more groups had been like the prior."""
        return (self.total + strength * prior) / (self.weight + strength)


class TaskChoice:
    """
    Chooses the tasks to attempt by how far the rewards of a group's attempts were apart so far.

    What a group teaches goes with the variance of its rewards: nothing where all attempts do the same, most where half of them succeed.
    It is kept for each kind of task (column `family`, else `difficulty`) and each task, as an average that forgets. A task that the data loader
    proposes is attempted with a chance in proportion to what is expected of it, never below `LEAST` of the best kind's; otherwise another
    one is drawn at random, until one is accepted. A kind that was not attempted yet counts as the best.

    Args:
        dataset ([`~datasets.Dataset`]):
            The tasks to train on.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._places = {str(name): place for place, name in enumerate(dataset["task_id"])}
        columns = [list(dataset[name]) for name in KIND_COLUMNS if name in dataset.column_names]
        kinds = {name: [column[place] for column in columns] for name, place in self._places.items()}
        self._kinds = {
            name: next((str(each) for each in named if each not in (None, "")), "") for name, named in kinds.items()
        }
        self._of_kinds: dict[str, _Average] = defaultdict(_Average)
        self._of_tasks: dict[str, _Average] = defaultdict(_Average)
        self.num_choices = 0

    @property
    def num_kinds(self) -> int:
        """Return how many kinds of tasks there are."""
        return len(set(self._kinds.values()))

    def problem(self, num_groups: int) -> str | None:
        """Return what to say if a run of so many groups can tell no task from another; `None` if it can."""
        if self.num_kinds > 1 or num_groups > len(self._places):
            return None
        return (
            f'`task_choice="spread"` has nothing to go by: all {len(self._places)} tasks are of one kind, and none comes twice in '
            f"{num_groups} groups. Give them a column `family` or `difficulty`, or train longer; until then, tasks are attempted as they come."
        )

    def learn(self, names: Sequence[str], spreads: Sequence[float | None]) -> None:
        """Note how far apart the rewards of groups were, given their tasks; `None` where nobody knows."""
        for name, spread in zip(names, spreads, strict=True):
            if spread is not None and name in self._kinds:
                self._of_kinds[self._kinds[name]].add(spread)
                self._of_tasks[name].add(spread)

    def chance(self, name: str) -> float:
        """Return the chance that a task is attempted where it is proposed."""
        best = max((each.towards(0.0, 0.0) for each in self._of_kinds.values()), default=0.0)
        kind, own = self._of_kinds.get(self._kinds[name]), self._of_tasks.get(name)
        if best <= 0 or kind is None:
            return 1.0
        expected = kind.towards(best, 1.0)
        if own is not None:
            expected = own.towards(expected, KIND_STRENGTH)
        return min(1.0, max(LEAST, expected / best))

    def choose(self, proposed: Sequence[str], seed: int, taken: Collection[str] = ()) -> list[str]:
        """
        Choose the tasks to attempt; with the same history and seed the same ones, on all processes.

        Args:
            proposed (`Sequence[str]`):
                The tasks that the data loader proposes, different ones.
            seed (`int`):
                Seed of the draws.
            taken (`Collection[str]`, *optional*):
                Tasks that are not to be drawn.

        Returns:
            `list[str]`: A task for each of those proposed, none twice.
        """
        self.num_choices += 1
        generator = torch.Generator().manual_seed(seed % 2**63)
        taken = {*proposed, *taken}
        left = [name for name in self._places if name not in taken]
        order = iter(torch.randperm(len(left), generator=generator).tolist())
        chosen: list[str] = []
        for name in proposed:
            for _ in range(MAX_DRAWS):
                if name not in self._kinds or torch.rand((), generator=generator).item() < self.chance(name):
                    break
                if (place := next(order, None)) is None:  # there are no others
                    break
                name = left[place]
            chosen.append(name)
        return chosen

    def row(self, name: str) -> dict[str, Any]:
        """Return the row of a task."""
        return dict(self._dataset[self._places[name]])

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint must keep."""
        averages = {"kinds": self._of_kinds, "tasks": self._of_tasks}
        found = {key: {name: [a.total, a.weight] for name, a in of.items()} for key, of in averages.items()}
        return {**found, "num_choices": self.num_choices}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from a checkpoint.

        Args:
            state (`Mapping[str, Any]`):
                What [`state_dict`] returned.
        """
        for key, averages in (("kinds", self._of_kinds), ("tasks", self._of_tasks)):
            averages.clear()
            averages.update({name: _Average(*numbers) for name, numbers in state[key].items()})
        self.num_choices = state["num_choices"]


def group_spreads(rewards: torch.Tensor, weights: torch.Tensor, size: int) -> list[float | None]:
    """
    Return the variance of the rewards of each group; `None` where fewer than two attempts count. `rewards` `(N, F)` are NaN where a
    function gave none; `size` is the number of attempts per group.
    """
    total = in_double((rewards * weights.to(rewards.device)).nansum(dim=1))
    is_known = ~rewards.isnan().all(dim=1).view(-1, size).to(total.device)
    groups = total.view(-1, size)
    return [
        float(group[known].var(unbiased=False)) if known.sum() > 1 else None
        for group, known in zip(groups, is_known, strict=True)
    ]
