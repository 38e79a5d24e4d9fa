"""
Supervised warm-up: the policy learns to call tools and to copy, but not yet which tool to pick.

A sample holds exactly the tokens that a rollout would: the prompt, what the policy writes up to the end of its turn,
and what the chat template puts around each tool result. The policy is trained on what it would have written, and on
nothing else.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import cycle
from statistics import mean
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from mcp_grpo.quickstart.tasks import Message, Row, scripted_solution
from mcp_grpo.rollout import Renderer


# The prompt then carries the empty thinking block, and the policy need not write it.
CHAT_TEMPLATE_KWARGS = {"enable_thinking": False}
IGNORED = -100  # label of a token that is not trained on

Tool = dict[str, Any]
Sample = tuple[list[int], list[int]]  # token ids and labels
Solution = Callable[[Row, float, random.Random], list[Message]]  # of a task, with so much noise
_QUESTION = {"role": "user", "content": "?"}  # stands for any prompt where only what follows it matters


class SampleBuilder:
    """Converts a task and its solution to the tokens of a rollout."""

    def __init__(self, tokenizer: Any, tools: Sequence[Tool]) -> None:
        self._tokenizer = tokenizer
        self._tools = list(tools)
        self._renderer = Renderer(
            tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs=CHAT_TEMPLATE_KWARGS
        )
        self._opening = self._render([_QUESTION], add_generation_prompt=True)

    def sample(self, row: Row, solution: list[Message]) -> Sample:
        """Return the tokens of a conversation and the labels to train on."""
        ids = list(self._renderer.prompt_ids(row["prompt"], self._tools))
        labels = [IGNORED] * len(ids)
        for message in solution:
            if message["role"] == "tool":
                new_ids = list(self._renderer.suffix_ids([message]))
                labels += [IGNORED] * len(new_ids)
            else:
                turn = self._render([_QUESTION, message]).removeprefix(self._opening).removesuffix("\n")
                new_ids = self._tokenizer.encode(turn, add_special_tokens=False)
                labels += new_ids
            ids += new_ids
        return ids, labels

    def _render(self, messages: list[Message], **kwargs: Any) -> str:
        return self._tokenizer.apply_chat_template(
            messages, tokenize=False, chat_template=self._renderer.chat_template, **kwargs, **CHAT_TEMPLATE_KWARGS
        )


def warm_up(
    model: PreTrainedModel,
    tokenizer: Any,
    rows: Sequence[Row],
    tools: Sequence[Tool],
    *,
    copy_lengths: Sequence[int] = (24,),
    max_copy_steps: int = 600,
    max_call_steps: int = 1000,
    num_noisy_steps: int = 60,
    batch_size: int = 16,
    learning_rate: float = 3e-3,
    noise: float = 0.5,
    target_loss: float = 0.004,
    solution: Solution = scripted_solution,
    seed: int = 0,
) -> None:
    """
    Train a model with random weights to call tools, in place.

    It first repeats random tokens, which is the quickest way for a small model to find out how to copy. Right solutions
    follow, which teach it to call and to tell what a question asks for, and then noisy ones, which blur its choice of
    tool. How soon the first two are learnt is a matter of luck, so they last as long as it takes. A model that has learnt
    some of it already skips that with 0 steps.
    """
    rng, builder = random.Random(seed), SampleBuilder(tokenizer, tools)
    generator, lengths = torch.Generator().manual_seed(seed), cycle(copy_lengths)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / 30, total_iters=30)

    def repetition() -> torch.Tensor:
        return _repetition_loss(model, len(tokenizer), next(lengths), generator)

    def solutions(noise: float) -> torch.Tensor:
        chosen = rng.choices(rows, k=batch_size)
        batch = [builder.sample(row, solution(row, noise, rng)) for row in chosen]
        return _solution_loss(model, batch, tokenizer.pad_token_id)

    model.train()
    _learn("Learning to copy", repetition, optimizer, ramp, max_steps=max_copy_steps, target_loss=0.05)
    _learn(
        "Learning to call", lambda: solutions(0.0), optimizer, ramp, max_steps=max_call_steps, target_loss=target_loss
    )
    optimizer.param_groups[0]["lr"] = learning_rate / 3
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_noisy_steps)
    _learn("Blurring choices", lambda: solutions(noise), optimizer, decay, max_steps=num_noisy_steps)
    model.eval()


def _learn(
    title: str,
    loss_of_batch: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    max_steps: int,
    target_loss: float = 0.0,
) -> None:
    """Take steps until the mean loss of the last ones is on target."""
    parameters = optimizer.param_groups[0]["params"]
    recent: deque[float] = deque(maxlen=20)
    with tqdm(desc=title, total=max_steps) as bar:
        while bar.n < max_steps and (len(recent) < 20 or mean(recent) > target_loss):
            loss = loss_of_batch()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            recent.append(loss.item())
            bar.set_postfix(loss=f"{mean(recent):.3f}", target=target_loss, refresh=False)
            bar.update()
        bar.total = bar.n  # done, however many it took


def _repetition_loss(
    model: PreTrainedModel, vocab_size: int, length: int, generator: torch.Generator, num_rows: int = 32
) -> torch.Tensor:
    """Return the mean loss over the second of two equal runs of random tokens."""
    run = torch.randint(vocab_size, (num_rows, length), generator=generator)
    ids = torch.cat([run, run], dim=1)
    logits = model(input_ids=ids).logits[:, length:-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, length + 1 :].flatten())


def _solution_loss(model: PreTrainedModel, batch: list[Sample], pad_token_id: int) -> torch.Tensor:
    """Return the mean loss over the policy's tokens. The common part of prompts is run once, not once per sample."""
    shared = next(i for i, column in enumerate(zip(*(ids for ids, _ in batch), strict=False)) if len(set(column)) > 1)
    width = max(len(ids) for ids, _ in batch) - shared
    ids = torch.tensor([ids[shared:] + [pad_token_id] * (shared + width - len(ids)) for ids, _ in batch])
    labels = torch.tensor([labels[shared:] + [IGNORED] * (shared + width - len(labels)) for _, labels in batch])
    cache = model(input_ids=torch.tensor([batch[0][0][:shared]]), use_cache=True, logits_to_keep=1).past_key_values
    cache.batch_repeat_interleave(len(batch))
    # Padding stands at the end, where no real token looks: no mask is needed.
    logits = model(input_ids=ids, past_key_values=cache, use_cache=True).logits
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
    )
