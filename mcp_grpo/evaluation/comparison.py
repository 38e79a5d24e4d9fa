"""Evaluations of one run on the same tasks, and the significance of their differences."""

import json
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean

from mcp_grpo.evaluation.statistics import Interval, mean_difference, mean_of_tasks


EVALUATIONS_FILE = "evaluations.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """Rewards of a policy on a set of tasks at some step."""

    step: int
    rewards: dict[str, list[float]]
    metrics: dict[str, float] = field(default_factory=dict)
    solved: dict[str, list[bool]] = field(default_factory=dict)  # where it is known what success is
    kinds: dict[str, str] = field(default_factory=dict)  # what kind of task each is, where it says so
    cut: dict[str, int] = field(default_factory=dict)  # attempts that ran out of turns or tokens, where there are any

    @property
    def reward(self) -> Interval:
        """Return the mean reward per task. Attempts at one task are not independent, so tasks are counted."""
        return mean_of_tasks({task: fmean(rewards) for task, rewards in self.rewards.items()})

    @property
    def success(self) -> Interval | None:
        """Return the share of attempts that did their task, as a mean over tasks; `None` where it is not known."""
        return mean_of_tasks({task: fmean(found) for task, found in self.solved.items()}) if self.solved else None

    @property
    def num_attempts(self) -> int:
        """Return the number of attempts."""
        return sum(map(len, self.rewards.values()))


def change(before: Judged, after: Judged) -> Interval | None:
    """Estimate how much a policy has gained on the tasks that both evaluations have."""
    return mean_difference(before.rewards, after.rewards)


def success_change(before: Judged, after: Judged) -> Interval | None:
    """Estimate how much success has changed on the tasks that both evaluations have; `None` where it is not known."""
    first, last = (
        {task: [float(one) for one in found] for task, found in each.solved.items()} for each in (before, after)
    )
    return mean_difference(first, last) if first and last else None


def joint_mean(runs: Sequence[Mapping[str, Sequence[float]]]) -> Interval:
    """Estimate the mean over tasks of the mean over runs."""
    means: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for task, values in run.items():
            means[task].append(fmean(values))
    return mean_of_tasks({task: fmean(found) for task, found in means.items()})


def joint_change(
    pairs: Sequence[tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]]],
) -> Interval | None:
    """
    Estimate how much several runs have changed on average, each from one set of attempts to another on the tasks that both have.
    Tasks are counted, not runs.
    """
    first: dict[str, list[float]] = defaultdict(list)
    last: dict[str, list[float]] = defaultdict(list)
    for before, after in pairs:
        for task in before.keys() & after.keys():
            first[task].append(fmean(before[task]))
            last[task].append(fmean(after[task]))
    return mean_difference(first, last)


def best_of(evaluations: Sequence[Judged]) -> Judged:
    """Find the evaluation with the highest mean reward, the earliest of several."""
    return max(evaluations, key=lambda each: each.reward.mean)


def write_judged(evaluations: Sequence[Judged], path: Path) -> None:
    """Write evaluations, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.part")
    draft.write_text("".join(json.dumps(asdict(each)) + "\n" for each in evaluations))
    os.replace(draft, path)  # whole, or as it was


def read_judged(path: Path, up_to: int) -> list[Judged]:
    """Read the evaluations of an earlier run that goes on; a line that is broken off is left out."""
    lines = path.read_text().splitlines() if path.is_file() else []
    return [each for each in _judged(lines) if each.step <= up_to]


def _judged(lines: Sequence[str]) -> Iterator[Judged]:
    for line in lines:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        yield Judged(**found)
