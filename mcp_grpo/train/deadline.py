"""Training that ends in time for what follows it."""

import time
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback


class Deadline(TrainerCallback):
    """
    Ends training early enough that what follows it is done by a given time, with an evaluation and a checkpoint of the last policy.

    At least one step is taken. What is still to come of training, a step and its evaluation, is taken to last twice as long as the
    longest step so far.

    Args:
        end (`float`):
            When everything is to be done, by `clock`.
        reserve (`float`):
            Seconds that are needed after training.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Tells the time.
    """

    def __init__(self, end: float, reserve: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_reached = False
        self._end, self._reserve, self._clock = end, reserve, clock
        self._last: float | None = None
        self._longest = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._last = self._clock()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = self._clock()
        if self._last is not None:
            self._longest = max(self._longest, now - self._last)
        self._last = now
        if now + 2 * self._longest + self._reserve < self._end or state.global_step >= state.max_steps:
            return
        self.is_reached = control.should_training_stop = control.should_log = True
        control.should_save = args.save_strategy != "no"
        control.should_evaluate = args.eval_strategy != "no"  # or nobody would know how well the last policy does
