"""
A negative control: does a reward of noise teach anything, and does the run say so?

    python benchmarks/noise.py [--seeds 0 1 2] [--steps 30] [--output-dir outputs/noise]

The quickstart's model trains on the quickstart's servers and tasks twice for each seed: by the quickstart's own reward, and by
one that is drawn by lot for each attempt. Held-out tasks are judged before, in the middle and after, by whether they are
solved. Each run says what it has learnt in the sentence that recipes end with. It exits with 1 if a policy that was rewarded by
lot is better than before, or if one that was rewarded for answers is not. About four minutes of one core for each run;
nothing is downloaded.
"""

import argparse
import random
import sys
from pathlib import Path
from typing import Any

from fixed_turns import markdown, say


sys.path.append(str(Path(__file__).parent.parent / "recipes"))

import torch
from datasets import Dataset
from quickstart import ADAPTER, SERVERS, make_config
from transformers import PrinterCallback

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.evaluation import Judged
from mcp_grpo.evaluation.comparison import success_change
from mcp_grpo.monitor.report import learning_sentence, share_text
from mcp_grpo.quickstart.tasks import build_tasks
from mcp_grpo.quickstart.warm_start import WARM_START
from mcp_grpo.rewards import exact_answer, fault_penalty, is_done


NUM_HELD_OUT = 60
REWARDS = ("answers", "lots")


def by_lot(completions: list[Any], **kwargs: Any) -> list[float]:
    """Draw 0 or 1 for each attempt."""
    return [float(LOTS.random() < 0.5) for _ in completions]


LOTS = random.Random(0)


def train(reward: str, seed: int, steps: int, folder: Path) -> list[Judged]:
    """Train once, and return what the policy was judged at before, in the middle and at the end."""
    LOTS.seed(seed)
    tasks, held_out = build_tasks(num_train=600, num_held_out=NUM_HELD_OUT)
    config = make_config(
        folder / f"{reward}-{seed}",
        seed,
        max_steps=steps,
        disable_tqdm=True,
        eval_strategy="steps",
        eval_on_start=True,
        eval_steps=max(1, steps // 2),
        num_generations_eval=2,
        per_device_eval_batch_size=2 * NUM_HELD_OUT,
        keep_best=False,  # the last policy is what the reward has made of it
    )
    with MCPGRPOTrainer(
        str(WARM_START),
        [by_lot] if reward == "lots" else [exact_answer, fault_penalty],
        config,
        Dataset.from_list(tasks),
        eval_dataset=Dataset.from_list(held_out),
        servers=SERVERS,
        peft_config=ADAPTER,
        is_success=is_done,
    ) as trainer:
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return trainer.evaluations


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/noise"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, problems = [], list[str]()
    for seed in arguments.seeds:
        for reward in REWARDS:
            judged = train(reward, seed, arguments.steps, arguments.output_dir)
            first, last = judged[0], judged[-1]
            gain = success_change(first, last)
            assert first.success is not None
            assert last.success is not None
            assert gain is not None
            said = learning_sentence(judged, last.step)
            say(f"{reward}, seed {seed}: {said}")
            rows.append(
                [reward, str(seed), share_text(first.success), share_text(last.success), said.partition(":")[0]]
            )
            if (gain.low > 0) != (reward == "answers"):
                problems.append(f"Rewarded by {reward}, seed {seed}, success changed by {gain}.")
    say(markdown(["rewarded by", "seed", "held out, before", "after", "the run says"], rows))
    return problems


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
