"""
Ask what it costs to train on padding.

    python benchmarks/padding.py [--device cuda] [--json figures.json]

The batch is like one of the desk: 32 trajectories with prompts of 1,270 to 2,100 tokens and completions of 1,100 on
average, the longest of 4,096, of which the policy has sampled one token in nine, in passes of 8. The model has random
weights, an adapter (LoRA, r = 16 on all linear layers) and gradient checkpointing. Three ways see the same tokens, turn by
turn: passes as wide as the whole batch, as TRL makes them; as their longest trajectory; and the same with trajectories of
like length in one pass. Log-probabilities must agree.

On a CPU (`--device cpu`) the model is tiny and everything an eighth as long. On a GPU it exits with 1 if the last way does
not take less time than the first. Nothing is downloaded.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fixed_turns import device_name, markdown, random_model, say
from peft import LoraConfig, get_peft_model
from trl.trainer import add_fused_lm_head

from mcp_grpo.learning import Unpadded


NUM_TRAJECTORIES, MICRO_BATCH = 32, 8
SHAPES = {"cuda": ("0.6b", 1), "cpu": ("tiny", 8)}  # of the model, and how much shorter everything is
TOLERANCE = {"cuda": 0.05, "cpu": 1e-4}  # nats per token: rounding in bfloat16, and in float32


def make_batch(shorter: int, vocabulary: int, device: str) -> dict[str, torch.Tensor]:
    """Trajectories as TRL pads them: prompts on the left, completions on the right."""
    random = torch.Generator().manual_seed(0)
    prompts = torch.randint(1270, 2100, (NUM_TRAJECTORIES, 1), generator=random) // shorter
    lengths = torch.empty(NUM_TRAJECTORIES, 1).log_normal_(6.7, 0.8, generator=random).long().clamp(max=4096)
    lengths[0] = 4096
    ends, width = lengths // shorter, int(prompts.max())
    columns = torch.arange(width + int(ends.max()))
    mask = ((columns >= width - prompts) & (columns < width + ends)).long()
    ids = torch.randint(10, vocabulary, mask.shape, generator=random) * mask
    labels = ids.masked_fill((mask == 0) | (columns < width), -100)
    turns = 360 // shorter  # from the beginning of one to that of the next
    is_sampled = ((columns - width) % turns < turns // 9) & (labels != -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels, "is_sampled": is_sampled}
    return {name: values.to(device) for name, values in batch.items()}


def train(
    model: Any, way: Callable[..., Any], batch: dict[str, torch.Tensor], order: torch.Tensor, device: str
) -> tuple[float, torch.Tensor]:
    """Seconds of forward and backward passes over the batch, and the log-probabilities of what was sampled."""
    found = torch.zeros(NUM_TRAJECTORIES, batch["labels"].size(1) - 1, device=device)
    start = time.perf_counter()
    for chosen in order.split(MICRO_BATCH):
        rows = {name: values[chosen] for name, values in batch.items()}
        is_sampled = rows.pop("is_sampled")
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            log_probs = way(**rows, fused_lm_head=True).log_probs * is_sampled[:, 1:]
        log_probs.sum().backward()
        found[chosen] = log_probs.detach().float()
    model.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, found


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    parser = argparse.ArgumentParser(description="Ask what it costs to train on padding.")
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=3, help="of each, after one to warm up")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    device = arguments.device
    shape, shorter = SHAPES[device]
    torch.manual_seed(0)
    model = random_model(shape, device)
    add_fused_lm_head(model)
    model = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    batch = make_batch(shorter, model.config.vocab_size, device)
    as_drawn = torch.arange(NUM_TRAJECTORIES, device=device)
    by_length = torch.argsort(batch["attention_mask"].sum(dim=1), descending=True)
    ways: dict[str, tuple[Callable[..., Any], torch.Tensor]] = {
        "as wide as the batch": (model, as_drawn),
        "as wide as its longest": (Unpadded(model), as_drawn),
        "of like lengths": (Unpadded(model), by_length),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks, found = dict.fromkeys(ways, 0), {}
    for number in range(arguments.rounds + 1):
        for name, (way, order) in ways.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent, found[name] = train(model, way, batch, order, device)
            if device == "cuda":
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            say(f"Round {number} of {arguments.rounds}{'' if number else ' (not counted)'}, {name}: {spent:.2f} s")
            if number:
                seconds[name].append(spent)
    first, *others = ways
    num_sampled = batch["is_sampled"].sum()
    difference = max((found[first] - found[name]).abs().sum() / num_sampled for name in others)
    ratios = {
        name: statistics.median(p / t for p, t in zip(seconds[first], seconds[name], strict=True)) for name in ways
    }
    ratio = ratios[others[-1]]
    num_tokens, size = int(batch["attention_mask"].sum()), batch["input_ids"].numel()
    say(
        f"{device_name(device)}, {shape}: {num_tokens:,} tokens, {size:,} with the padding of the whole batch.",
        "",
        markdown(
            ["each pass is", "s per batch", "tokens/s", "times as fast", "peak, GiB"],
            [
                [
                    name,
                    f"{(median := statistics.median(seconds[name])):.2f}",
                    f"{num_tokens / median:,.0f}",
                    f"{ratios[name]:.2f}",
                    f"{peaks[name] / 2**30:.1f}" if peaks[name] else "-",
                ]
                for name in ways
            ],
        ),
        "",
        f"Log-probabilities differ by {difference:.1e} nats per token.",
    )
    if arguments.json is not None:
        figures = {"seconds": seconds, "ratios": ratios, "difference": float(difference), "peaks": peaks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    problems = []
    if difference > TOLERANCE[device]:
        problems.append(f"Log-probabilities differ by {difference:.1e} nats per token.")
    if device == "cuda" and ratio <= 1:
        problems.append(f"It is not faster without padding: {ratio:.2f} times.")
    return problems


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
