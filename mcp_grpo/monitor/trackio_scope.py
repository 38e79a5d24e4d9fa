"""Trackio, only while a run of it is open."""

from typing import Any, cast

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


TRACKIO = "trackio"


class TrackioScope(TrainerCallback):
    """
    Lets TRL write its timings to Trackio while training, and only then.

    Trackio's run is opened by its own callback when training begins and closed when it ends. TRL writes to it whenever
    `report_to` names it, which before and after training is an error: evaluating a trained policy would end in one.

    Args:
        args (`TrainingArguments`):
            Those of the trainer. Their `report_to` goes without Trackio until training begins.
    """

    def __init__(self, args: TrainingArguments) -> None:
        self._is_wanted = TRACKIO in _trackers(args)
        self._leave(args)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._is_wanted and TRACKIO not in _trackers(args):
            args.report_to = [*_trackers(args), TRACKIO]

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._leave(args)

    def _leave(self, args: TrainingArguments) -> None:
        if TRACKIO in _trackers(args):
            args.report_to = [name for name in _trackers(args) if name != TRACKIO]


def _trackers(args: TrainingArguments) -> list[str]:
    return cast("list[str]", args.report_to or [])
