"""Sampling with a vLLM engine in this process: right log-probabilities, and requests that come, go and fail by themselves."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.sums import CALL, TEMPLATE_KWARGS
from transformers import AutoModelForCausalLM

from mcp_grpo.errors import SamplerError
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.rollout import Renderer
from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.sampling.vllm_generator import VLLMGenerator


pytestmark = pytest.mark.vllm

TOKENIZER = family_tokenizer("qwen3")
ENDS = end_of_turn_ids("qwen3", TOKENIZER)
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=ENDS, chat_template_kwargs=TEMPLATE_KWARGS)
QUESTION = [{"role": "user", "content": "2+3?"}]


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def model(wide_adding_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(wide_adding_model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def engine(wide_adding_model: str) -> Any:
    from vllm import LLM  # noqa: TID251

    return LLM(
        model=wide_adding_model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        logprobs_mode="processed_logprobs",
        structured_outputs_config={"backend": "guidance"},
    ).llm_engine


@pytest.fixture
def endless(engine: Any) -> VLLMGenerator:
    """A generator whose turns end only by their length."""
    return VLLMGenerator(engine, end_of_turn_ids=[])


@pytest.fixture
def generator(engine: Any) -> VLLMGenerator:
    return VLLMGenerator(engine, end_of_turn_ids=ENDS)


@pytest.fixture
def question(adding_tools: list[dict[str, Any]]) -> list[int]:
    """The prompt that the policy has learnt to answer."""
    return list(RENDERER.prompt_ids(QUESTION, adding_tools))


def ask(portal: BlockingPortal, generator: VLLMGenerator, question: Callable[[], Awaitable[Any]]) -> Any:
    future = portal.start_task_soon(question)
    try:
        generator.serve(until=future)
        return future.result()
    finally:
        future.cancel()


def generate(
    portal: BlockingPortal, generator: VLLMGenerator, requests: list[tuple[list[int], Sampling]]
) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(generator.generate(*request) for request in requests))

    return ask(portal, generator, all_of_them)


async def until(holds: Callable[[], bool]) -> None:
    with anyio.fail_after(60):
        while not holds():
            await anyio.sleep(0.001)


def prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(200) for _ in range(rng.randrange(1, 60))] for _ in range(count)]


@torch.no_grad()
def policy_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """What the policy gives each token but the first."""
    logps = (model(torch.tensor([token_ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return logps.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probabilities_are_the_policy_s_at_the_sampling_temperature(
    portal: BlockingPortal, generator: VLLMGenerator, model: Any, temperature: float
) -> None:
    asked = prompts(8)
    sampling = [Sampling(max_tokens=10 + i, temperature=temperature, seed=i) for i in range(8)]
    sampled = generate(portal, generator, list(zip(asked, sampling, strict=True)))
    for prompt, generation in zip(asked, sampled, strict=True):
        expected = policy_logprobs(model, [*prompt, *generation.token_ids], temperature)[len(prompt) - 1 :]
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
        assert generation.allowed_logprobs is None


def test_scores_are_the_policy_s_log_probabilities(
    portal: BlockingPortal, generator: VLLMGenerator, model: Any
) -> None:
    for prompt in (prompts(1)[0], list(range(200))):
        (scores,) = ask(portal, generator, lambda prompt=prompt: generator.score(prompt))
        assert len(scores) == len(prompt) - 1
        assert torch.allclose(torch.tensor(scores), policy_logprobs(model, prompt), atol=1e-4)


def test_a_seed_gives_the_same_tokens_whatever_else_is_in_the_batch(
    portal: BlockingPortal, endless: VLLMGenerator
) -> None:
    asked = [(prompt, Sampling(max_tokens=12, seed=2**63 + i)) for i, prompt in enumerate(prompts(6))]
    together = generate(portal, endless, asked)
    alone = [generate(portal, endless, [request])[0] for request in asked]
    assert [g.token_ids for g in together] == [g.token_ids for g in alone]


def test_another_seed_gives_other_tokens(portal: BlockingPortal, endless: VLLMGenerator) -> None:
    (prompt,) = prompts(1)
    sampled = generate(portal, endless, [(prompt, Sampling(max_tokens=30, seed=2 * seed)) for seed in range(4)])
    assert len({generation.token_ids for generation in sampled}) == 4


class Elsewhere:
    """The engine, which says that it is on another device, with another model runner."""

    def __init__(self, engine: Any, device: str, runner: dict[str, bool]) -> None:
        self._engine, self.seeds = engine, []
        self.vllm_config = SimpleNamespace(device_config=SimpleNamespace(device_type=device), **runner)

    def add_request(self, name: str, prompt: Any, params: Any, **kwargs: Any) -> None:
        self.seeds.append(params.seed)
        self._engine.add_request(name, prompt, params, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


@pytest.mark.parametrize(
    ("device", "runner", "has_seed"),
    [
        ("cuda", {"use_v2_model_runner": True}, True),
        ("cuda", {"use_v2_model_runner": False}, False),
        ("cuda", {}, False),
        ("cpu", {"use_v2_model_runner": False}, True),
    ],
    ids=["GPU", "GPU, first model runner", "GPU, older vLLM", "CPU"],
)
def test_requests_have_seeds_where_they_cost_nothing(
    portal: BlockingPortal, engine: Any, device: str, runner: dict[str, bool], has_seed: bool
) -> None:
    elsewhere = Elsewhere(engine, device, runner)
    generator = VLLMGenerator(elsewhere, end_of_turn_ids=[])
    (sampled,) = generate(portal, generator, [(prompts(1)[0], Sampling(max_tokens=5, seed=8))])
    assert len(sampled.token_ids) == 5
    assert elsewhere.seeds == [4 if has_seed else None]


def test_the_engine_says_which_model_runner_it_has(engine: Any) -> None:
    assert engine.vllm_config.device_config.device_type == "cpu"
    assert engine.vllm_config.use_v2_model_runner is False


def test_temperature_zero_takes_the_most_likely_token_for_certain(
    portal: BlockingPortal, generator: VLLMGenerator, model: Any
) -> None:
    (prompt,) = prompts(1)
    asked = [(prompt, Sampling(max_tokens=6, temperature=0, seed=seed)) for seed in (1, 2)]
    first, second = generate(portal, generator, asked)
    assert first == second
    assert first.logprobs == (0.0,) * len(first.token_ids)
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *first.token_ids]])).logits[0, len(prompt) - 1 : -1]
    assert tuple(logits.argmax(-1).tolist()) == first.token_ids


def test_a_turn_ends_with_its_end_of_turn_token(
    portal: BlockingPortal, generator: VLLMGenerator, question: list[int]
) -> None:
    (generation,) = generate(portal, generator, [(question, Sampling(max_tokens=200, temperature=0))])
    assert generation.finish_reason == "stop"
    assert TOKENIZER.decode(generation.token_ids) == CALL
    assert generation.token_ids[-1] in ENDS
    assert not set(generation.token_ids[:-1]) & set(ENDS)


def test_a_turn_that_runs_out_of_tokens_says_so(
    portal: BlockingPortal, generator: VLLMGenerator, endless: VLLMGenerator, question: list[int]
) -> None:
    (cut,) = generate(portal, generator, [(question, Sampling(max_tokens=3, temperature=0))])
    assert (len(cut.token_ids), cut.finish_reason) == (3, "length")
    # Without ends of its own not even the checkpoint's end a turn.
    (on_and_on,) = generate(portal, endless, [(question, Sampling(max_tokens=100, temperature=0))])
    assert (len(on_and_on.token_ids), on_and_on.finish_reason) == (100, "length")
    assert ENDS[0] in on_and_on.token_ids


def test_a_later_short_request_ends_before_an_earlier_long_one(portal: BlockingPortal, endless: VLLMGenerator) -> None:
    ended = []

    async def request(name: str, max_tokens: int) -> None:
        await endless.generate([1, 2, 3], Sampling(max_tokens=max_tokens))
        ended.append(name)

    async def both() -> None:
        async with anyio.create_task_group() as group:
            group.start_soon(request, "long", 400)
            await until(lambda: len(endless._under_way) == 1)
            group.start_soon(request, "short", 3)

    ask(portal, endless, both)
    assert ended == ["short", "long"]


def test_a_cancelled_request_is_aborted_and_others_go_on(
    portal: BlockingPortal, endless: VLLMGenerator, engine: Any
) -> None:
    staying = ([4, 5, 6], Sampling(max_tokens=500, seed=1))
    (expected,) = generate(portal, endless, [staying])

    async def both() -> Generation:
        other = asyncio.ensure_future(endless.generate(*staying))
        gone = asyncio.ensure_future(endless.generate([1, 2, 3], Sampling(max_tokens=1000)))
        await until(lambda: len(endless._under_way) == 2)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        await until(lambda: len(endless._under_way) == 1)
        assert not other.done()
        assert engine.get_num_unfinished_requests() == 1
        return await other

    assert ask(portal, endless, both).token_ids == expected.token_ids
    assert not endless._under_way
    assert not engine.has_unfinished_requests()


def test_a_request_that_is_cancelled_before_the_engine_saw_it_is_never_added(
    portal: BlockingPortal, endless: VLLMGenerator, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    added: list[str] = []
    add_request = engine.add_request

    def watched(name: str, *args: Any, **kwargs: Any) -> None:
        added.append(name)
        add_request(name, *args, **kwargs)

    monkeypatch.setattr(engine, "add_request", watched)

    async def cancelled() -> None:
        task = asyncio.ensure_future(endless.generate([1, 2, 3], Sampling(max_tokens=1000)))
        await asyncio.sleep(0.05)
        task.cancel()

    portal.call(cancelled)  # while nobody serves
    generate(portal, endless, [([1, 2], Sampling(max_tokens=2))])
    assert len(added) == 1
    assert not engine.has_unfinished_requests()


def test_a_prompt_that_is_too_long_is_refused_alone(portal: BlockingPortal, endless: VLLMGenerator) -> None:
    async def both() -> Any:
        return await asyncio.gather(
            endless.generate([1] * 2000, Sampling(max_tokens=4)),
            endless.generate([1, 2, 3], Sampling(max_tokens=4)),
            return_exceptions=True,
        )

    refused, generation = ask(portal, endless, both)
    assert isinstance(refused, SamplerError)
    assert "1024" in str(refused)
    assert len(generation.token_ids) == 4


class Waiting:
    """Two long requests, and what becomes of them."""

    def __init__(self, generator: VLLMGenerator) -> None:
        self.generator = generator
        self.errors: list[BaseException] = []

    async def wait(self) -> None:
        requests = (self.generator.generate([1, 2, i], Sampling(max_tokens=900)) for i in range(2))
        self.errors = await asyncio.gather(*requests, return_exceptions=True)

    def break_step(self, engine: Any, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
        """The engine breaks in the midst of sampling both of them."""
        step, num_steps = engine.step, 0

        def broken() -> Any:
            nonlocal num_steps
            num_steps += len(self.generator._under_way) == 2
            if num_steps > 5:
                raise error
            return step()

        monkeypatch.setattr(engine, "step", broken)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (RuntimeError("the kernel broke"), "engine failed: RuntimeError.'the kernel broke'.*restart the run"),
        (RuntimeError("CUDA out of memory"), "ran out of memory.*vllm_gpu_memory_utilization"),
    ],
)
def test_an_error_in_the_engine_fails_all_that_wait_and_is_raised(
    portal: BlockingPortal,
    endless: VLLMGenerator,
    engine: Any,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    message: str,
) -> None:
    waiting = Waiting(endless)
    with monkeypatch.context() as patch:
        waiting.break_step(engine, error, patch)
        future: Future[None] = portal.start_task_soon(waiting.wait)
        with pytest.raises(SamplerError, match=message) as raised:
            endless.serve(until=future)
        assert raised.value.__cause__ is error
        future.result(timeout=60)
    assert [type(each) for each in waiting.errors] == [SamplerError, SamplerError]
    assert not engine.has_unfinished_requests()


def test_ctrl_c_leaves_the_engine_empty_and_usable(
    portal: BlockingPortal, endless: VLLMGenerator, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = ([7, 8, 9], Sampling(max_tokens=20, seed=3))
    expected = generate(portal, endless, [request])
    waiting = Waiting(endless)
    with monkeypatch.context() as patch:
        waiting.break_step(engine, KeyboardInterrupt(), patch)
        future: Future[None] = portal.start_task_soon(waiting.wait)
        with pytest.raises(KeyboardInterrupt):
            endless.serve(until=future)
        future.result(timeout=60)
    assert [type(each) for each in waiting.errors] == [SamplerError, SamplerError]
    assert not endless._under_way
    assert not engine.has_unfinished_requests()
    assert [g.token_ids for g in generate(portal, endless, [request])] == [g.token_ids for g in expected]


@pytest.fixture
def cached(engine: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each request that finishes has found in the cache, which is empty at first."""
    assert engine.reset_prefix_cache()
    step, found = engine.step, []

    def watched() -> Any:
        outputs = step()
        found.extend(output.num_cached_tokens for output in outputs if output.finished)
        return outputs

    monkeypatch.setattr(engine, "step", watched)
    return found


def test_a_later_turn_finds_its_prefix_in_the_cache(
    portal: BlockingPortal, generator: VLLMGenerator, cached: list[int], question: list[int]
) -> None:
    (first,) = generate(portal, generator, [(question, Sampling(max_tokens=100, temperature=0))])
    result = RENDERER.suffix_ids([{"role": "tool", "name": "add", "content": "5"}])
    (second,) = generate(
        portal, generator, [([*question, *first.token_ids, *result], Sampling(max_tokens=9, temperature=0))]
    )
    assert [first.num_cached, second.num_cached] == cached
    assert TOKENIZER.decode(second.token_ids) in ("5<|im_end|>", "6<|im_end|>")
    num_seen = len(question) + len(first.token_ids) - 1  # the last token was sampled, and never read
    assert cached == [0, num_seen // 32 * 32]


def test_attempts_of_a_group_that_begin_together_read_their_prompt_once_and_another_task_its_tools_not_at_all(
    portal: BlockingPortal,
    endless: VLLMGenerator,
    cached: list[int],
    question: list[int],
    adding_tools: list[dict[str, Any]],
) -> None:
    generate(portal, endless, [(question, Sampling(max_tokens=4, seed=seed)) for seed in range(8)])
    num_blocks = (len(question) - 1) // 32  # the last token is read in any case, as it predicts the next
    assert num_blocks > 8
    assert sorted(cached) == [0, *[num_blocks * 32] * 7]
    other = list(RENDERER.prompt_ids([{"role": "user", "content": "And what is 30+4?"}], adding_tools))
    num_common = next(place for place, (a, b) in enumerate(zip(question, other, strict=False)) if a != b)
    assert num_common > 256
    cached.clear()
    generate(portal, endless, [(other, Sampling(max_tokens=4, seed=seed)) for seed in range(8)])
    assert sorted(cached) == [num_common // 32 * 32, *[(len(other) - 1) // 32 * 32] * 7]


def test_constrained_turns_follow_their_grammar_and_tell_what_it_cut_away(
    portal: BlockingPortal,
    generator: VLLMGenerator,
    model: Any,
    question: list[int],
    adding_tools: list[dict[str, Any]],
) -> None:
    tools = deepcopy(adding_tools)
    # Other numbers than those that the policy has learnt, so that the grammar has something to forbid.
    tools[0]["function"]["parameters"]["properties"]["a"] = {"type": "integer", "minimum": 40, "maximum": 49}
    grammar = TurnGrammars(TOKENIZER, end_of_turn_ids=ENDS).grammar(tools)
    asked = [(question, Sampling(max_tokens=150, constraint=grammar, seed=seed)) for seed in range(6)]
    sampled = generate(portal, generator, asked)
    calls = 0
    for generation in sampled:
        assert generation.finish_reason == "stop"
        matcher = grammar.matcher()
        assert matcher.consume_tokens(list(generation.token_ids))
        calls += '"a": 4' in TOKENIZER.decode(generation.token_ids)
        assert generation.allowed_logprobs is not None
        constrained, allowed = torch.tensor(generation.logprobs), torch.tensor(generation.allowed_logprobs)
        assert (allowed <= 0).all()
        free = policy_logprobs(model, [*question, *generation.token_ids])[len(question) - 1 :]
        assert torch.allclose(constrained + allowed, free, atol=1e-4)
        assert (allowed < -1).any()
    assert calls == len(sampled)


def test_of_several_threads_that_serve_one_runs_the_engine_and_the_next_takes_over(
    portal: BlockingPortal, endless: VLLMGenerator, engine: Any
) -> None:
    until_told: Future[None] = Future()
    other = threading.Thread(target=endless.serve, args=[until_told])
    other.start()
    short, long = ([1, 2, 3], Sampling(max_tokens=5)), ([4, 5, 6], Sampling(max_tokens=600))
    (first,) = generate(portal, endless, [short])  # the other thread runs the engine for this one
    asked = portal.start_task_soon(endless.generate, *long)
    portal.call(until, lambda: len(endless._under_way) == 1)
    until_told.set_result(None)
    endless.serve(until=asked)  # it has left, in the midst of the turn
    other.join(timeout=20)
    assert not other.is_alive()
    assert len(first.token_ids) == 5
    assert len(asked.result().token_ids) == 600
    assert not engine.has_unfinished_requests()


def test_a_thread_that_has_the_engine_for_itself_finds_nothing_under_way_and_is_followed_by_who_served(
    portal: BlockingPortal, endless: VLLMGenerator, engine: Any
) -> None:
    until_told: Future[None] = Future()
    other = threading.Thread(target=endless.serve, args=[until_told])
    other.start()
    gone = portal.start_task_soon(endless.generate, [1, 2, 3], Sampling(max_tokens=900))
    portal.call(until, lambda: len(endless._under_way) == 1)
    gone.cancel()
    portal.call(until, lambda: not endless._inbox.empty() or not endless._under_way)
    with endless.alone():
        assert not engine.has_unfinished_requests()
        assert engine.reset_prefix_cache()
        waiting = portal.start_task_soon(endless.generate, [1, 2, 3], Sampling(max_tokens=3))
        portal.call(anyio.sleep, 0.2)
        assert not engine.has_unfinished_requests()
        assert not waiting.done()
    assert len(waiting.result(timeout=60).token_ids) == 3
    until_told.set_result(None)
    other.join(timeout=20)
    assert not other.is_alive()
