"""Progress while training runs."""

from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments


class TrainingProgress(ProgressCallback):
    """
    One progress bar that shows the figures people watch: reward, success, valid calls, seconds per step.

    It takes the place of the bar of `transformers`, which prints every logged figure at every step.

    Args:
        success (`str`, *optional*):
            Name of the reward function that says whether a task was done.

    Example:

    ```python
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(TrainingProgress(success="exact_answer"))
    ```
    """

    def __init__(self, success: str | None = None) -> None:
        super().__init__()
        self._figures = {
            "reward": "reward",
            **({f"rewards/{success}/mean": "success"} if success else {}),
            "tools/valid_rate": "valid calls",
            "step_time": "s/step",
        }

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if state.is_world_process_zero and self.training_bar is not None and logs:
            figures = {name: f"{logs[key]:.2f}" for key, name in self._figures.items() if logs.get(key) is not None}
            self.training_bar.set_postfix(figures)
