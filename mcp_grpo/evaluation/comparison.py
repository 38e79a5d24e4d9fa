"""Evaluations of one run on the same tasks, and the significance of their differences."""

import json
from collections.abc import Sequence
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


def best_of(evaluations: Sequence[Judged]) -> Judged:
    """Find the evaluation with the highest mean reward, the earliest of several."""
    return max(evaluations, key=lambda each: each.reward.mean)


def write_judged(evaluations: Sequence[Judged], path: Path) -> None:
    """Write evaluations, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(each)) + "\n" for each in evaluations))


def read_judged(path: Path, up_to: int) -> list[Judged]:
    """Read the evaluations of an earlier run that goes on."""
    if not path.is_file():
        return []
    evaluations = [Judged(**json.loads(line)) for line in path.read_text().splitlines()]
    return [each for each in evaluations if each.step <= up_to]
