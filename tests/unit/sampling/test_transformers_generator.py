"""Sampling with transformers: right distribution, right log-probabilities, whatever the batch."""

import math
import random
import threading
from collections import Counter
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from mcp_grpo.errors import RolloutError
from mcp_grpo.sampling import Generation, Sampling, TransformersGenerator, transformers_generator
from mcp_grpo.sampling.shared_prefix import SharedPrefixCache, shares_prefix
from mcp_grpo.trl_compat import use_attention


TOKENIZER = family_tokenizer("qwen3")
END = TOKENIZER.eos_token_id


@pytest.fixture(scope="module")
def portal():
    with start_blocking_portal() as portal:
        yield portal


def generate(
    portal: BlockingPortal,
    model: Any,
    requests: list[tuple[list[int], Sampling]],
    ends: list[int] | None = None,
    autocast: Any = nullcontext,
) -> list[Generation]:
    generator = TransformersGenerator(
        model, end_of_turn_ids=ends or [END], pad_token_id=TOKENIZER.pad_token_id, autocast=autocast
    )
    results: dict[int, Generation] = {}

    async def ask(index: int) -> None:
        results[index] = await generator.generate(*requests[index])

    async def ask_all() -> None:
        async with anyio.create_task_group() as group:
            for index in range(len(requests)):
                group.start_soon(ask, index)

    future = portal.start_task_soon(ask_all)
    generator.serve(until=future)
    future.result()
    return [results[index] for index in range(len(requests))]


def prompts(count: int, shared: int = 0) -> list[list[int]]:
    rng = random.Random(0)
    opening = [rng.randrange(200) for _ in range(shared)]
    return [opening + [rng.randrange(200) for _ in range(rng.randrange(1, 30))] for _ in range(count)]


def policy_logprobs(model: Any, prompt: list[int], generation: Generation, temperature: float) -> torch.Tensor:
    ids = torch.tensor([prompt + list(generation.token_ids)])
    logits = model(ids).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(generation.token_ids).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("shared", [0, 100], ids=["no shared prefix", "shared prefix"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_log_probabilities_are_the_policy_s_at_the_sampling_temperature(
    portal: BlockingPortal, shared: int, temperature: float
) -> None:
    model = tiny_model(TOKENIZER)
    asked = prompts(8, shared)
    sampling = [Sampling(max_tokens=10 + i, temperature=temperature, seed=i) for i in range(8)]
    for prompt, generation in zip(
        asked, generate(portal, model, list(zip(asked, sampling, strict=True))), strict=True
    ):
        expected = policy_logprobs(model, prompt, generation, temperature)
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


@torch.no_grad()
def test_the_checkpoint_s_own_generation_settings_do_not_leak_in(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    model.generation_config.repetition_penalty = 1.5
    model.generation_config.suppress_tokens = [1, 2, 3]
    model.generation_config.no_repeat_ngram_size = 1
    (prompt,) = prompts(1)
    (generation,) = generate(portal, model, [(prompt, Sampling(max_tokens=40))])
    expected = policy_logprobs(model, prompt, generation, 1.0)
    assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
    assert model.generation_config.repetition_penalty == 1.5


def test_a_row_does_not_depend_on_what_it_is_batched_with(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    asked = [(prompt, Sampling(max_tokens=12, seed=i)) for i, prompt in enumerate(prompts(6, shared=50))]
    together = generate(portal, model, asked)
    alone = [generate(portal, model, [request])[0] for request in asked]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


@torch.no_grad()
def test_tokens_are_drawn_from_the_policy_s_distribution(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER, initializer_range=0.4)
    prompt, count = [5, 6, 7], 3000
    drawn = generate(portal, model, [(prompt, Sampling(max_tokens=1, seed=i)) for i in range(count)])
    counts = Counter(generation.token_ids[0] for generation in drawn)
    probabilities = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    for token in probabilities.topk(5).indices.tolist():
        p = probabilities[token].item()
        assert abs(counts[token] / count - p) < 5 * math.sqrt(p * (1 - p) / count)


def test_temperature_zero_takes_the_most_likely_token(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    (first, second) = generate(
        portal, model, [([5, 6, 7], Sampling(max_tokens=8, temperature=0, seed=s)) for s in (1, 2)]
    )
    assert first == second
    with torch.no_grad():
        assert first.token_ids[0] == model(torch.tensor([[5, 6, 7]])).logits[0, -1].argmax().item()


def test_a_turn_stops_at_any_end_of_turn_token_and_keeps_it(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    ends = list(range(100, 200))  # likely enough to be met
    asked = [(prompt, Sampling(max_tokens=30, seed=i)) for i, prompt in enumerate(prompts(8))]
    generations = generate(portal, model, asked, ends)
    stopped = [g for g in generations if g.finish_reason == "stop"]
    assert len({g.token_ids[-1] for g in stopped}) > 1
    for generation in stopped:
        assert [token in ends for token in generation.token_ids].index(True) == len(generation.token_ids) - 1


def test_each_row_has_its_own_budget(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    budgets = [1, 5, 17]
    asked = [(prompt, Sampling(max_tokens=b)) for prompt, b in zip(prompts(3), budgets, strict=True)]
    generations = generate(portal, model, asked, ends=[10_000])
    assert [len(g.token_ids) for g in generations] == budgets
    assert {g.finish_reason for g in generations} == {"length"}


@torch.no_grad()
def test_an_adapter_is_part_of_the_policy(portal: BlockingPortal) -> None:
    model = get_peft_model(
        tiny_model(TOKENIZER), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    )
    model.eval()
    (prompt,) = prompts(1, shared=40)
    (generation,) = generate(portal, model, [(prompt, Sampling(max_tokens=20))])
    expected = policy_logprobs(model, prompt, generation, 1.0)
    assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)


def test_concurrent_requests_are_gathered_into_batches(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    sizes = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].shape[0]), with_kwargs=True
    )
    generate(portal, model, [(prompt, Sampling(max_tokens=4)) for prompt in prompts(20)], ends=[10_000])
    assert max(sizes) == 20
    assert len(sizes) <= 8


def test_an_error_in_the_model_reaches_both_sides(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    generator = TransformersGenerator(model, end_of_turn_ids=[END], pad_token_id=TOKENIZER.pad_token_id)
    future: Future[Any] = portal.start_task_soon(generator.generate, [10**6], Sampling(max_tokens=1))
    with pytest.raises(IndexError):  # no such token
        generator.serve(until=future)
    with pytest.raises(RolloutError, match="IndexError"):
        future.result(timeout=10)


def test_a_cancelled_request_is_not_generated(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    generator = TransformersGenerator(model, end_of_turn_ids=[END], pad_token_id=TOKENIZER.pad_token_id)

    async def give_up() -> None:
        with anyio.move_on_after(0.05):
            await generator.generate([10**6], Sampling(max_tokens=1))  # would fail if it were run

    portal.start_task_soon(give_up).result(timeout=10)
    future = portal.start_task_soon(generator.generate, [5], Sampling(max_tokens=1))
    generator.serve(until=future)
    assert len(future.result().token_ids) == 1


def test_a_request_that_is_given_up_is_not_sampled_to_its_end_and_others_are(portal: BlockingPortal) -> None:
    model = tiny_model(TOKENIZER)
    (alone,) = generate(portal, model, [([5, 6, 7], Sampling(max_tokens=9, seed=1))], ends=[10_000])
    generator = TransformersGenerator(model, end_of_turn_ids=[10_000], pad_token_id=TOKENIZER.pad_token_id)
    scopes: list[anyio.CancelScope] = []
    given_up, num_steps = threading.Event(), 0

    def hold_up(*_: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            portal.start_task_soon(scopes[0].cancel)
            assert given_up.wait(10)

    async def ask() -> Generation:
        kept: list[Generation] = []

        async def keep() -> None:
            kept.append(await generator.generate([5, 6, 7], Sampling(max_tokens=9, seed=1)))

        async with anyio.create_task_group() as group:
            group.start_soon(keep)
            with anyio.CancelScope() as scope:
                scopes.append(scope)
                await generator.generate([8, 9], Sampling(max_tokens=2000))
            given_up.set()
        return kept[0]

    model.register_forward_pre_hook(hold_up)
    future = portal.start_task_soon(ask)
    generator.serve(until=future)
    assert future.result().token_ids == alone.token_ids
    assert num_steps < 20


@pytest.mark.parametrize("can_share", [True, False], ids=["its beginning once", "as rows"])
def test_a_model_of_any_family_samples_the_same_with_its_beginning_once(
    portal: BlockingPortal, can_share: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = llama_model(), []
    attend = SharedPrefixCache.attend
    monkeypatch.setattr(
        SharedPrefixCache, "attend", lambda self, *args: calls.append(args[1].shape) or attend(self, *args)
    )
    if not can_share:
        monkeypatch.setattr(transformers_generator, "shares_prefix", lambda _: False)
    asked = prompts(6, shared=100)
    sampling = [Sampling(max_tokens=70 + i, seed=i) for i in range(6)]
    generations = generate(portal, model, list(zip(asked, sampling, strict=True)), ends=[10_000])
    with torch.no_grad():
        for prompt, generation in zip(asked, generations, strict=True):
            expected = policy_logprobs(model, prompt, generation, 1.0)
            assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
    assert any(shape[0] == 6 for shape in calls) == can_share  # the trial has three rows
    assert model.config._attn_implementation == "sdpa"


def test_after_an_error_a_model_attends_as_before(portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama_model()
    assert shares_prefix(model)

    def fail(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(SharedPrefixCache, "attend", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        generate(portal, model, [(prompt, Sampling(max_tokens=5)) for prompt in prompts(4, shared=100)])
    assert model.config._attn_implementation == "sdpa"
    assert torch.isfinite(model(torch.tensor([[5, 6, 7]])).logits).all()


def test_under_autocast_a_model_is_tried_and_samples_under_it(
    portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, calls = llama_model(), []
    model.register_forward_pre_hook(lambda *args: calls.append(torch.is_autocast_enabled("cpu")))
    asked = [(prompt, Sampling(max_tokens=5)) for prompt in prompts(4, shared=100)]
    generate(portal, model, asked, autocast=lambda: torch.autocast("cpu", torch.bfloat16))
    assert len(calls) > 10  # the trial, the prefix and the tokens
    assert all(calls)


def test_positions_that_turn_by_length_are_not_copied_either(
    portal: BlockingPortal, monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = tiny_model(TOKENIZER)
    use_attention(model, "eager")  # cannot be replaced
    used = []
    shared_cache = transformers_generator.shared_cache
    monkeypatch.setattr(transformers_generator, "shared_cache", lambda *args: used.append(args) or shared_cache(*args))
    asked = [(prompt, Sampling(max_tokens=2)) for prompt in prompts(4, shared=100)]
    generate(portal, model, asked)
    assert len(used) == 1
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    generate(portal, model, asked)
    assert len(used) == 1


def llama_model() -> LlamaForCausalLM:
    """A model whose configuration does not name its kinds of layers."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=300,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).eval()
