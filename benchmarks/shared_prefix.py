"""
Ask what it saves to run each prompt once for all attempts at it.

    python benchmarks/shared_prefix.py [--device cuda] [--checkpointing] [--model FOLDER] [--json figures.json]

The batch is like one of the desk: 8 tasks with 8 attempts each, prompts of 1,300 to 1,900 tokens of which the first 1,000 are
those of the tools, the same for all tasks, and completions of 1,100 to 1,400 on average, of which the policy has sampled one
token in eight. The model has random weights, or those in a folder, and an adapter (LoRA, r = 16 on all linear layers). The ways see the same tokens,
turn by turn: trajectories of like length in passes without padding, with a log-probability for every token of a completion;
the same with log-probabilities only of what the policy sampled; and the attempts at half a task to four tasks in one pass, with what
they have in common once. Each computes a loss (forward and backward) and scores the batch (forward), as a step does.
Log-probabilities and gradients must agree. With `--checkpointing` activations are computed a second time, and on a GPU more ways
do that only in passes that would not fit without, as the trainer does.

On a CPU (`--device cpu`) the model is tiny, everything an eighth as long, and seconds are those that one thread has computed, so
that what else the machine does counts as little as it can. It exits with 1 if the way that the trainer
chooses does not take less time than the first. Nothing is downloaded.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fixed_turns import device_name, markdown, random_model, say, synchronize
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from trl.trainer import add_fused_lm_head

from mcp_grpo.learning import Checkpointing, LabelledOnly, PromptSharing, SampledOnly, SharedPrompts, Unpadded


NUM_TASKS, NUM_ATTEMPTS, MICRO_BATCH = 8, 8, 8
SHAPES = {"cuda": ("0.6b", 1), "cpu": ("tiny", 8)}  # of the model, and how much shorter everything is
# Nats per token, and of the gradient: rounding in bfloat16, and in float32.
TOLERANCE = {"cuda": 0.05, "cpu": 1e-4}
CLOCKS = {"cuda": time.perf_counter, "cpu": time.process_time}


class Way(NamedTuple):
    """
    How a batch is run: the size of a pass, whether tasks stay together, whether the policy's tokens are not enough, and whether
    passes that fit go without checkpointing.
    """

    size: int
    shares: bool
    reads_all: bool
    chooses: bool = False


WAYS = {
    "rows, all tokens predicted": Way(MICRO_BATCH, shares=False, reads_all=True),
    "rows": Way(MICRO_BATCH, shares=False, reads_all=False),
    "prompts once": Way(MICRO_BATCH, shares=True, reads_all=False),
    "prompts once, half a task a pass": Way(NUM_ATTEMPTS // 2, shares=True, reads_all=False),
    "prompts and tools once, two tasks a pass": Way(2 * NUM_ATTEMPTS, shares=True, reads_all=False),
    "prompts and tools once, four tasks a pass": Way(4 * NUM_ATTEMPTS, shares=True, reads_all=False),
}
CHOSEN = {f"{name}, checkpointing chosen": way._replace(chooses=True) for name, way in WAYS.items() if way.shares}
BEFORE, NOW = "rows, all tokens predicted", "prompts once"


def make_batch(shorter: int, vocabulary: int, device: str) -> dict[str, torch.Tensor]:
    """Trajectories as TRL pads them: prompts on the left, completions on the right."""
    random = torch.Generator().manual_seed(1)
    sizes = torch.randint(1300, 1900, (NUM_TASKS,), generator=random) // shorter
    scale = torch.empty(NUM_TASKS, 1).log_normal_(7.0, 0.5, generator=random)
    spread = torch.empty(NUM_TASKS, NUM_ATTEMPTS).log_normal_(0.0, 0.25, generator=random)
    lengths = (scale * spread).clamp(60, 3400).long() // shorter
    width, longest = int(sizes.max()), int(lengths.max())
    tools = torch.randint(10, vocabulary, (1000 // shorter,), generator=random)
    columns = torch.arange(width + longest)
    rows, masks = [], []
    for size, row_lengths in zip(sizes.tolist(), lengths.tolist(), strict=True):
        prompt = torch.cat([tools, torch.randint(10, vocabulary, (size - len(tools),), generator=random)])
        for length in row_lengths:
            mask = (columns >= width - size) & (columns < width + length)
            row = torch.randint(10, vocabulary, columns.shape, generator=random) * mask
            row[width - size : width] = prompt
            rows.append(row)
            masks.append(mask)
    ids, mask = torch.stack(rows), torch.stack(masks).long()
    turns = 320 // shorter  # from the beginning of one to that of the next
    is_sampled = (columns[width:] - width) % turns < turns // 8
    batch = {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill((mask == 0) | (columns < width), -100),
        "is_sampled": is_sampled.long() * mask[:, width:],
    }
    return {name: values.to(device) for name, values in batch.items()}


def run(
    model: Any, way: Way, batch: dict[str, torch.Tensor], device: str, chosen_by: Checkpointing, *, learns: bool
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """Return the seconds of passes over the batch, the log-probabilities of what was sampled, and the gradient."""
    num_tokens = batch["is_sampled"].size(1)
    order = torch.arange(len(batch["labels"]), device=device)
    if not way.shares:
        order = torch.argsort(batch["attention_mask"].sum(dim=1), descending=True)
    found = torch.zeros(len(order), num_tokens, device=device)
    model.zero_grad()
    synchronize(device)
    start = CLOCKS[device]()
    with torch.set_grad_enabled(learns):
        bare = chosen_by.around(model) if way.chooses else model
        labelled = bare if way.reads_all else LabelledOnly(model, bare)
        unpadded = Unpadded(labelled)
        called: Callable[..., Any] = SharedPrompts(labelled, unpadded, num_tokens) if way.shares else unpadded
        for chosen in order.split(way.size):
            rows = {name: values[chosen] for name, values in batch.items()}
            is_sampled = rows.pop("is_sampled")
            stand_in = called if way.reads_all else SampledOnly(called, is_sampled, num_tokens)
            with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
                log_probs = stand_in(**rows, fused_lm_head=True).log_probs[:, -num_tokens:] * is_sampled
            if learns:
                (log_probs.sum() / 10_000).backward()
            found[chosen] = log_probs.detach().float()
    synchronize(device)
    seconds = CLOCKS[device]() - start
    gradients = [parameter.grad.float().flatten() for parameter in model.parameters() if parameter.grad is not None]
    return seconds, found, torch.cat(gradients) if gradients else torch.zeros(0)


def make_model(shape: str, device: str, checkpointing: bool, folder: str | None) -> Any:
    """Return a model with an adapter that is not zero, which can share prompts; a random one unless it is in a folder."""
    torch.manual_seed(0)
    model: Any = random_model(shape, device)
    if folder is not None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=model.dtype).to(device)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    adapter = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(model, adapter)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data.mul_(0.05)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        PromptSharing(True).is_possible(model)
    return model


def measure(
    model: Any, ways: dict[str, Way], batch: dict[str, torch.Tensor], device: str, rounds: int
) -> dict[str, dict[str, Any]]:
    """Return for each way the seconds of each round, the peak of memory, and what came out."""
    found: dict[str, dict[str, Any]] = {name: {"loss": [], "scoring": [], "peak": 0} for name in ways}
    chosen_by = Checkpointing(is_possible=True)
    for number in range(rounds + 1):
        for name, way in ways.items():
            each = found[name]
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            loss, each["log_probs"], each["gradient"] = run(model, way, batch, device, chosen_by, learns=True)
            if device == "cuda":
                each["peak"] = max(each["peak"], torch.cuda.max_memory_allocated())
            scoring, *_ = run(model, way, batch, device, chosen_by, learns=False)
            counted = "" if number else " (not counted)"
            say(f"Round {number} of {rounds}{counted}, {name}: {loss:.2f} s and {scoring:.2f} s")
            if number:
                each["loss"].append(loss)
                each["scoring"].append(scoring)
    return found


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    parser = argparse.ArgumentParser(description="Ask what it saves to run each prompt once for all attempts at it.")
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations a second time")
    parser.add_argument("--model", metavar="FOLDER", help="with trained weights, instead of a random one")
    parser.add_argument("--rounds", type=int, default=3, help="of each, after one to warm up")
    parser.add_argument("--json", type=Path, help="file for all figures")
    arguments = parser.parse_args()
    device = arguments.device
    shape, shorter = SHAPES[device]
    if device == "cpu":
        torch.set_num_threads(1)
    model = make_model(shape, device, arguments.checkpointing, arguments.model)
    batch = make_batch(shorter, model.config.vocab_size, device)
    ways = WAYS | CHOSEN if arguments.checkpointing and device == "cuda" else WAYS
    found = measure(model, ways, batch, device, arguments.rounds)
    num_sampled = batch["is_sampled"].sum()
    log_probs, gradient = (found[BEFORE][name] for name in ("log_probs", "gradient"))
    totals = {
        name: [sum(pair) for pair in zip(each["loss"], each["scoring"], strict=True)] for name, each in found.items()
    }
    for name, each in found.items():
        pairs = zip(totals[name], totals[BEFORE], strict=True)
        each["ratio"] = statistics.median(now / before for now, before in pairs)
        each["off"] = float((each.pop("log_probs") - log_probs).abs().sum() / num_sampled)
        each["gradient_off"] = float((each.pop("gradient") - gradient).norm() / gradient.norm())
    say(
        f"{device_name(device)}, {arguments.model or shape}: {int(batch['attention_mask'].sum()):,} tokens as rows, {int(num_sampled):,} sampled.",
        "",
        markdown(
            ["", "loss, s", "scoring, s", "together, of the first", "peak, GiB", "nats per token off", "gradient off"],
            [
                [
                    name,
                    f"{statistics.median(each['loss']):.2f}",
                    f"{statistics.median(each['scoring']):.2f}",
                    f"{each['ratio']:.2f}",
                    f"{each['peak'] / 2**30:.1f}" if each["peak"] else "-",
                    f"{each['off']:.1e}",
                    f"{each['gradient_off']:.1e}",
                ]
                for name, each in found.items()
            ],
        ),
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")
    limit = TOLERANCE[device]
    wrong = [name for name, each in found.items() if not max(each["off"], each["gradient_off"]) <= limit]
    problems = [f"Log-probabilities or gradients are off by more than {limit}: {name}." for name in wrong]
    if not found[NOW]["ratio"] < 1:
        problems.append(f"It is not faster to run prompts once: {found[NOW]['ratio']:.2f} of the time.")
    return problems


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
