"""How far a rollout is, in numbers and as a bar."""

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager

from tqdm.auto import tqdm


REFRESH_SECONDS = 0.3  # from one time that the bar is drawn to the next


class RolloutProgress:
    """
    What has been done of a rollout so far. Several in a row add up.

    It is written by the rollout, and may be read from any thread.

    Attributes:
        num_trajectories (`int`):
            How many there are to be.
        num_done (`int`):
            How many of them have ended.
        num_turns (`int`):
            Turns of all of them.
        num_tokens (`int`):
            Tokens that the policy sampled, with those of turns that were thrown away.
        num_calls (`int`):
            Tool calls that are in flight.
    """

    def __init__(self) -> None:
        self.num_trajectories = 0
        self.num_done = 0
        self.num_turns = 0
        self.num_tokens = 0
        self.num_calls = 0
        self._seconds = 0.0
        self._start: float | None = None

    @contextmanager
    def rolling_out(self, num_trajectories: int) -> Generator[None]:
        """
        Keep the time of a rollout.

        Args:
            num_trajectories (`int`):
                How many there are to be.
        """
        self.num_trajectories += num_trajectories
        self._start = time.monotonic()
        try:
            yield
        finally:
            self._seconds, self._start = self.seconds, None

    @contextmanager
    def calling(self, num_calls: int) -> Generator[None]:
        """
        Count tool calls as long as they are in flight.

        Args:
            num_calls (`int`):
                How many are made at once.
        """
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

    @property
    def tokens_per_second(self) -> float:
        """Tokens that the policy sampled per second."""
        seconds = self.seconds
        return self.num_tokens / seconds if seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """How long the rest will take at the pace so far; `None` before the first trajectory has ended."""
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
    """
    Draw a bar for a rollout, in a terminal or a notebook, and take it away at the end.

    Args:
        progress ([`RolloutProgress`]):
            What the rollout counts with.
        total (`int`):
            How many trajectories it will have counted at the end.
        disable (`bool`, *optional*, defaults to `False`):
            Whether to draw nothing.
    """
    if disable:
        yield
        return
    is_done = threading.Event()
    bar_format = "{desc}: {n_fmt}/{total_fmt} |{bar}| {elapsed}{postfix}"
    with tqdm(desc="Rolling out", total=total, leave=False, dynamic_ncols=True, bar_format=bar_format) as bar:

        def draw() -> None:
            # By the clock, not by what happens: while tools take their time, nothing does.
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
