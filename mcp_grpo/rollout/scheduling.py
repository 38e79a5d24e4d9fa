"""Which trajectory starts when, and what ends it from outside."""

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import anyio

from mcp_grpo.types import StopReason, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """
    How the trajectories of a batch share their time.

    Args:
        max_concurrent (`int`, *optional*):
            How many may be under way at a time; the others wait in a queue. `None` for all of them.
        batch_timeout (`float`, *optional*):
            Seconds of wall-clock time for all of them together. `None` for no limit.
        straggler_quantile (`float`, *optional*):
            Share of them, in (0, 1], after whose end the others are cut. `None` waits for all. Those that take long are
            then seldom seen whole.
    """

    max_concurrent: int | None = None
    batch_timeout: float | None = None
    straggler_quantile: float | None = None

    def has_stragglers(self, num_done: int, num_trajectories: int) -> bool:
        """
        Whether those that are still under way are to be cut.

        Args:
            num_done (`int`):
                How many have ended.
            num_trajectories (`int`):
                How many there are.

        Returns:
            `bool`: Whether enough have ended.
        """
        # Divided, not multiplied: 0.55 * 100 is a little more than 55.
        return self.straggler_quantile is not None and num_done / num_trajectories >= self.straggler_quantile


class Cutoff:
    """
    What ends trajectories from outside: the deadline of their batch, or a cut of those that are left.

    Args:
        timeout (`float`, *optional*):
            Seconds from now until all that is still under way ends. `None` for no limit.
    """

    def __init__(self, timeout: float | None = None) -> None:
        self._timeout = timeout
        self._deadline = math.inf if timeout is None else anyio.current_time() + timeout
        self._scopes: set[anyio.CancelScope] = set()
        self._is_cut = False

    @contextmanager
    def scope(self) -> Generator[anyio.CancelScope]:
        """
        What a trajectory runs in. One that enters too late is cancelled at its first checkpoint.

        Yields:
            `anyio.CancelScope`: Afterwards, its `cancelled_caught` says whether the trajectory was ended.
        """
        with anyio.CancelScope(deadline=self._deadline) as scope:
            self._scopes.add(scope)
            if self._is_cut:
                scope.cancel()
            try:
                yield scope
            finally:
                self._scopes.discard(scope)

    def cut(self) -> None:
        """End all that is under way, and all that is to come, as stragglers."""
        if anyio.current_time() >= self._deadline:
            return  # they have run out of time already
        self._is_cut = True
        for scope in self._scopes:
            scope.cancel()

    @property
    def stop_reason(self) -> StopReason:
        """Why a trajectory that was ended was."""
        return StopReason.STRAGGLER if self._is_cut else StopReason.DEADLINE

    @property
    def error(self) -> str | None:
        """The same in words, if it is a failure."""
        if self._is_cut:
            return None
        return (
            f"The batch ran out of time: its rollout may take {self._timeout:g} s (`batch_timeout`). Raise that, let "
            "trajectories be shorter (`max_turns`, `max_completion_length`), or give slow servers more sessions "
            "(`pool_size`)."
        )


class TurnHistory:
    """
    How many turns attempts at each task took so far, as an exponential average.

    Args:
        decay (`float`, *optional*, defaults to `0.8`):
            What the average keeps of itself with each attempt.
    """

    def __init__(self, decay: float = 0.8) -> None:
        self._decay = decay
        self._means: dict[str, float] = {}

    def add(self, trajectory: Trajectory) -> None:
        """
        Learn from an attempt. One that was broken off says something only if it had come further than was expected.

        Args:
            trajectory ([`Trajectory`]):
                A finished trajectory.
        """
        task_id, num_turns = trajectory.task.task_id, trajectory.num_turns
        is_broken_off = trajectory.is_failed or trajectory.stop_reason is StopReason.STRAGGLER
        if is_broken_off and num_turns <= self.expected(task_id):
            return
        mean = self._means.get(task_id, num_turns)
        self._means[task_id] = self._decay * mean + (1 - self._decay) * num_turns

    def expected(self, task_id: str) -> float:
        """
        Turns that an attempt is expected to take.

        Args:
            task_id (`str`):
                Name of the task. One that is not known counts as the mean of those that are.

        Returns:
            `float`: The turns; 0 if no task is known.
        """
        mean = self._means.get(task_id)
        return self._mean() if mean is None else mean

    def longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """
        The order to start attempts in. The longest ones come first, so that none of them is left over at the end.

        Args:
            tasks (`Sequence[Task]`):
                What is to be attempted.

        Returns:
            `list[int]`: Indices of the tasks; those that are expected to be equally long keep their order.
        """
        unknown = self._mean()
        return sorted(range(len(tasks)), key=lambda index: -self._means.get(tasks[index].task_id, unknown))

    def state_dict(self) -> dict[str, float]:
        """
        What a checkpoint keeps.

        Returns:
            `dict[str, float]`: The average of each task.
        """
        return dict(self._means)

    def load_state_dict(self, state: dict[str, float]) -> None:
        """
        Go on from a checkpoint.

        Args:
            state (`dict[str, float]`):
                What [`state_dict`] returned.
        """
        self._means = dict(state)

    def _mean(self) -> float:
        return sum(self._means.values()) / len(self._means) if self._means else 0.0
