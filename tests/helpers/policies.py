"""Policies for tests: tiny models, and one that says what it is told to."""

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, Qwen3Config, Qwen3ForCausalLM

from helpers.families import family_tokenizer
from mcp_grpo.sampling import Generation, Sampling


def tiny_model(tokenizer: PreTrainedTokenizerBase, seed: int = 0, **settings: Any) -> Qwen3ForCausalLM:
    """A random Qwen3 of some ten thousand parameters."""
    torch.manual_seed(seed)
    defaults = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
    }
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **{**defaults, **settings},
    )
    return Qwen3ForCausalLM(config).eval()


def save_tiny_model(folder: Path, **settings: Any) -> str:
    """Write a tiny model and its tokenizer where `from_pretrained` finds them."""
    tokenizer = family_tokenizer("qwen3")
    tiny_model(tokenizer, **settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


class ScriptedGenerator:
    """Says given texts, one per turn, in one conversation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, turns: Sequence[str]) -> None:
        self._turns = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in turns]
        self.prompts: list[tuple[int, ...]] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        turn = self._turns[len(self.prompts)]
        self.prompts.append(tuple(prompt_ids))
        token_ids = turn[: sampling.max_tokens]
        logprobs = tuple(-0.01 * (i + 1) for i in range(len(token_ids)))
        return Generation(
            token_ids=token_ids, logprobs=logprobs, finish_reason="stop" if token_ids == turn else "length"
        )

    def serve(self, until: Future[Any]) -> None:
        until.result(timeout=200)


def teach(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[str, str]], steps: int = 120
) -> None:
    """Fit a tiny model to continue each prompt with its turn."""
    rows, learnt = _rows_to_learn(tokenizer, examples)
    ids = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_token_id)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
    places = torch.tensor(list(learnt))
    weights = torch.tensor([float(count) for count in learnt.values()])
    targets = ids[places[:, 0], places[:, 1]]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    model.train()
    for _ in range(steps):
        logits = model(input_ids=ids).logits[places[:, 0], places[:, 1] - 1]
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        (losses @ weights / weights.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()


def _rows_to_learn(
    tokenizer: PreTrainedTokenizerBase, examples: Sequence[tuple[str, str]]
) -> tuple[list[list[int]], Counter[tuple[int, int]]]:
    """Rows of tokens, and how often each of their places is learnt: an example that another begins with needs no row."""
    split = [[tokenizer(text, add_special_tokens=False)["input_ids"] for text in example] for example in examples]
    rows: list[list[int]] = []
    learnt = Counter[tuple[int, int]]()
    for prompt, turn in sorted(split, key=lambda parts: -len(parts[0] + parts[1])):
        whole = prompt + turn
        row = next((i for i, other in enumerate(rows) if other[: len(whole)] == whole), len(rows))
        if row == len(rows):
            rows.append(whole)
        learnt.update((row, place) for place in range(len(prompt), len(whole)))
    return rows, learnt
