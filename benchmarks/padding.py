"""
Ask what it costs to train on padding: passes as wide as the whole batch, as TRL makes them, or as their longest trajectory.

    python benchmarks/padding.py [--device cuda] [--json figures.json]

The batch is like one of the desk: 64 trajectories with prompts of 1,270 to 2,100 tokens and completions of 1,100 on
average, the longest of 4,096, in passes of 8. The model has random weights, an adapter (LoRA, r = 16 on all linear layers)
and gradient checkpointing. Both ways see the same tokens, turn by turn; log-probabilities must agree.

On a CPU (`--device cpu`) the model is tiny and everything an eighth as long. On a GPU it exits with 1 if the batch does not
take less time without the padding. Nothing is downloaded.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from fixed_turns import device_name, markdown, random_model, say
from peft import LoraConfig, get_peft_model
from trl.trainer import add_fused_lm_head

from mcp_grpo.learning import Unpadded


NUM_TRAJECTORIES, MICRO_BATCH = 64, 8
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
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": labels.to(device)}


def train(model: Any, called: Any, batch: dict[str, torch.Tensor], device: str) -> tuple[float, torch.Tensor]:
    """Seconds of forward and backward passes over the batch, and its log-probabilities."""
    found = []
    start = time.perf_counter()
    for first in range(0, NUM_TRAJECTORIES, MICRO_BATCH):
        rows = {name: values[first : first + MICRO_BATCH] for name, values in batch.items()}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            log_probs = called(**rows, fused_lm_head=True).log_probs
        log_probs.sum().backward()
        found.append(log_probs.detach())
    model.zero_grad()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start, torch.cat(found)


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    parser = argparse.ArgumentParser(description="Ask what it costs to train on padding.")
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5, help="of each, after one to warm up")
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
    ways = {"as wide as the batch": model, "as its longest": Unpadded(model)}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    peaks, found = dict.fromkeys(ways, 0), {}
    for number in range(arguments.rounds + 1):
        for name, called in ways.items():
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            spent, found[name] = train(model, called, batch, device)
            if device == "cuda":
                peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            if number:
                seconds[name].append(spent)
    padded, trimmed = ways
    difference = (found[padded] - found[trimmed]).abs().sum() / (batch["labels"] != -100).sum()
    ratio = statistics.median(p / t for p, t in zip(seconds[padded], seconds[trimmed], strict=True))
    num_tokens, size = int(batch["attention_mask"].sum()), batch["input_ids"].numel()
    say(
        f"{device_name(device)}, {shape}: {num_tokens:,} tokens, {size:,} with the padding of the whole batch.",
        "",
        markdown(
            ["each pass is", "s per batch", "tokens/s", "peak, GiB"],
            [
                [
                    name,
                    f"{(median := statistics.median(seconds[name])):.2f}",
                    f"{num_tokens / median:,.0f}",
                    f"{peaks[name] / 2**30:.1f}" if peaks[name] else "-",
                ]
                for name in ways
            ],
        ),
        "",
        f"Without the padding of the whole batch {ratio:.2f} times as fast. Log-probabilities differ by {difference:.1e} nats.",
    )
    if arguments.json is not None:
        figures = {"seconds": seconds, "ratio": ratio, "difference": float(difference), "peaks": peaks}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    problems = []
    if difference > TOLERANCE[device]:
        problems.append(f"Log-probabilities differ by {difference:.1e} nats per token.")
    if device == "cuda" and ratio <= 1:
        problems.append(f"It is not faster without the padding: {ratio:.2f} times.")
    return problems


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
