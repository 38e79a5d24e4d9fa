"""The order in which trajectories start."""

from collections.abc import Sequence

from mcp_grpo.types import Task, Trajectory


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
        if trajectory.is_failed and num_turns <= self.expected(task_id):
            return
        mean = self._means.get(task_id, num_turns)
        self._means[task_id] = self._decay * mean + (1 - self._decay) * num_turns

    def expected(self, task_id: str) -> float:
        """Return the turns that an attempt at a task is expected to take."""
        mean = self._means.get(task_id)
        return self._mean() if mean is None else mean

    def longest_first(self, tasks: Sequence[Task]) -> list[int]:
        """Return the order to start attempts in: the longest first, so that none of them is left over at the end."""
        unknown = self._mean()
        return sorted(range(len(tasks)), key=lambda index: -self._means.get(tasks[index].task_id, unknown))

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must keep."""
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
