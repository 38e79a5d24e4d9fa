"""
Ask whether a step of the quickstart is slower on a CPU because each prompt is run once for all attempts, or because only what the policy wrote is predicted.

    python benchmarks/quickstart_step.py [--steps 20] [--seed 0] [--beside rows]

It trains as `recipes/quickstart.py` does, on its real servers, and runs every other step with each prompt once for every attempt instead, or with
`--beside predicted` with a prediction for every token, as TRL's head makes it where it has no GPU. Seconds are
those that this process has computed, so that what else the machine does counts as little as it can. The first step of each way is left out.
It prints what a step of each way takes, and the share of the second that the first takes, by trajectory token as batches differ; it exits with 1
if that is above 1.05. It takes about two minutes, and nothing is downloaded.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fixed_turns import markdown, say
from recipe_step import Beside
from transformers import PrinterCallback


sys.path.append(str(Path(__file__).parent.parent / "recipes"))

import quickstart
from datasets import Dataset

from mcp_grpo import MCPGRPOTrainer, exact_answer, fault_penalty
from mcp_grpo.learning import padding
from mcp_grpo.quickstart.servers import SERVERS
from mcp_grpo.quickstart.tasks import build_tasks
from mcp_grpo.trl_compat import head_reads_all


ROWS, PREDICTED = "rows", "predicted"  # the other way: of `recipe_step.BESIDE`, and every token
NAMES = {ROWS: "each prompt once for every attempt", PREDICTED: "a prediction for every token"}
LIMIT = 1.05


class Watch(Beside):
    """Runs every other step in another way, and notes what each has computed."""

    def __init__(self, way: str) -> None:
        super().__init__([way])
        self.steps: dict[str, list[tuple[float, float]]] = {"": [], way: []}  # seconds and tokens
        self._began, self._num_tokens = 0.0, 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the way, and begin to count."""
        super().on_step_begin(args, state, control, **kwargs)
        padding.head_reads_all = (lambda device: False) if self.now == PREDICTED else head_reads_all
        self._began = time.process_time()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Note what a step came to."""
        if not logs or "num_tokens" not in logs:
            return
        seconds, tokens = time.process_time() - self._began, logs["num_tokens"] - self._num_tokens
        self._num_tokens = logs["num_tokens"]
        self.steps[self.now].append((seconds, tokens))
        say(f"step {state.global_step}{', ' * bool(self.now)}{self.now}: {seconds:.2f} s, {tokens:.0f} tokens")

    def of(self, way: str) -> list[tuple[float, float]]:
        """The steps of a way, without the first."""
        return self.steps[way][1:]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--beside", choices=NAMES, default=ROWS)
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error("`--steps` must be 4 or more: the first step of each way is left out.")
    watch = Watch(arguments.beside)
    with tempfile.TemporaryDirectory() as folder:
        rows, _ = build_tasks()
        with MCPGRPOTrainer(
            quickstart.copy_base_model(rows, Path(folder) / "base"),
            reward_funcs=[exact_answer, fault_penalty],
            args=quickstart.make_config(
                Path(folder) / "run", arguments.seed, max_steps=arguments.steps, disable_tqdm=True
            ),
            train_dataset=Dataset.from_list(rows),
            servers=SERVERS,
            peft_config=quickstart.ADAPTER,
            callbacks=[watch],
        ) as trainer:
            trainer.remove_callback(PrinterCallback)
            watch.watch(trainer)
            trainer.train()
    names = {"": "as the library does it", arguments.beside: NAMES[arguments.beside]}
    rows_of_table = []
    for way, name in names.items():
        seconds = [each for each, _ in watch.of(way)]
        rows_of_table.append([name, str(len(seconds)), f"{statistics.median(seconds):.2f}"])
    per_token = [sum(s for s, _ in watch.of(way)) / sum(t for _, t in watch.of(way)) for way in names]
    ratio = per_token[0] / per_token[1]
    say("", markdown(["", "steps", "seconds of a step, median"], rows_of_table))
    say("", f"By token, a step takes {ratio:.2f} of what it takes with {NAMES[arguments.beside]}.")
    if ratio > LIMIT:
        sys.exit(f"That is above {LIMIT}.")


if __name__ == "__main__":
    main()
