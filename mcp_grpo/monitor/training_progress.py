"""Progress while training runs."""

import sys
from typing import Any

from tqdm.auto import tqdm
from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments


HEALTH = "health/"


class TrainingProgress(ProgressCallback):
    """
    One progress bar that shows the metrics people watch: reward, success, valid calls, seconds per step, and signs of ill
    health. Each evaluation is a line above it.

    It takes the place of the bar of `transformers`, which prints every logged metric at every step.

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
        self._names = {
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
            shown = {name: f"{logs[key]:.2f}" for key, name in self._names.items() if logs.get(key) is not None}
            signs = [key.removeprefix(HEALTH).replace("_", " ") for key in logs if key.startswith(HEALTH)]
            self.training_bar.set_postfix(shown | ({"health": ", ".join(signs)} if signs else {}))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().on_evaluate(args, state, control, **kwargs)
        if state.is_world_process_zero and metrics and metrics.get("eval_reward") is not None:
            names = {"eval_reward": "reward", "eval_stop/answered": "answered", "eval_tools/call_frequency": "calls"}
            seen = [f"{name} {metrics[key]:.3f}" for key, name in names.items() if metrics.get(key) is not None]
            tqdm.write(f"Evaluation at step {state.global_step}: {', '.join(seen)}", file=sys.stderr)
