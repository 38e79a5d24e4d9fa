"""
Ask how fast Transformers samples on a CPU, where rows begin with the same tokens.

    python benchmarks/sampling_on_cpu.py [--model FOLDER] [--dtype float32] [--rows 64] [--tokens 24] [--rounds 3]

Prompts have 600 tokens in common, as those of a small server do, and of their own 10 to 60, as in a first turn, or 300 to 900, as in a later one;
every row samples as many tokens. The model is the quickstart's, or the one in a folder. Each round samples in three ways, one after another: with keys and values for each row, computed for each; computed once
and copied to each row; and kept once and read once for all, as the library does. Seconds are those that one thread has computed,
so that what else the machine does counts as little as it can. It exits with 1 if the last way does not take less time than the others,
or if what it says of its tokens is not what the model says of them without a cache. Nothing is downloaded.
"""

import argparse
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import torch
from fixed_turns import markdown, sample_all, say
from transformers import AutoModelForCausalLM

from mcp_grpo.quickstart.warm_start import WARM_START
from mcp_grpo.sampling import Generation, TransformersGenerator, transformers_generator


NUM_SHARED = 600
OWN = {"a first turn": (10, 60), "a later turn": (300, 900)}
# Nats per token, in the mean: rounding. In other types it is that of the model's own two ways, with a cache and without.
TOLERANCE = 1e-3
ROWS, COPIED, ONCE = "for each row", "once, copied to each row", "kept once, read once"
# What each way can: share what rows begin with, and keep it once.
WAYS = {ROWS: (False, False), COPIED: (True, False), ONCE: (True, True)}


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Ask how fast Transformers samples on a CPU, where rows begin with the same tokens."
    )
    parser.add_argument(
        "--model", type=Path, default=WARM_START, help="folder of the model (default: the quickstart's)"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=24, help="that each row samples")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


@torch.no_grad()
def distance(model: torch.nn.Module, prompts: list[list[int]], generations: list[Generation]) -> float:
    """How far log-probabilities are from those of the model without a cache, in nats per token."""
    off = []
    for prompt, generation in list(zip(prompts, generations, strict=True))[:8]:
        ids = torch.tensor([[*prompt, *generation.token_ids]])
        logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids).unsqueeze(1)).squeeze(1)
        off.append((chosen - torch.tensor(generation.logprobs)).abs().mean().item())
    return statistics.mean(off)


def main() -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: What does not hold.
    """
    arguments = parse_arguments()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    say(f"{arguments.model}, {arguments.dtype}: {arguments.rows} rows, {arguments.tokens} tokens each")
    rows, problems = [], []
    for turn, own in OWN.items():
        medians, off = measure(model, own, arguments)
        rows += [
            [turn, way, f"{medians[way]:.2f}", f"{medians[way] / medians[ROWS]:.2f}", f"{off[way]:.1e}"]
            for way in WAYS
        ]
        problems += [
            f"In {turn}, {ONCE!r} takes longer than {way!r}."
            for way in (ROWS, COPIED)
            if medians[ONCE] >= medians[way]
        ]
        if off[ONCE] > max(TOLERANCE, 2 * off[COPIED]):
            problems.append(f"In {turn}, log-probabilities are off by {off[ONCE]:.1e} nats per token.")
    say(markdown(["turn", "keys and values of what is shared", "s", "of the first", "nats per token off"], rows))
    return problems


def measure(
    model: Any, own: tuple[int, int], arguments: argparse.Namespace
) -> tuple[dict[str, float], dict[str, float]]:
    """Sample in each way; return the medians of the seconds, and how far log-probabilities are off."""
    rng, size = random.Random(0), model.config.vocab_size
    shared = [rng.randrange(size) for _ in range(NUM_SHARED)]
    prompts = [shared + [rng.randrange(size) for _ in range(rng.randint(*own))] for _ in range(arguments.rows)]
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    off: dict[str, float] = {}
    for number in range(arguments.rounds + 1):
        for way, (can_share, can_keep) in WAYS.items():
            generator = TransformersGenerator(model, end_of_turn_ids=[size], pad_token_id=0)
            with (
                patch.object(TransformersGenerator, "_can_copy_prefix", PropertyMock(return_value=can_share)),
                patch.object(
                    transformers_generator, "shares_prefix", transformers_generator.shares_prefix if can_keep else no
                ),
            ):
                start = time.thread_time()
                generations = sample_all(generator, prompts, 2 if number == 0 else arguments.tokens)
                if number:  # the first round only warms up
                    seconds[way].append(time.thread_time() - start)
                    if way not in off:
                        off[way] = distance(model, prompts, generations)
    return {way: statistics.median(times) for way, times in seconds.items()}, off


def no(model: torch.nn.Module) -> bool:
    """Stand for what no model can."""
    return False


if __name__ == "__main__":
    if failures := main():
        sys.exit("\n".join(failures))
