"""Sampling on vLLM servers: a real one, and others in front of it or in its place that fail as servers do."""

import asyncio
import json
import random
import re
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import aiohttp
import anyio
import pytest
import torch
from accelerate import Accelerator
from aiohttp import web
from anyio.from_thread import BlockingPortal, start_blocking_portal
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.sums import CALL, TEMPLATE_KWARGS
from helpers.vllm_server import metric
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from mcp_grpo.errors import SamplerError, SettingsError
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.rollout import Renderer
from mcp_grpo.sampling import Generation, Sampling, vllm_server_generator
from mcp_grpo.sampling.vllm_backend import VLLMSettings
from mcp_grpo.sampling.vllm_generator import VLLMGenerator
from mcp_grpo.sampling.vllm_server_backend import VLLMServerBackend
from mcp_grpo.sampling.vllm_server_generator import VLLMServerGenerator


pytestmark = pytest.mark.full


TOKENIZER = family_tokenizer("qwen3")
ENDS = end_of_turn_ids("qwen3", TOKENIZER)
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=ENDS, chat_template_kwargs=TEMPLATE_KWARGS)
IDS = list(range(20, 120))
Request = tuple[list[int], Sampling]


class Front:
    """
    A server in front of another one, or in its place, to which things can happen.

    `answer` gets the body of a request for tokens and says what to do with it: a status and a body to answer with, or
    `None` to pass it on.
    """

    def __init__(self, portal: BlockingPortal, target: str | None = None) -> None:
        self._portal, self._target = portal, target
        self.answer: Callable[[dict[str, Any]], Awaitable[tuple[int, Any] | None]] = self._canned
        self.health, self.model = 200, "sums"
        self.bodies: list[dict[str, Any]] = []
        self.adapters: set[str] | None = None  # if it takes any
        self.tokens_status: int | None = 404  # what it answers where token ids go in and out; `None` to pass them on
        self.num_in_tokens = 0
        portal.call(self._open)

    async def _open(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._complete)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/v1/{what:(un)?load}_lora_adapter", self._change_adapters)
        self._runner = web.AppRunner(app, shutdown_timeout=0.01)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": self.model, "max_model_len": 64}]})

    async def _change_adapters(self, request: web.Request) -> web.Response:
        if self.adapters is None:
            return web.Response(status=404)
        change = self.adapters.add if request.match_info["what"] == "load" else self.adapters.discard
        change((await request.json())["lora_name"])
        return web.Response()

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        answer = await self.answer(body)
        if answer is not None:
            return web.json_response(answer[1], status=answer[0])
        return await self._pass_on(request.path, body)

    async def _generate(self, request: web.Request) -> web.Response:
        self.num_in_tokens += 1
        if self.tokens_status is not None:
            return web.Response(status=self.tokens_status)
        return await self._pass_on(request.path, await request.json())

    async def _pass_on(self, path: str, body: dict[str, Any]) -> web.Response:
        async with aiohttp.ClientSession() as session, session.post(f"{self._target}{path}", json=body) as response:
            return web.json_response(await response.json(), status=response.status)

    async def _canned(self, body: dict[str, Any]) -> tuple[int, Any] | None:
        return None if self._target else (200, completion([5, 6]))

    async def die(self) -> None:
        """End at once, with all connections."""
        assert self._runner.server
        for site in list(self._runner.sites):
            await site.stop()
        await self._runner.server.shutdown(timeout=0.01)
        await self._runner.cleanup()

    def close(self) -> None:
        self._portal.call(self._runner.cleanup)


def completion(token_ids: list[int], logprob: float = -0.5) -> dict[str, Any]:
    top = [{str(token): logprob} for token in token_ids]
    logprobs = {"token_logprobs": [logprob] * len(token_ids), "top_logprobs": top}
    return {"choices": [{"token_ids": token_ids, "logprobs": logprobs, "finish_reason": "stop"}]}


def failing(*answers: tuple[int, Any]) -> Callable[[dict[str, Any]], Awaitable[tuple[int, Any]]]:
    """Give these answers, the last one again and again."""
    left = list(answers)

    async def answer(body: dict[str, Any]) -> tuple[int, Any]:
        return left.pop(0) if len(left) > 1 else left[0]

    return answer


async def hang(body: dict[str, Any]) -> None:
    await anyio.sleep_forever()


@pytest.fixture(scope="module")
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def front(portal: BlockingPortal) -> Iterator[Callable[..., Front]]:
    opened: list[Front] = []

    def make(target: str | None = None) -> Front:
        opened.append(Front(portal, target))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def over(portal: BlockingPortal) -> Iterator[Callable[..., VLLMServerGenerator]]:
    """Generators over servers, closed afterwards."""
    made: list[VLLMServerGenerator] = []

    def make(*urls: str, ends: list[int] | None = None) -> VLLMServerGenerator:
        made.append(VLLMServerGenerator(urls, model=lambda: "sums", end_of_turn_ids=ends or []))
        return made[-1]

    yield make
    for each in made:
        each.close()
        each.close()


def ask(portal: BlockingPortal, generator: Any, question: Callable[[], Awaitable[Any]]) -> Any:
    async def in_time() -> Any:
        with anyio.fail_after(60):
            return await question()

    future = portal.start_task_soon(in_time)
    try:
        generator.serve(until=future)
        return future.result()
    finally:
        future.cancel()


def generate(portal: BlockingPortal, generator: Any, requests: list[Request]) -> list[Generation]:
    async def all_of_them() -> list[Generation]:
        return await asyncio.gather(*(generator.generate(*request) for request in requests))

    return ask(portal, generator, all_of_them)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await anyio.sleep(0.01)


ONE = ([1, 2, 3], Sampling(max_tokens=4))


# Where token ids go in and out


@pytest.mark.parametrize("status", [404, 405, 400, 422])
def test_a_server_that_does_not_take_token_ids_is_asked_for_completions(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator], status: int
) -> None:
    server = front()
    server.tokens_status = status
    generator = over(server.url)
    together = generate(portal, generator, [ONE, ONE, ONE])
    generate(portal, generator, [ONE])
    assert {generation.token_ids for generation in together} == {(5, 6)}
    assert len(server.bodies) == 4
    assert server.num_in_tokens <= 3  # those that asked before it was known


@pytest.mark.vllm
def test_a_server_that_takes_token_ids_gives_the_same_without_making_text(
    portal: BlockingPortal, vllm_server: str, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server = front(vllm_server)
    # At this temperature two draws are never alike, so that a seed that is not passed on shows.
    requests = [(IDS[i:], Sampling(max_tokens=20, seed=2**63 + i, temperature=2.0, trajectory=i)) for i in range(3)]
    completions = generate(portal, over(server.url, ends=ENDS), requests)
    server.tokens_status = None
    in_tokens = generate(portal, over(server.url, ends=ENDS), requests)
    assert (len(server.bodies), server.num_in_tokens) == (3, 6)
    for one, other in zip(completions, in_tokens, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.vllm
def test_a_refusal_where_token_ids_are_taken_is_told_and_changes_nothing(
    portal: BlockingPortal, vllm_server: str, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server = front(vllm_server)
    server.tokens_status = None
    generator, wrong, right = over(server.url), ([10**6], Sampling(max_tokens=2)), (IDS, Sampling(max_tokens=2))
    for request in (wrong, right, wrong, right):  # also the first one, when it is not known yet what the server takes
        if request is right:
            generate(portal, generator, [request])
            continue
        with pytest.raises(SamplerError, match=r"refuses a request \(4\d\d\)"):
            generate(portal, generator, [request])
    assert (len(server.bodies), server.num_in_tokens) == (1, 4)


# What servers in trouble answer


def test_a_busy_server_is_asked_again(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server = front()
    server.answer = failing((503, "busy"), (429, "busy"), (200, completion([7, 8])))
    (generation,) = generate(portal, over(server.url), [ONE])
    assert generation == Generation(token_ids=(7, 8), logprobs=(-0.5, -0.5), finish_reason="stop")
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


def test_a_server_that_stays_busy_is_given_up(
    portal: BlockingPortal,
    front: Callable[..., Front],
    over: Callable[..., VLLMServerGenerator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_server_generator, "_MAX_BUSY", 2)
    server = front()
    server.answer = failing((503, "all slots are taken"))
    with pytest.raises(SamplerError, match=r"No vLLM server is left.*takes no requests \(503\).*all slots are taken"):
        generate(portal, over(server.url), [ONE])


def test_a_refusal_has_the_server_s_words_and_fails_that_request_alone(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server = front()

    async def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["prompt"]) > 10:
            return 400, {"message": "the prompt is too long"}
        return 200, completion([5])

    server.answer = answer
    generator = over(server.url)

    async def both() -> Any:
        long = generator.generate([1] * 11, Sampling(max_tokens=4))
        return await asyncio.gather(long, generator.generate(*ONE), return_exceptions=True)

    refused, generation = ask(portal, generator, both)
    assert isinstance(refused, SamplerError)
    assert re.search(rf"{server.url} refuses a request \(400\).*the prompt is too long", str(refused))
    assert generation.token_ids == (5,)
    assert len(server.bodies) == 2
    assert generator.urls == [server.url]


def test_tokens_without_log_probabilities_are_refused(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server, short = front(), completion([5, 6])
    short["choices"][0]["logprobs"]["token_logprobs"].pop()
    server.answer = failing((200, short))
    with pytest.raises(SamplerError, match="2 tokens and 1 log-probabilities"):
        generate(portal, over(server.url), [ONE])


def test_a_dead_engine_loses_the_server(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    dead, well = front(), front()
    dead.answer, dead.health = failing((500, {"message": "EngineCore encountered an issue"})), 503
    generator = over(dead.url, well.url)
    (generation,) = generate(portal, generator, [ONE])
    assert generation.token_ids == (5, 6)
    assert generator.urls == [well.url]
    generate(portal, generator, [ONE, ONE])
    assert len(dead.bodies) == 1  # it is not asked again


def test_an_error_of_a_server_that_is_well_is_a_refusal(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    server = front()
    server.answer = failing((500, {"message": "this one makes no sense"}))
    with pytest.raises(SamplerError, match=r"refuses a request \(500\).*this one makes no sense"):
        generate(portal, over(server.url), [ONE])
    assert len(server.bodies) == 1


def test_a_server_that_hangs_and_is_not_healthy_is_given_up(
    portal: BlockingPortal,
    front: Callable[..., Front],
    over: Callable[..., VLLMServerGenerator],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_server_generator, "_HEALTH_INTERVAL", 0.2)
    stuck, well = front(), front()
    stuck.answer = hang
    generator = over(stuck.url, well.url)

    async def question() -> Generation:
        waiting = asyncio.ensure_future(generator.generate(*ONE))
        await anyio.sleep(1)
        assert not waiting.done()  # slow is not lost
        stuck.health = 503
        return await waiting

    assert ask(portal, generator, question).token_ids == (5, 6)
    assert generator.urls == [well.url]


def test_without_any_server_it_is_an_error_at_once(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    first, second = front(), front()
    first.answer = second.answer = hang
    generator = over(first.url, second.url)

    async def question() -> Any:
        requests = [generator.generate([i], Sampling(max_tokens=4, trajectory=i)) for i in range(4)]
        waiting = asyncio.gather(*requests, return_exceptions=True)
        await until(lambda: len(first.bodies) == len(second.bodies) == 2)
        start = time.monotonic()
        await first.die()
        await second.die()
        return await waiting, time.monotonic() - start

    errors, seconds = ask(portal, generator, question)
    assert [type(error) for error in errors] == [SamplerError] * 4
    assert first.url in str(errors[0])
    assert second.url in str(errors[0])
    assert seconds < 30
    with pytest.raises(SamplerError, match="No vLLM server is left"):
        generate(portal, generator, [ONE])


def test_a_trajectory_stays_where_its_prefix_is_and_new_ones_go_where_there_are_fewest(
    portal: BlockingPortal, front: Callable[..., Front], over: Callable[..., VLLMServerGenerator]
) -> None:
    fronts = [front(), front(), front()]
    generator = over(*(each.url for each in fronts))

    async def trajectory(number: int) -> None:
        for turn in range(4):
            await anyio.sleep(0.01 * (number % 3))
            await generator.generate([number, turn], Sampling(max_tokens=2, trajectory=number))

    async def all_of_them() -> None:
        async with anyio.create_task_group() as group:
            for number in range(6):
                group.start_soon(trajectory, number)

    for _ in range(2):
        ask(portal, generator, all_of_them)
        seen = [[body["prompt"] for body in each.bodies] for each in fronts]
        assert sorted(number for prompts in seen for number in {number for number, _ in prompts}) == list(range(6))
        assert [len(prompts) for prompts in seen] == [8, 8, 8]
        for each in fronts:
            each.bodies.clear()


# A real server


@pytest.fixture(scope="module")
def model(wide_adding_model: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(wide_adding_model, dtype=torch.float32).eval()


@torch.no_grad()
def policy_logprobs(model: Any, token_ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """What the policy gives each token but the first."""
    logps = (model(torch.tensor([token_ids])).logits[0, :-1] / temperature).log_softmax(-1)
    return logps.gather(1, torch.tensor(token_ids[1:]).unsqueeze(1)).squeeze(1)


def adapters(url: str) -> set[str]:
    """Names of the adapters that a server has."""
    with urlopen(f"{url}/v1/models", timeout=10) as response:
        return {model["id"] for model in json.load(response)["data"]} - {"sums"}


@pytest.mark.vllm
def test_a_server_samples_what_the_engine_in_process_does(
    portal: BlockingPortal,
    vllm_server: str,
    over: Callable[..., VLLMServerGenerator],
    wide_adding_model: str,
    model: Any,
    adding_tools: list[dict[str, Any]],
) -> None:
    from vllm import LLM  # noqa: TID251

    engine = LLM(
        model=wide_adding_model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20,
        block_size=32,
        logprobs_mode="processed_logprobs",
    ).llm_engine
    question = list(RENDERER.prompt_ids([{"role": "user", "content": "2+3?"}], adding_tools))
    requests = [
        *((IDS[i:], Sampling(max_tokens=20, seed=2**63 + i, temperature=0.7, trajectory=i)) for i in range(4)),
        (question, Sampling(max_tokens=100, temperature=0)),
        (question, Sampling(max_tokens=3)),
    ]
    here = generate(portal, VLLMGenerator(engine, end_of_turn_ids=ENDS), requests)
    there = generate(portal, over(vllm_server, ends=ENDS), requests)
    assert [g.token_ids for g in there] == [g.token_ids for g in here]
    assert [g.finish_reason for g in there] == [g.finish_reason for g in here]
    for (prompt, sampling), generation in zip(requests[:4], there, strict=False):
        expected = policy_logprobs(model, [*prompt, *generation.token_ids], sampling.temperature)[len(prompt) - 1 :]
        assert torch.allclose(torch.tensor(generation.logprobs), expected, atol=1e-4)
    greedy, cut = there[4:]
    assert TOKENIZER.decode(greedy.token_ids) == CALL
    assert (set(greedy.logprobs), greedy.finish_reason) == ({0.0}, "stop")
    assert (len(cut.token_ids), cut.finish_reason) == (3, "length")


@pytest.mark.vllm
def test_a_server_s_scores_are_the_policy_s(
    portal: BlockingPortal, vllm_server: str, over: Callable[..., VLLMServerGenerator], model: Any
) -> None:
    generator = over(vllm_server)
    (scores,) = ask(portal, generator, lambda: generator.score(IDS))
    assert torch.allclose(torch.tensor(scores), policy_logprobs(model, IDS), atol=1e-4)


@pytest.mark.vllm
def test_a_server_follows_a_grammar_and_tells_what_it_cut_away(
    portal: BlockingPortal,
    vllm_server: str,
    over: Callable[..., VLLMServerGenerator],
    model: Any,
    adding_tools: list[dict[str, Any]],
) -> None:
    tools = json.loads(json.dumps(adding_tools))
    tools[0]["function"]["parameters"]["properties"]["a"] = {"type": "integer", "minimum": 40, "maximum": 49}
    grammar = TurnGrammars(TOKENIZER, end_of_turn_ids=ENDS).grammar(tools)
    question = list(RENDERER.prompt_ids([{"role": "user", "content": "2+3?"}], adding_tools))
    sampling = Sampling(max_tokens=150, constraint=grammar)
    (generation,) = generate(portal, over(vllm_server, ends=ENDS), [(question, sampling)])
    assert generation.finish_reason == "stop"
    assert grammar.matcher().consume_tokens(list(generation.token_ids))
    assert '"a": 4' in TOKENIZER.decode(generation.token_ids)
    assert generation.allowed_logprobs is not None
    allowed = torch.tensor(generation.allowed_logprobs)
    assert (allowed <= 0).all()
    assert (allowed < -1).any()
    free = policy_logprobs(model, [*question, *generation.token_ids])[len(question) - 1 :]
    assert torch.allclose(torch.tensor(generation.logprobs) + allowed, free, atol=1e-4)


@pytest.mark.vllm
def test_a_cancelled_request_is_aborted_on_the_server(
    portal: BlockingPortal, vllm_server: str, over: Callable[..., VLLMServerGenerator]
) -> None:
    generator, running = over(vllm_server), "vllm:num_requests_running"
    before = metric(vllm_server, "vllm:generation_tokens_total")

    async def question() -> None:
        task = asyncio.ensure_future(generator.generate([1, 2, 3], Sampling(max_tokens=2000)))
        while not await anyio.to_thread.run_sync(metric, vllm_server, running):
            assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        while await anyio.to_thread.run_sync(metric, vllm_server, running):
            await anyio.sleep(0.05)

    ask(portal, generator, question)
    assert metric(vllm_server, "vllm:generation_tokens_total") - before < 1990


@pytest.mark.vllm
def test_attempts_of_a_group_read_their_prompt_once_on_a_server(
    portal: BlockingPortal, vllm_server: str, over: Callable[..., VLLMServerGenerator]
) -> None:
    names = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
    before = [metric(vllm_server, name) for name in names]
    prompt = random.Random("a prompt of this test alone").choices(range(200), k=300)
    requests = [(prompt, Sampling(max_tokens=4, seed=seed, trajectory=seed)) for seed in range(8)]
    generate(portal, over(vllm_server), requests)

    def counted() -> list[float]:
        return [metric(vllm_server, name) - first for name, first in zip(names, before, strict=True)]

    portal.call(until, lambda: counted()[0] >= 8 * 300)
    assert counted() == [8 * 300, 7 * (299 // 32 * 32)]


@pytest.mark.vllm
def test_a_real_server_s_refusal_is_told(
    portal: BlockingPortal, vllm_server: str, over: Callable[..., VLLMServerGenerator]
) -> None:
    with pytest.raises(SamplerError, match=r"refuses a request \(400\).*2048"):
        generate(portal, over(vllm_server), [([1] * 3000, Sampling(max_tokens=4))])


@pytest.mark.vllm
def test_another_server_takes_over_from_one_that_dies(
    portal: BlockingPortal,
    vllm_server: str,
    front: Callable[..., Front],
    over: Callable[..., VLLMServerGenerator],
) -> None:
    requests = [(IDS[i:], Sampling(max_tokens=40, seed=i, trajectory=i)) for i in range(4)]
    expected = generate(portal, over(vllm_server), requests)
    dying, staying = front(vllm_server), front(vllm_server)
    dying.answer = hang
    generator = over(dying.url, staying.url)

    async def question() -> list[Generation]:
        waiting = asyncio.gather(*(generator.generate(*request) for request in requests))
        await until(lambda: len(dying.bodies) == 2)
        await dying.die()
        return await waiting

    assert [g.token_ids for g in ask(portal, generator, question)] == [g.token_ids for g in expected]
    assert generator.urls == [staying.url]
    assert len(staying.bodies) == 4


# What starts and updates servers


def backend(policy: Any, folder: Path, *urls: str, weight_sync: Any = "auto", timeout: float = 5.0) -> Any:
    return VLLMServerBackend(
        settings=VLLMSettings(urls=urls, folder=folder, weight_sync=weight_sync),
        model=policy,
        accelerator=Accelerator(cpu=True),
        processing_class=TOKENIZER,
        mode="server",
        server_timeout=timeout,
    )


@pytest.fixture
def policy(wide_adding_model: str) -> Any:
    base = AutoModelForCausalLM.from_pretrained(wide_adding_model, dtype=torch.float32)
    return get_peft_model(base, LoraConfig(r=4, target_modules="all-linear")).eval()


def test_a_server_whose_log_probabilities_do_not_know_of_the_temperature_is_refused(
    tmp_path: Path, policy: Any, front: Callable[..., Front]
) -> None:
    server = front()
    with pytest.raises(SettingsError, match=rf"{server.url}.*--logprobs-mode processed_logprobs"):
        backend(policy, tmp_path, server.url)
    assert [body["temperature"] for body in server.bodies] == [2.0, 0.1]


def test_a_server_that_is_not_up_in_time_is_an_error(tmp_path: Path, policy: Any, front: Callable[..., Front]) -> None:
    server = front()
    server.health = 503
    with pytest.raises(SamplerError, match=r"not up \(it is not healthy\).*vllm_server_timeout"):
        backend(policy, tmp_path, server.url, timeout=0.5)
    with pytest.raises(SamplerError, match=r"http://127\.0\.0\.1:9 is not up.*ConnectError"):
        backend(policy, tmp_path, "http://127.0.0.1:9", timeout=0.5)


def test_a_server_that_comes_up_late_is_waited_for(
    tmp_path: Path, portal: BlockingPortal, policy: Any, front: Callable[..., Front]
) -> None:
    server = front()
    server.health, server.answer = 503, by_temperature

    async def heal() -> None:
        await anyio.sleep(0.5)
        server.health = 200

    healing = portal.start_task_soon(heal)
    made = backend(policy, tmp_path, server.url, timeout=30)
    healing.result()
    assert made.max_context == 64


async def by_temperature(body: dict[str, Any]) -> tuple[int, Any]:
    return 200, completion([5], -body["temperature"])


def test_servers_of_different_models_are_refused(tmp_path: Path, policy: Any, front: Callable[..., Front]) -> None:
    first, second = front(), front()
    first.answer = second.answer = by_temperature
    second.model = "products"
    with pytest.raises(SettingsError, match="serve different models: 'sums', 'products'"):
        backend(policy, tmp_path, first.url, second.url)


def test_a_server_that_takes_no_adapters_is_told_how_to(
    tmp_path: Path, policy: Any, front: Callable[..., Front]
) -> None:
    server = front()
    server.answer = by_temperature
    made = backend(policy, tmp_path, server.url)
    with pytest.raises(SamplerError, match=r"could not be sent.*load_lora_adapter with 404.*--enable-lora"):
        made.sync_weights()
    made.close()
    assert not list(tmp_path.iterdir())


def test_weights_are_sent_to_the_servers_that_are_left(
    tmp_path: Path, portal: BlockingPortal, policy: Any, front: Callable[..., Front]
) -> None:
    fronts = [front(), front(), front()]
    for each in fronts:
        each.answer, each.adapters = by_temperature, set()
    made = backend(policy, tmp_path, *(each.url for each in fronts))
    generator = made.make_generator(ENDS)
    made.sync_weights()
    assert fronts[0].adapters == fronts[1].adapters == fronts[2].adapters != set()
    portal.call(fronts[0].die)  # nobody has asked it for anything since
    fronts[1].answer, fronts[1].health = failing((500, "its engine has died")), 503
    generate(portal, generator, [([i], Sampling(max_tokens=1, trajectory=i)) for i in range(3)])
    made.sync_weights()
    (name,) = fronts[2].adapters or ()
    assert name.endswith("-2")
    assert generator.urls == [fronts[2].url]
    fronts[1].health = 200
    made.sync_weights()  # it comes back with old weights, and stays out
    assert generator.urls == [fronts[2].url]
    generator.close()
    made.close()
    assert not fronts[2].adapters
    assert not list(tmp_path.iterdir())


@pytest.mark.vllm
def test_servers_follow_the_adapter_and_forget_the_old_one(
    tmp_path: Path, portal: BlockingPortal, policy: Any, vllm_server: str, over: Callable[..., VLLMServerGenerator]
) -> None:
    made = backend(policy, tmp_path, vllm_server)
    assert (made.weight_sync, made.max_context) == ("adapter", 2048)
    generator = made.make_generator(ENDS)
    seen = []
    for _ in range(3):
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    parameter += 0.02 * torch.randn_like(parameter)
        made.sync_weights()
        scores = torch.tensor(ask(portal, generator, lambda: generator.score(IDS))[0])
        assert torch.allclose(scores, policy_logprobs(policy, IDS), atol=1e-4)
        assert all((scores - other).abs().mean() > 1e-2 for other in seen)
        seen.append(scores)
        assert len(adapters(vllm_server)) == 1
        assert len(list(tmp_path.glob("*/version-*"))) == 1
    assert made.bytes_sent > 0
    generator.close()
    made.close()
    made.close()
    assert not adapters(vllm_server)
    assert not list(tmp_path.iterdir())


@pytest.mark.vllm
def test_servers_take_whole_weights_from_files(
    tmp_path: Path, portal: BlockingPortal, policy: Any, vllm_server: str
) -> None:
    made = backend(policy, tmp_path, vllm_server, weight_sync="merge")
    generator = made.make_generator(ENDS)
    lora_b = [parameter for name, parameter in policy.named_parameters() if "lora_B" in name]
    before = policy_logprobs(policy, IDS)
    for std in (0.1, 0.0):  # in the end it serves what it did at first
        with torch.no_grad():
            for parameter in lora_b:
                parameter.normal_(std=std)
        made.sync_weights()
        scores = torch.tensor(ask(portal, generator, lambda: generator.score(IDS))[0])
        assert torch.allclose(scores, policy_logprobs(policy, IDS), atol=1e-4)
        assert ((scores - before).abs().mean() > 1e-2) == (std > 0)
    generator.close()
    made.close()
    assert not list(tmp_path.iterdir())
