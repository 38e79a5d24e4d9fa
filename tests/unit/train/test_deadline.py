"""Training that ends in time."""

from itertools import accumulate

import pytest
from transformers import TrainerControl, TrainerState, TrainingArguments

from mcp_grpo.train.deadline import Deadline


def steps_until(
    end: float, seconds: list[float], *, reserve: float = 0.0, max_steps: int = 100
) -> tuple[int, TrainerControl, Deadline]:
    """Take steps that last so long, until training is to end."""
    times = iter(accumulate(seconds, initial=0.0))
    deadline = Deadline(end, reserve, clock=lambda: next(times))
    args = TrainingArguments(output_dir="unused", use_cpu=True, save_strategy="steps", eval_strategy="steps")
    state, control = TrainerState(max_steps=max_steps), TrainerControl()
    deadline.on_train_begin(args, state, control)
    for step in range(1, len(seconds) + 1):
        state.global_step = step
        deadline.on_step_end(args, state, control)
        if control.should_training_stop:
            break
    return state.global_step, control, deadline


def test_training_ends_in_time_for_what_follows_it() -> None:
    step, control, deadline = steps_until(100, [5.0] * 30, reserve=40)
    assert step == 10  # 50 s, two more steps, and the reserve
    assert deadline.is_reached
    assert control.should_evaluate
    assert control.should_save
    assert control.should_log


def test_an_evaluation_between_two_steps_counts() -> None:
    assert steps_until(100, [5.0, 20.0, *[5.0] * 30])[0] == 9  # 60 s, and twice the longest


def test_one_step_is_taken_however_short_the_time() -> None:
    assert steps_until(1, [5.0] * 3)[0] == 1


@pytest.mark.parametrize("end", [float("inf"), 1000.0])
def test_nothing_ends_where_there_is_time(end: float) -> None:
    step, control, deadline = steps_until(end, [5.0] * 30)
    assert step == 30
    assert not (control.should_training_stop)
    assert not (control.should_evaluate)
    assert not (deadline.is_reached)


def test_the_last_step_is_no_early_end() -> None:
    _, control, deadline = steps_until(10, [5.0] * 2, max_steps=1)
    assert not (deadline.is_reached)
    assert not (control.should_training_stop)
