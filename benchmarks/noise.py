"""
A negative control: does a reward of noise teach anything, and does the run say so?

    python benchmarks/noise.py [--seeds 0 1 2] [--rewards answers lots] [--steps 30] [--output-dir outputs/noise] [--model NAME]
        [--device cuda]

The quickstart's model trains on the quickstart's servers and tasks twice for each seed: by the quickstart's own reward, and by
one that is drawn by lot for each attempt. Held-out tasks are judged before, in the middle and after, by whether they are
solved. Each run says what it has learnt in the sentence that recipes end with. It exits with 1 if a policy that was rewarded by
lot is better than before, or if one that was rewarded for answers is not. About four minutes of one core for each run;
nothing is downloaded.

With `--model HuggingFaceTB/SmolLM2-135M-Instruct`, or another one of a few hundred million weights, real weights take its place: first they
imitate solutions for as many steps as `--imitation` says, once for all runs, and then learn with what suits their size. They do so on a GPU
where there is one, unless `--device cpu` is given; the quickstart's own model is small enough for a CPU.
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
from peft import LoraConfig
from quickstart import ADAPTER, SERVERS, make_config
from transformers import AutoTokenizer, PrinterCallback

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.evaluation import Judged
from mcp_grpo.evaluation.comparison import success_change
from mcp_grpo.monitor import METRICS_FILE, MetricsFile
from mcp_grpo.monitor.report import learning_sentence, share_text
from mcp_grpo.precision import is_slow_on_cpu
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.quickstart.warm_start import WARM_START
from mcp_grpo.rewards import exact_answer, fault_penalty, is_done
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.imitation import WarmupConfig, imitate
from mcp_grpo.train.settings import ModelSize, learning_for


NUM_HELD_OUT = 60
REWARDS = ("answers", "lots")


def by_lot(completions: list[Any], **kwargs: Any) -> list[float]:
    """Draw 0 or 1 for each attempt."""
    return [float(LOTS.random() < 0.5) for _ in completions]


LOTS = random.Random(0)


def warmed_up(model: str, num_steps: int, folder: Path, device: str) -> str:
    """Let real weights imitate solutions, unless the folder has what came of it; it calls tools then, though not always the right ones."""
    if not (folder / "config.json").exists():
        tasks, _ = build_tasks(num_train=600, num_held_out=NUM_HELD_OUT)
        imitate(
            model,
            AutoTokenizer.from_pretrained(model),
            WarmupConfig(
                output_dir=str(folder),
                max_steps=num_steps,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=5e-4,
                warmup_steps=4,
                lr_scheduler_type="cosine",
                use_cpu=device == "cpu",
                bf16=dtype_for(device) == "bfloat16",
                gradient_checkpointing=False,
                disable_tqdm=True,
                logging_steps=5,
                save_strategy="no",
                report_to="none",
            ),
            tasks_from_rows(with_solutions(tasks)),
            SERVERS,
            name=model,
            init_kwargs={"dtype": "float32"},
            chat_template_kwargs={},
            max_result_tokens=256,
        )
    return str(folder)


def dtype_for(device: str) -> str:
    """Return in which type real weights are computed."""
    return "float32" if device == "cpu" and is_slow_on_cpu(torch.bfloat16) else "bfloat16"


def settings_for(model: str, device: str) -> tuple[LoraConfig, dict[str, Any]]:
    """Return the adapter and the settings that real weights learn with."""
    learning = learning_for(ModelSize.of(model))
    adapter = LoraConfig(
        r=learning.get("lora_r", 32), lora_alpha=learning.get("lora_alpha", 64), target_modules="all-linear"
    )
    return adapter, {
        "learning_rate": learning.get("learning_rate", 1e-4),
        "warmup_steps": learning.get("warmup_steps", 5),
        "per_device_train_batch_size": 16,  # two groups in 6 GB
        "gradient_accumulation_steps": 2,
        "max_turn_tokens": 96,
        "max_completion_length": 400,
        "chat_template_kwargs": {},
        "model_init_kwargs": {"dtype": dtype_for(device)},
        "use_cpu": device == "cpu",
        "bf16": device != "cpu",
    }


def train(reward: str, seed: int, steps: int, folder: Path, model: str | None, device: str) -> list[Judged]:
    """Train once, and return what the policy was judged at before, in the middle and at the end."""
    LOTS.seed(seed)
    tasks, held_out = build_tasks(num_train=600, num_held_out=NUM_HELD_OUT)
    adapter, settings = (ADAPTER, dict[str, Any]()) if model is None else settings_for(model, device)
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
        **settings,
    )
    with MCPGRPOTrainer(
        model or str(WARM_START),
        [by_lot] if reward == "lots" else [exact_answer, fault_penalty],
        config,
        Dataset.from_list(tasks),
        eval_dataset=Dataset.from_list(held_out),
        servers=SERVERS,
        peft_config=adapter,
        callbacks=[MetricsFile(folder / f"{reward}-{seed}" / METRICS_FILE)],
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
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/noise"))
    parser.add_argument("--model", help="real weights to begin with (default: the quickstart's own)")
    parser.add_argument("--imitation", type=int, default=30, help="steps that they imitate solutions for, first")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, problems = [], list[str]()
    model: str | None = arguments.model
    if model is not None:
        model = warmed_up(model, arguments.imitation, arguments.output_dir / "warm_start", arguments.device)
    for seed in arguments.seeds:
        for reward in arguments.rewards:
            judged = train(reward, seed, arguments.steps, arguments.output_dir, model, arguments.device)
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
