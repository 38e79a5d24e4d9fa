"""Evaluations of one run on the same tasks, and what the difference between two of them means."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, stdev


EVALUATIONS_FILE = "evaluations.jsonl"
Z = 1.96  # of a normal distribution, for 95 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """
    A mean with its confidence interval of 95 %.

    Args:
        mean (`float`):
            The mean.
        low (`float`):
            Where the interval begins.
        high (`float`):
            Where it ends.
    """

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """
    What a policy did on a set of tasks at some step.

    Args:
        step (`int`):
            Steps of training it had behind it.
        rewards (`dict[str, list[float]]`):
            Rewards of the attempts at each task, by its id. Attempts that a server failed are not there.
        metrics (`dict[str, float]`, *optional*):
            What else was measured, by the names it is logged under.
    """

    step: int
    rewards: dict[str, list[float]]
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def reward(self) -> Interval:
        """Return the mean reward of a task. Attempts at one task are not independent, so tasks are what is counted."""
        return mean_of_tasks({task: fmean(rewards) for task, rewards in self.rewards.items()})

    @property
    def num_attempts(self) -> int:
        """Return the number of attempts."""
        return sum(map(len, self.rewards.values()))


def mean_of_tasks(values: Mapping[str, float]) -> Interval:
    """
    Estimate a mean over tasks.

    Shares (values from 0 to 1) have Wilson's interval, which is right also where nothing, or all, was solved; other values
    have that of a normal distribution.

    Args:
        values (`Mapping[str, float]`):
            The value of each task.

    Returns:
        [`Interval`]: The mean, with its interval.
    """
    numbers = list(values.values())
    if not numbers:
        raise ValueError("There is no task to take a mean over.")
    mean, count = fmean(numbers), len(numbers)
    error = stdev(numbers) / math.sqrt(count) if count > 1 else math.inf
    if min(numbers) < 0 or max(numbers) > 1:
        return Interval(mean=mean, low=mean - Z * error, high=mean + Z * error)
    # As many tasks, all solved or not solved at all, would have that error.
    spread = mean * (1 - mean)
    effective = spread / error**2 if spread > 0 and 0 < error < math.inf else count
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    width = Z * math.sqrt(spread / effective + Z**2 / (4 * effective**2)) / (1 + Z**2 / effective)
    return Interval(mean=mean, low=max(0.0, centre - width), high=min(1.0, centre + width))


def change(before: Judged, after: Judged) -> Interval | None:
    """
    Estimate how much a policy has gained on the tasks that both evaluations have.

    Args:
        before ([`Judged`]):
            The first evaluation.
        after ([`Judged`]):
            The second.

    Returns:
        [`Interval`] or `None`: The mean change of a task's reward; `None` if there are fewer than two such tasks.
    """
    both = before.rewards.keys() & after.rewards.keys()
    changes = [fmean(after.rewards[task]) - fmean(before.rewards[task]) for task in sorted(both)]
    if len(changes) < 2:
        return None
    mean, error = fmean(changes), stdev(changes) / math.sqrt(len(changes))
    return Interval(mean=mean, low=mean - Z * error, high=mean + Z * error)


def best_of(evaluations: Sequence[Judged]) -> Judged:
    """
    Find the evaluation with the highest mean reward, the earliest of several.

    Args:
        evaluations (`Sequence[Judged]`):
            At least one.

    Returns:
        [`Judged`]: That evaluation.
    """
    return max(evaluations, key=lambda each: each.reward.mean)


def write_judged(evaluations: Sequence[Judged], path: Path) -> None:
    """
    Write evaluations, one JSON object a line.

    Args:
        evaluations (`Sequence[Judged]`):
            The evaluations.
        path (`Path`):
            The file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in evaluations))


def read_judged(path: Path, up_to: int) -> list[Judged]:
    """
    Read the evaluations of an earlier run that goes on.

    Args:
        path (`Path`):
            What [`write_judged`] wrote.
        up_to (`int`):
            Step that the run goes on from; later evaluations are left out.

    Returns:
        `list[Judged]`: The evaluations; none if there is no such file.
    """
    if not path.is_file():
        return []
    evaluations = [Judged(**json.loads(line)) for line in path.read_text().splitlines()]
    return [each for each in evaluations if each.step <= up_to]
