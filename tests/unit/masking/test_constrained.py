"""Sampling confined to a grammar: every call is valid, and the log-probabilities are those of what was sampled from."""

from typing import Any

import anyio
import pytest
import torch
from anyio.from_thread import BlockingPortal, start_blocking_portal
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import tiny_model

from mcp_grpo.errors import RolloutError
from mcp_grpo.masking.constrained import Constraints
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.masking.roles import GrammarRoles
from mcp_grpo.rollout import Renderer
from mcp_grpo.sampling import Generation, Sampling, TransformersGenerator
from mcp_grpo.tools.arguments import compiled, problems
from mcp_grpo.types import TokenRole


TOKENIZER = family_tokenizer("qwen3")
ENDS = end_of_turn_ids("qwen3", TOKENIZER)
GRAMMARS = TurnGrammars(TOKENIZER, end_of_turn_ids=ENDS)
TRIGGER = TOKENIZER.convert_tokens_to_ids("<tool_call>")


def tool(name: str, properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


WORD = {"type": "string", "maxLength": 6}
TOOLS = [
    tool("get_weather", {"city": WORD, "days": {"type": "integer", "minimum": 1, "maximum": 14}}, ["city", "days"]),
    tool("get_time", {"zone": WORD, "mode": {"enum": ["utc", "local"]}}, ["zone"]),
    tool("list", {}, []),
]
GRAMMAR = GRAMMARS.grammar(TOOLS)
RENDERER = Renderer(family_tokenizer("qwen3"), end_of_turn_ids=ENDS)
PROMPT = RENDERER.prompt_ids([{"role": "user", "content": "question"}], [])


@pytest.fixture(scope="module")
def portal():
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture(scope="module")
def model() -> Any:
    """A random policy that likes to call tools and to end its turns."""
    model = tiny_model(TOKENIZER)
    bias = torch.zeros(len(TOKENIZER))
    bias[TRIGGER], bias[ENDS] = 8.0, 2.0
    model.register_forward_hook(lambda module, args, output: setattr(output, "logits", output.logits + bias))
    return model


def generate(portal: BlockingPortal, model: Any, samplings: list[Sampling]) -> list[Generation]:
    generator = TransformersGenerator(model, end_of_turn_ids=ENDS, pad_token_id=TOKENIZER.pad_token_id)
    results: dict[int, Generation] = {}

    async def ask(index: int) -> None:
        results[index] = await generator.generate(PROMPT, samplings[index])

    async def ask_all() -> None:
        async with anyio.create_task_group() as group:
            for index in range(len(samplings)):
                group.start_soon(ask, index)

    future = portal.start_task_soon(ask_all)
    generator.serve(until=future)
    future.result()
    return [results[index] for index in range(len(samplings))]


def constrained(count: int, **kwargs: Any) -> list[Sampling]:
    return [Sampling(**{"max_tokens": 250, "constraint": GRAMMAR, "seed": seed, **kwargs}) for seed in range(count)]


@pytest.fixture(scope="module")
def generations(portal: BlockingPortal, model: Any) -> list[Generation]:
    return generate(portal, model, constrained(24))


def test_every_sampled_call_is_read_and_fits_its_schema(generations: list[Generation]) -> None:
    validators = {t["function"]["name"]: compiled(t["function"]["parameters"]) for t in TOOLS}
    called = set()
    for generation in generations:
        assert generation.finish_reason == "stop"
        parsed = RENDERER.parse(PROMPT, generation.token_ids, TOOLS)
        assert parsed.malformed is None
        assert len(parsed.calls) == generation.token_ids.count(TRIGGER)
        for call in parsed.calls:
            assert problems(validators[call.name], call.arguments) == []
            called.add(call.name)
    assert called == set(validators)


def test_without_a_constraint_the_same_policy_writes_no_valid_call(portal: BlockingPortal, model: Any) -> None:
    generations = generate(portal, model, constrained(24, constraint=None, max_tokens=100))
    assert any(TRIGGER in generation.token_ids for generation in generations)
    assert not any(RENDERER.parse(PROMPT, generation.token_ids, TOOLS).calls for generation in generations)


def expected_logprobs(model: Any, generation: Generation, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of the confined policy, and of all that was allowed, from the full logits, one by one."""
    ids = torch.tensor([[*PROMPT, *generation.token_ids]])
    logits = model(ids).logits[0, len(PROMPT) - 1 : -1].double() / temperature
    matcher, confined, allowed = GRAMMAR.matcher(), [], []
    for token, row in zip(generation.token_ids, logits, strict=True):
        is_allowed = torch.tensor(list(matcher.compute_logit_bias()))[: len(row)] > 0
        exponentials = row.exp() * is_allowed
        confined.append((exponentials[token] / exponentials.sum()).log())
        allowed.append((exponentials.sum() / row.exp().sum()).log())
        assert matcher.consume_token(token)
    return torch.stack(confined), torch.stack(allowed)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@torch.no_grad()
def test_log_probabilities_are_those_of_the_confined_policy(
    portal: BlockingPortal, model: Any, temperature: float
) -> None:
    for generation in generate(portal, model, constrained(6, temperature=temperature)):
        confined, allowed = expected_logprobs(model, generation, temperature)
        assert torch.allclose(torch.tensor(generation.logprobs).double(), confined, atol=1e-4)
        assert torch.allclose(torch.tensor(generation.allowed_logprobs).double(), allowed, atol=1e-4)


def test_a_forced_token_is_certain(generations: list[Generation]) -> None:
    roles = GrammarRoles(GRAMMARS)
    num_forced = 0
    for generation in generations:
        for role, logprob in zip(roles.roles(generation.token_ids, TOOLS), generation.logprobs, strict=True):
            if role is TokenRole.FORCED:
                assert -1e-6 <= logprob <= 0.0
                num_forced += 1
    assert num_forced > 100


def test_most_of_the_policy_is_allowed_in_free_text_and_little_of_it_in_a_call(generations: list[Generation]) -> None:
    for generation in generations:
        masses = torch.tensor(generation.allowed_logprobs).exp()
        assert masses[0] > 0.9
        if TRIGGER in generation.token_ids:
            assert masses[generation.token_ids.index(TRIGGER) + 1] < 0.1


def test_a_free_row_in_a_constrained_batch_is_as_it_was(portal: BlockingPortal, model: Any) -> None:
    free = constrained(4, constraint=None, max_tokens=100)
    mixed = [*free[:2], *constrained(4, max_tokens=100)[2:]]
    before, after = generate(portal, model, free), generate(portal, model, mixed)
    assert before[:2] == after[:2]
    assert [generation.allowed_logprobs is None for generation in after] == [True, True, False, False]


def test_temperature_zero_takes_the_most_likely_of_what_is_allowed(portal: BlockingPortal, model: Any) -> None:
    first, second = generate(portal, model, constrained(2, temperature=0.0))
    assert first == second
    matcher = GRAMMAR.matcher()
    logits = model(torch.tensor([[*PROMPT, *first.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    for token, row in zip(first.token_ids, logits, strict=True):
        is_allowed = torch.tensor(list(matcher.compute_logit_bias()))[: len(row)] > 0
        assert token == row.masked_fill(~is_allowed, -torch.inf).argmax()
        matcher.consume_token(token)


def test_a_constrained_turn_may_run_out_of_tokens(portal: BlockingPortal, model: Any) -> None:
    for generation in generate(portal, model, constrained(4, max_tokens=7)):
        assert len(generation.token_ids) <= 7
        assert len(generation.allowed_logprobs or ()) == len(generation.token_ids)


def test_rows_of_the_model_that_are_no_tokens_are_never_allowed() -> None:
    logprobs = torch.zeros(2, len(TOKENIZER) + 100).log_softmax(-1)
    confined, log_z = Constraints([None, GRAMMAR]).confine(logprobs)
    assert torch.equal(confined[0], logprobs[0])
    assert log_z[0] == 0.0
    assert confined[1, len(TOKENIZER) :].isneginf().all()
    assert confined[1].exp().sum() == pytest.approx(1.0)


def test_a_token_that_is_not_allowed_is_an_error_and_not_a_wrong_turn() -> None:
    constraints = Constraints([GRAMMAR])
    constraints.advance(torch.tensor([[TRIGGER]]))
    with pytest.raises(RolloutError, match="could not be followed"):
        constraints.advance(torch.tensor([[TRIGGER]]))
