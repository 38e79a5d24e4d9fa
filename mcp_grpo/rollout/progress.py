"""Progress of a rollout, in numbers and as a bar."""

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager

from tqdm.auto import tqdm

from mcp_grpo.metrics import Ratio


REFRESH_SECONDS = 0.3


class RolloutProgress:
    """Counts of the rollouts so far, which add up. Written by the rollout; may be read from any thread."""

    def __init__(self) -> None:
        self.num_trajectories = 0
        self.num_done = 0  # of these
        self.num_turns = 0
        self.num_tokens = 0  # sampled by the policy, including discarded turns
        self.num_calls = 0  # tool calls in flight
        self._seconds = 0.0
        self._start: float | None = None
        self._span = (float("inf"), float("-inf"))  # when it first began and last ended

    @contextmanager
    def rolling_out(self, num_trajectories: int) -> Generator[None]:
        """Time a rollout of so many trajectories."""
        self.num_trajectories += num_trajectories
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._span = min(self._span[0], self._start), time.monotonic()
            self._seconds, self._start = self.seconds, None

    @classmethod
    def of(cls, parts: "Iterable[RolloutProgress]") -> "RolloutProgress":
        """Add up rollouts that have ended, and were under way at the same time."""
        whole, parts = cls(), list(parts)
        for part in parts:
            whole.num_trajectories += part.num_trajectories
            whole.num_done += part.num_done
            whole.num_turns += part.num_turns
            whole.num_tokens += part.num_tokens
        if parts:
            whole._seconds = max(part._span[1] for part in parts) - min(part._span[0] for part in parts)
        return whole

    @contextmanager
    def calling(self, num_calls: int) -> Generator[None]:
        """Count tool calls while they are in flight."""
        self.num_calls += num_calls
        try:
            yield
        finally:
            self.num_calls -= num_calls

    @property
    def seconds(self) -> float:
        """Wall-clock time so far."""
        start = self._start
        return self._seconds + (0.0 if start is None else time.monotonic() - start)

    def metrics(self) -> dict[str, Ratio]:
        """Return `rollout/seconds`, the mean over processes, and `rollout/tokens_per_second`, per process."""
        return {
            "rollout/seconds": Ratio(total=self.seconds, count=1),
            "rollout/tokens_per_second": Ratio(total=self.num_tokens, count=self.seconds),
        }

    @property
    def tokens_per_second(self) -> float:
        """Sampled tokens per second."""
        seconds = self.seconds
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """Estimated time for the rest; `None` before the first trajectory has ended."""
        if not self.num_done:
            return None
        return self.seconds / self.num_done * (self.num_trajectories - self.num_done)

    def __str__(self) -> str:
        left = self.seconds_left
        return (
            f"{self.num_turns} turns, {self.tokens_per_second:.0f} tokens/s, {self.num_calls} tools in flight, "
            f"{'?' if left is None else f'{left:.0f}'} s left"
        )


@contextmanager
def progress_bar(progress: RolloutProgress, total: int, *, disable: bool = False) -> Generator[None]:
    """Draw a bar for a rollout of `total` trajectories, in a terminal or a notebook, and remove it at the end."""
    if disable:
        yield
        return
    is_done = threading.Event()
    bar_format = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
    with tqdm(desc="Rolling out", total=total, leave=False, dynamic_ncols=True, bar_format=bar_format) as bar:

        def draw() -> None:
            # By the clock: while tools are busy, nothing else happens.
            while not is_done.wait(REFRESH_SECONDS):
                bar.n = progress.num_done
                bar.set_postfix_str(str(progress))

        drawing = threading.Thread(target=draw, name="mcp-grpo-progress", daemon=True)
        drawing.start()
        try:
            yield
        finally:
            is_done.set()
            drawing.join()
