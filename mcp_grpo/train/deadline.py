"""Training, and imitation, that end in time for what follows them, with their learning rate fallen."""

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from accelerate.utils import broadcast_object_list
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback


RECENT = 16  # steps that tell how long the next ones will take


class Deadline(TrainerCallback):
    """
    Ends training early enough that what follows it is done by a given time, with an evaluation and a checkpoint of the last policy.

    At least one step is taken. After each, it estimates how many more there is time for. They are taken to last as long as recent
    ones on average, and the last of them as long as the longest; the first step of a process, which also compiles, counts only until
    there is another. Evaluations and checkpoints are no part of a step: each lasts as long as the longest so far. Two of each are to
    follow the last step: its own, and as long again for what the policy is compared with and for saving it. Where several
    processes train, the first one decides for all.

    With `lr_scheduler_type="warmup_stable_decay"`, the learning rate falls over the last steps that there is time for, where that is
    sooner than the last ones of the run. It follows from the step and the estimate alone, so a run that goes on with more time has
    its full rate again.

    Args:
        end (`float`):
            When everything is to be done, by `clock`.
        reserve (`float`):
            Seconds that are needed after training for what is neither like an evaluation nor like a checkpoint.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Tells the time.
    """

    def __init__(self, end: float, reserve: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_reached = False
        self._end, self._reserve, self._clock = end, reserve, clock
        self._last = clock()  # when what was measured last ended
        self._first: float | None = None
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._evaluating = 0.0  # since the last step: each dataset is an evaluation by itself
        self._evaluation = self._save = 0.0  # the longest so far
        self._num_steps = 0  # that the run is expected to have

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        self._last, self._num_steps = self._clock(), state.max_steps
        self._evaluation = max((entry.get("eval_runtime", 0.0) for entry in state.log_history), default=0.0)
        if args.lr_scheduler_type == "warmup_stable_decay" and isinstance(lr_scheduler, LambdaLR):
            self._shorten(lr_scheduler, state)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._evaluating += self._seconds()
        self._evaluation = max(self._evaluation, self._evaluating)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._save = max(self._save, self._seconds())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        seconds, self._evaluating = self._seconds(), 0.0
        if self._first is None:
            self._first = seconds
        else:
            self._steps.append(seconds)
        if math.isinf(self._end) or control.should_training_stop:
            return
        num_left = broadcast_object_list([self._num_left(args, state, control)])[0]
        if self._steps:
            self._num_steps = state.global_step + num_left
        if num_left:
            return
        self.is_reached = control.should_training_stop = control.should_log = True
        control.should_save = args.save_strategy != "no"
        control.should_evaluate = args.eval_strategy != "no"  # or nobody would know how well the last policy does

    def _seconds(self) -> float:
        """Return the seconds since what was measured last."""
        before, self._last = self._last, self._clock()
        return self._last - before

    def _num_left(self, args: Any, state: Any, control: Any) -> int:
        """Estimate how many more steps there is time for."""
        steps = self._steps or [self._first or 0.0]
        usual, longest = sum(steps) / len(steps), max(steps)
        evaluation = 0.0 if args.eval_strategy == "no" else self._evaluation or longest
        save = 0.0 if args.save_strategy == "no" else self._save
        left = self._end - self._last - self._reserve - longest - 2 * (evaluation + save)  # when the last step begins
        left -= control.should_evaluate * evaluation + control.should_save * save  # which are due now
        number = 0
        while left >= 0 and state.global_step + number < state.max_steps:
            number += 1
            left -= usual
            if args.eval_strategy == "steps" and (state.global_step + number) % state.eval_steps == 0:
                left -= evaluation
        return number

    def _shorten(self, lr_scheduler: LambdaLR, state: Any) -> None:
        """Let a schedule end with the steps that are expected, by leaving out some of those at the full rate."""

        def shorter(factor: Callable[[int], float]) -> Callable[[int], float]:
            # A function, as the attributes of anything else would be written into checkpoints.
            return lambda step: min(factor(step), factor(step + state.max_steps - self._num_steps))

        lr_scheduler.lr_lambdas = [shorter(factor) for factor in lr_scheduler.lr_lambdas]
        if state.global_step:  # the checkpoint has the rate of a run that was about to end
            lr_scheduler.last_epoch -= 1
            lr_scheduler.step()


class EndsInTime(TrainerCallback):
    """
    Ends an imitation by a given time, with its whole schedule of learning rates in the steps that there is time for.

    At least one step is taken. From the second on, which is the first without a trial of the model, it is known about how long one takes, and so how many
    there will be; the schedule goes on so much faster.

    Args:
        end (`float`):
            When it is to be done, by `clock`.
        clock (`Callable[[], float]`, *optional*, defaults to `time.monotonic`):
            Tells the time.

    Attributes:
        num_left_out (`int`):
            Steps that there was no time for.
    """

    def __init__(self, end: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_left_out = 0
        self._end, self._clock = end, clock
        self._began = clock()  # when the first step had ended
        self._pace = 1.0  # steps of the schedule for each that is taken

    def on_train_begin(self, args: Any, state: Any, control: Any, lr_scheduler: Any = None, **kwargs: Any) -> None:
        if isinstance(lr_scheduler, LambdaLR):
            lr_scheduler.lr_lambdas = [self._faster(factor) for factor in lr_scheduler.lr_lambdas]

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if math.isinf(self._end):
            return
        now, step = self._clock(), state.global_step
        if step == 1:
            self._began = now
            number = state.max_steps if now < self._end else 1
        else:
            number = step + max(0, int((self._end - now) // ((now - self._began) / (step - 1))))
        number = min(number, state.max_steps)
        self._pace = state.max_steps / number
        if step >= number:
            self.num_left_out = state.max_steps - step
            control.should_training_stop = control.should_log = True

    def _faster(self, factor: Callable[[Any], float]) -> Callable[[int], float]:
        return lambda step: factor(step * self._pace)
