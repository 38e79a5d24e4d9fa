"""Training that ends in time, with its learning rate fallen."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler
from transformers.trainer_callback import DefaultFlowCallback

from mcp_grpo.train import deadline as deadlines
from mcp_grpo.train.deadline import Deadline, EndsInTime


DECAY, WARMUP = 10, 4
RISE = [0.0, 0.25, 0.5, 0.75]


@dataclass
class Run:
    """A training in which time is only counted."""

    end: float
    reserve: float = 0.0
    max_steps: int = 1000
    evaluation: float | None = None  # seconds
    eval_steps: int = 1000
    save: float | None = None
    save_steps: int = 1000
    schedule: str = "warmup_stable_decay"
    begins_with_evaluation: bool = True

    def __post_init__(self) -> None:
        self.now = 0.0
        self.rates: list[float] = []
        self.args = TrainingArguments(
            output_dir="unused",
            use_cpu=True,
            learning_rate=1.0,
            lr_scheduler_type=self.schedule,
            eval_strategy="no" if self.evaluation is None else "steps",
            save_strategy="no" if self.save is None else "steps",
        )
        self.state = TrainerState(
            max_steps=self.max_steps, eval_steps=self.eval_steps, save_steps=self.save_steps, logging_steps=1000
        )
        self.control = TrainerControl()
        self.deadline: Any = Deadline(self.end, self.reserve, clock=lambda: self.now)
        self.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
        self.scheduler: Any = get_scheduler(
            self.schedule,
            self.optimizer,
            num_warmup_steps=WARMUP,
            num_training_steps=self.max_steps,
            scheduler_specific_kwargs={"num_decay_steps": DECAY} if "decay" in self.schedule else None,
        )

    def take(self, seconds: Iterable[float]) -> "Run":
        """Take steps that last so long, until training is to end."""
        args, state, control = self.args, self.state, self.control
        self.deadline.on_train_begin(args, state, control, lr_scheduler=self.scheduler)
        if self.evaluation is not None and self.begins_with_evaluation:
            self._evaluate()
        for each in seconds:
            self.now += each
            self.rates.append(self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.scheduler.step()
            state.global_step += 1
            control._new_step()
            DefaultFlowCallback().on_step_end(args, state, control)
            self.deadline.on_step_end(args, state, control)
            if control.should_evaluate:
                self._evaluate()
            if control.should_save:
                self.now += self.save or 0.0
                self.deadline.on_save(args, state, control)
            if control.should_training_stop:
                break
        return self

    def _evaluate(self) -> None:
        self.now += self.evaluation or 0.0
        self.deadline.on_evaluate(self.args, self.state, self.control)

    @property
    def step(self) -> int:
        return self.state.global_step


def imitate(end: float, seconds: Iterable[float], max_steps: int = 40) -> tuple[Run, EndsInTime]:
    """An imitation with a cosine schedule that has until `end`."""
    run = Run(end, max_steps=max_steps, schedule="cosine")
    run.deadline = limit = EndsInTime(end, clock=lambda: run.now)
    return run.take(seconds), limit


@pytest.mark.parametrize("seconds", [2.0, 5.0, 12.0])
def test_an_imitation_ends_in_time_with_its_rate_fallen(seconds: float) -> None:
    run, limit = imitate(100, chain([seconds + 1], repeat(seconds)))
    assert 100 - seconds < run.now <= 100 or run.step == 40
    assert limit.num_left_out == 40 - run.step
    assert max(run.rates) > 0.7
    assert run.rates[-1] < 0.5 * max(run.rates)
    whole = Run(math.inf, max_steps=40, schedule="cosine").take(repeat(seconds, 40)).rates
    if run.step == 40:
        assert run.rates == whole
    else:
        late = [whole[min(39, round(i * 40 / run.step))] for i in range(2, run.step)]
        assert run.rates[3:] == pytest.approx(late[1:], abs=0.15)


def test_an_imitation_takes_one_step_at_least_and_all_where_there_is_time() -> None:
    assert imitate(-5, repeat(1.0))[0].step == 1
    for end in (1000.0, math.inf):
        run, limit = imitate(end, repeat(1.0, 40))
        assert (run.step, limit.num_left_out) == (40, 0)
    run, limit = imitate(50, chain(repeat(1.0, 10), repeat(10.0)))  # steps may get slower
    assert run.now <= 50 + 10
    assert limit.num_left_out == 40 - run.step


def test_training_ends_in_time_for_what_follows_it() -> None:
    run = Run(100, reserve=40, evaluation=1, save=0).take(repeat(5.0))
    assert run.now <= 60 - 1  # after its evaluation, as long again is left
    assert run.now + 5 > 60 - 1  # but for no further step
    assert run.deadline.is_reached
    assert run.control.should_evaluate
    assert run.control.should_save
    assert run.control.should_log


def test_a_step_with_an_evaluation_is_no_longer_step() -> None:
    with_evaluations = Run(1000, evaluation=50, eval_steps=4).take(repeat(5.0))
    # Three evaluations are within the time, the last one and as long again after it; all else is steps of 5 s.
    num_evaluations = 1 + with_evaluations.step // 4 + 2
    left = 1000 - 5 * with_evaluations.step - 50 * num_evaluations
    assert 0 <= left < 50 + 5


@pytest.mark.parametrize("eval_steps", [2, 7, 1000])
def test_an_evaluation_that_was_seen_is_done_in_time(eval_steps: int) -> None:
    run = Run(500, reserve=20, evaluation=60, eval_steps=eval_steps).take(repeat(5.0))
    assert run.now + 60 + 20 <= 500
    assert run.step > 1


def test_an_evaluation_that_is_due_is_not_taken_for_the_last_one() -> None:
    # After step 2, at 50 s, a step and twice an evaluation would be done by 135, but not beside the evaluation that is due.
    run = Run(150, evaluation=40, eval_steps=2).take(repeat(5.0))
    assert run.step == 2
    assert run.now == 50 + 40


@pytest.mark.parametrize(("end", "ends"), [(69, True), (70, False)])
def test_an_evaluation_of_several_datasets_lasts_as_long_as_all(end: float, ends: bool) -> None:
    run = Run(end, evaluation=10)
    run.deadline.on_train_begin(run.args, run.state, run.control)
    for _ in range(2):
        run._evaluate()
    run.state.global_step, run.now = 1, run.now + 5
    run.deadline.on_step_end(run.args, run.state, run.control)  # at 25 s; a step and twice 20 s are to come
    assert bool(run.control.should_training_stop) is ends


def test_a_checkpoint_that_was_seen_is_written_in_time_and_the_model_after_it() -> None:
    run = Run(500, save=50, save_steps=5).take(repeat(5.0))
    assert run.now + 50 <= 500
    assert run.step > 5


def test_an_evaluation_that_was_never_seen_is_taken_to_last_as_long_as_a_step() -> None:
    run = Run(100, evaluation=5, begins_with_evaluation=False).take(repeat(5.0))
    assert run.now + 5 == 100


def test_a_run_that_goes_on_knows_how_long_its_evaluations_took() -> None:
    run = Run(500, evaluation=200, begins_with_evaluation=False)
    run.state.log_history = [{"loss": 0.1}, {"eval_runtime": 200.0}, {"eval_runtime": 150.0}]
    run.take(repeat(5.0))
    assert run.now + 200 == 500


def test_the_first_step_of_a_process_counts_only_until_there_is_another() -> None:
    run = Run(200).take(chain([90.0], repeat(5.0)))
    assert run.now == 200


def test_the_last_step_may_be_as_long_as_the_longest_of_late() -> None:
    steps = [5.0, *[5.0, 5.0, 5.0, 25.0] * 100]
    run = Run(300).take(steps)
    assert 300 - 25 < run.now <= 300
    forgotten = Run(300).take(chain([5.0, 100.0], repeat(5.0)))
    assert forgotten.now == 300


def test_one_step_is_taken_however_short_the_time() -> None:
    assert Run(1, evaluation=50).take(repeat(5.0)).step == 1


@pytest.mark.parametrize("end", [float("inf"), 1000.0])
def test_nothing_ends_where_there_is_time(end: float) -> None:
    run = Run(end).take(repeat(5.0, 30))
    assert run.step == 30
    assert not run.control.should_training_stop
    assert not run.control.should_evaluate
    assert not run.deadline.is_reached


def test_the_last_step_is_no_early_end() -> None:
    run = Run(10, max_steps=1).take(repeat(50.0))
    assert not run.deadline.is_reached


@pytest.mark.parametrize(("said", "ends"), [(0, True), (5, False)])
def test_the_first_process_decides_for_all(monkeypatch: pytest.MonkeyPatch, said: int, ends: bool) -> None:
    heard: list[list[int]] = []

    def broadcast(values: list[int]) -> list[int]:
        heard.append(values)
        return [said]

    monkeypatch.setattr(deadlines, "broadcast_object_list", broadcast)
    run = Run(10 if said else 1000).take([5.0, 5.0, 5.0])  # by its own clock it is the other way round
    assert heard[0] == ([1] if said else [199])
    assert run.control.should_training_stop is ends
    assert run.step == (1 if ends else 3)


def rates_of_last_steps(number: int = DECAY) -> list[float]:
    """Return the rates of the last steps of a run that takes all of its steps."""
    return Run(float("inf"), max_steps=40).take(repeat(5.0)).rates[-number:]


def test_the_rate_falls_over_the_last_steps_that_there_is_time_for() -> None:
    run = Run(300).take(repeat(5.0))
    assert run.step == 60
    assert run.rates[WARMUP : 60 - DECAY] == [1.0] * (60 - DECAY - WARMUP)
    assert run.rates[-DECAY:] == pytest.approx(rates_of_last_steps())
    assert run.rates[-1] < 0.05


def test_the_rate_falls_by_steps_where_they_end_the_run() -> None:
    timed = Run(10_000, max_steps=40).take(repeat(5.0))
    assert timed.rates == Run(float("inf"), max_steps=40).take(repeat(5.0)).rates
    assert not timed.deadline.is_reached


def test_a_step_that_compiles_does_not_lower_the_rate() -> None:
    run = Run(200).take(chain([100.0], repeat(1.0)))
    assert run.rates[:WARMUP] == RISE
    assert run.rates[WARMUP : run.step - DECAY] == [1.0] * (run.step - DECAY - WARMUP)


def test_the_rate_falls_over_as_many_steps_where_they_differ_and_the_policy_is_judged_between_them() -> None:
    run = Run(600, evaluation=20, eval_steps=3).take([7.0, 3.0] * 200)
    assert run.rates[WARMUP : -DECAY - 2] == [1.0] * (run.step - WARMUP - DECAY - 2)
    assert run.rates[-DECAY] > 0.95
    assert run.rates[-DECAY + 3] < 0.85
    assert run.rates[-1] < 0.1


def test_the_rate_follows_steps_that_become_longer() -> None:
    run = Run(300).take([*repeat(5.0, 48), *repeat(9.0, 100)])
    assert run.now <= 300
    assert run.rates[-1] < 0.15
    assert run.rates[WARMUP:] == sorted(run.rates[WARMUP:], reverse=True)


def test_a_step_that_a_server_held_up_lowers_the_rate_only_for_a_while() -> None:
    run = Run(800).take([*repeat(5.0, 10), 300.0, *repeat(5.0, 200)])
    assert min(run.rates[WARMUP:30]) < 0.8
    assert run.rates[30:-DECAY] == [1.0] * (run.step - 30 - DECAY)
    assert run.rates[-1] < 0.05


def test_the_rate_rises_no_faster_where_there_is_little_time() -> None:
    run = Run(70).take(repeat(5.0))
    assert run.rates[:WARMUP] == RISE
    assert run.rates[WARMUP:] == pytest.approx(rates_of_last_steps())


def test_the_rate_rises_no_further_where_there_is_no_time_for_it() -> None:
    run = Run(30).take(repeat(5.0))
    assert run.step == 6
    assert max(run.rates) < RISE[-1]
    assert run.rates[-1] < 0.05


def test_other_schedules_are_left_alone() -> None:
    run = Run(100, schedule="linear", max_steps=40).take(repeat(5.0))
    assert run.rates == Run(float("inf"), schedule="linear", max_steps=40).take(repeat(5.0, 20)).rates


@pytest.mark.parametrize("end", [float("inf"), 1000.0])
def test_a_run_that_goes_on_with_more_time_has_its_full_rate_at_once(tmp_path: Path, end: float) -> None:
    ended = Run(150, max_steps=200).take(repeat(5.0))
    torch.save(ended.scheduler.state_dict(), tmp_path / "scheduler.pt")
    resumed = Run(end, max_steps=200)
    resumed.state.global_step = ended.step
    resumed.optimizer.load_state_dict(ended.optimizer.state_dict())
    resumed.scheduler.load_state_dict(torch.load(tmp_path / "scheduler.pt", weights_only=True))
    assert resumed.optimizer.param_groups[0]["lr"] < 0.05
    resumed.take(repeat(5.0))
    assert resumed.rates[0] == 1.0
    assert resumed.rates[-DECAY:] == pytest.approx(rates_of_last_steps())
    assert resumed.step == 200


def test_a_run_without_a_limit_goes_on_at_the_rate_of_its_checkpoint() -> None:
    whole = Run(float("inf"), max_steps=40).take(repeat(5.0))
    half = Run(float("inf"), max_steps=40).take(repeat(5.0, 34))
    resumed = Run(float("inf"), max_steps=40)
    resumed.state.global_step = half.step
    resumed.optimizer.load_state_dict(half.optimizer.state_dict())
    resumed.scheduler.load_state_dict(half.scheduler.state_dict())
    assert half.rates + resumed.take(repeat(5.0)).rates == whole.rates
