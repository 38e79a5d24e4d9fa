"""Estimates from repeated attempts at tasks: means with intervals, pass@k and pass^k."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev


Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % confidence interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


def mean_of_tasks(values: Mapping[str, float]) -> Interval:
    """
    Estimate a mean over tasks. Attempts at one task are not independent, so each task counts once, with its mean.

    Shares (values from 0 to 1) get Wilson's interval, which holds even if nothing or everything was solved; other
    values get that of Student's t.
    """
    numbers = list(values.values())
    if not numbers:
        raise ValueError("There is no task to take a mean over.")
    mean, count = fmean(numbers), len(numbers)
    error = stdev(numbers) / math.sqrt(count) if count > 1 else math.inf
    if min(numbers) < 0 or max(numbers) > 1:
        width = t_quantile(count - 1) * error
        return Interval(mean=mean, low=mean - width, high=mean + width)
    # As many tasks, all solved or not solved at all, would have that error.
    spread = mean * (1 - mean)
    effective = spread / error**2 if spread > 0 and 0 < error < math.inf else count
    centre = (mean + Z**2 / (2 * effective)) / (1 + Z**2 / effective)
    width = Z * math.sqrt(spread / effective + Z**2 / (4 * effective**2)) / (1 + Z**2 / effective)
    low, high = max(0.0, centre - width), min(1.0, centre + width)
    return Interval(mean=mean, low=min(low, mean), high=max(high, mean))  # rounding may put an end beyond 0 or 1


def mean_difference(before: Mapping[str, Sequence[float]], after: Mapping[str, Sequence[float]]) -> Interval | None:
    """Estimate the gain from one set of attempts to another on the tasks that both have, task by task."""
    both = sorted(before.keys() & after.keys())
    changes = [fmean(after[task]) - fmean(before[task]) for task in both]
    if len(changes) < 2:
        return None
    mean, width = fmean(changes), t_quantile(len(changes) - 1) * stdev(changes) / math.sqrt(len(changes))
    return Interval(mean=mean, low=mean - width, high=mean + width)


def t_quantile(freedom: int) -> float:
    """Return the 97.5 % quantile of Student's t, by the Cornish-Fisher expansion; exact to 1 % from 3 degrees of freedom."""
    if freedom < 3:
        return (math.inf, 12.706, 4.303)[max(0, freedom)]
    z = Z
    return (
        z
        + (z**3 + z) / (4 * freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3)
    )


def pass_at(num_attempts: int, num_solved: int, k: int) -> float:
    """Estimate, without bias, the chance that at least one of `k` attempts solves a task (pass@k)."""
    _check_k(num_attempts, k)
    return 1 - math.comb(num_attempts - num_solved, k) / math.comb(num_attempts, k)


def pass_all(num_attempts: int, num_solved: int, k: int) -> float:
    """Estimate, without bias, the chance that all of `k` attempts solve a task (pass^k)."""
    _check_k(num_attempts, k)
    return math.comb(num_solved, k) / math.comb(num_attempts, k)


def ks_of(counts: Iterable[int]) -> list[int]:
    """Return the powers of two up to the fewest attempts at a task, and that number itself."""
    fewest = min(counts, default=0)
    return sorted(
        {2**power for power in range(fewest.bit_length()) if 2**power <= fewest} | ({fewest} if fewest else set())
    )


def _check_k(num_attempts: int, k: int) -> None:
    if not 1 <= k <= num_attempts:
        raise ValueError(f"`k` must be from 1 to the {num_attempts} attempts at each task, got {k}.")
