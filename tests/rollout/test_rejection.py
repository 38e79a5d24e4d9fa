"""First turns without a call, thrown away and sampled again: which ones, how often, and what it costs."""

import json
import math
import random
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import ScriptedGenerator, teach, tiny_model
from mcp.server.mcpserver import MCPServer

from mcp_grpo.learning import trajectory_metrics
from mcp_grpo.rollout import (
    Generation,
    Limits,
    Renderer,
    RolloutEngine,
    Sampling,
    TransformersGenerator,
    derived_seed,
    roll_out,
)
from mcp_grpo.rollout.grammar import TurnGrammars
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import StopReason, Task, Trajectory


pytestmark = pytest.mark.anyio

TOKENIZER = family_tokenizer("qwen3")
ENDS = end_of_turn_ids("qwen3", TOKENIZER)
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=ENDS, chat_template_kwargs={"enable_thinking": False})
TASK = Task(task_id="sum", prompt=({"role": "user", "content": "2+3?"},))
LIMITS = Limits(max_turns=3, max_completion_length=2000)
CALL = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': {'a': 2, 'b': 3}})}\n</tool_call><|im_end|>"
MALFORMED = '<tool_call>\n{"name": "add", \n</tool_call><|im_end|>'
ANSWER = "5<|im_end|>"


class Recorder(ScriptedGenerator):
    """Says given texts, one per draw, and keeps how each was asked for."""

    def __init__(self, turns: Sequence[str]) -> None:
        super().__init__(TOKENIZER, turns)
        self.samplings: list[Sampling] = []

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        self.samplings.append(sampling)
        return await super().generate(prompt_ids, sampling)


class Chance:
    """Answers with a given probability, and calls a tool otherwise. It takes nothing but the seed."""

    def __init__(self, answers: float) -> None:
        self._answers = answers

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        text = ANSWER if random.Random(sampling.seed).random() < self._answers else CALL
        token_ids = tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])
        return Generation(token_ids=token_ids, logprobs=(-0.1,) * len(token_ids), finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        until.result(timeout=60)


def desk() -> MCPServer:
    server = MCPServer("desk", log_level="ERROR")

    @server.tool()
    async def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    return server


@pytest.fixture
async def pool() -> AsyncIterator[ToolPool]:
    async with ToolPool({"desk": desk()}) as pool:
        yield pool


async def play(pool: ToolPool, generator: Any, retries: int, **kwargs: Any) -> Trajectory:
    settings = {"task": TASK, "limits": LIMITS, **kwargs}
    return await roll_out(
        pool=pool, renderer=RENDERER, generator=generator, first_call_retries=retries, **{"seed": 7, **settings}
    )


async def test_a_first_turn_without_a_call_is_drawn_again_until_one_calls(pool: ToolPool) -> None:
    generator = Recorder([ANSWER, ANSWER, CALL, ANSWER])
    trajectory = await play(pool, generator, 5)
    assert trajectory.num_rejected == 2
    assert [message["role"] for message in trajectory.messages] == ["assistant", "tool", "assistant"]
    assert generator.prompts[:3] == [trajectory.prompt_ids] * 3


async def test_what_was_thrown_away_leaves_no_trace_but_its_number(pool: ToolPool) -> None:
    trajectory = await play(pool, Recorder([ANSWER, "6<|im_end|>", CALL, ANSWER]), 5)
    plain = await play(pool, Recorder([CALL, ANSWER]), 0)
    exchanges = plain.exchanges  # calls take different times
    assert [e.result.text for e in trajectory.exchanges] == [e.result.text for e in exchanges]
    assert replace(trajectory, exchanges=exchanges, seconds=plain.seconds, num_rejected=0) == plain


async def test_the_last_draw_is_kept_whatever_it_is(pool: ToolPool) -> None:
    trajectory = await play(pool, Recorder([ANSWER, ANSWER, "6<|im_end|>"]), 2)
    assert trajectory.num_rejected == 2
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.answer == "6"


@pytest.mark.parametrize("first", [CALL, MALFORMED], ids=["call", "malformed call"])
async def test_turns_after_the_first_are_not_drawn_again(pool: ToolPool, first: str) -> None:
    generator = Recorder([first, ANSWER])
    trajectory = await play(pool, generator, 5)
    assert trajectory.num_rejected == 0
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert len(generator.prompts) == 2


async def test_a_turn_that_did_not_end_is_kept(pool: ToolPool) -> None:
    trajectory = await play(pool, Recorder([ANSWER]), 5, limits=Limits(max_turns=3, max_completion_length=1))
    assert trajectory.num_rejected == 0
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


async def test_nothing_is_drawn_again_where_there_is_no_tool_to_call(pool: ToolPool) -> None:
    trajectory = await play(pool, Recorder([ANSWER]), 5, task=replace(TASK, tools=()))
    assert trajectory.num_rejected == 0


async def test_nothing_is_drawn_again_where_the_same_would_come(pool: ToolPool) -> None:
    trajectory = await play(pool, Recorder([ANSWER]), 5, temperature=0.0)
    assert trajectory.num_rejected == 0


async def test_each_draw_has_a_seed_of_its_own_and_the_other_turns_keep_theirs(pool: ToolPool) -> None:
    generator = Recorder([ANSWER, ANSWER, CALL, CALL, ANSWER])
    await play(pool, generator, 5)
    parts = [(7, 0), (7, 0, 1), (7, 0, 2), (7, 1), (7, 2)]
    assert [sampling.seed for sampling in generator.samplings] == [derived_seed(*each) for each in parts]


async def test_every_draw_is_confined_to_the_same_grammar(pool: ToolPool) -> None:
    pytest.importorskip("llguidance")
    grammars = TurnGrammars(TOKENIZER, end_of_turn_ids=ENDS)
    generator = Recorder([ANSWER, CALL, ANSWER])
    await play(pool, generator, 5, grammars=grammars)
    constraint = grammars.grammar([tool.schema for tool in pool.catalog.tools])
    assert [sampling.constraint for sampling in generator.samplings] == [constraint] * 3


async def test_drawing_again_counts_against_the_trajectory_s_time(pool: ToolPool) -> None:
    class Slow(Recorder):
        async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
            if len(self.prompts) == 2:
                await anyio.sleep_forever()
            return await super().generate(prompt_ids, sampling)

    trajectory = await play(pool, Slow([ANSWER] * 9), 8, limits=replace(LIMITS, timeout=0.3))
    assert trajectory.stop_reason is StopReason.DEADLINE
    assert trajectory.num_rejected == 2
    assert trajectory.completion_ids == ()
    assert trajectory_metrics([trajectory])["rollout/rejection_cost"].count == 0


def rolled_out(
    tasks: Sequence[Task], generator: Any, retries: int | None, limits: Limits = LIMITS, seed: int = 0
) -> list[Trajectory]:
    engine = RolloutEngine({"desk": desk()})
    settings = {} if retries is None else {"first_call_retries": retries}
    try:
        return engine.roll_out(tasks, renderer=RENDERER, generator=generator, limits=limits, seed=seed, **settings)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def hesitant() -> Any:
    """A small model that calls the tool about every other time."""

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool({"desk": desk()}) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    prompt = TOKENIZER.decode(RENDERER.prompt_ids(TASK.prompt, anyio.run(schemas)))
    model = tiny_model(TOKENIZER, hidden_size=64, intermediate_size=128)
    teach(model, TOKENIZER, [(prompt, CALL), (prompt, ANSWER)], steps=80)
    return model


def generator_of(model: Any) -> TransformersGenerator:
    return TransformersGenerator(model, end_of_turn_ids=ENDS, pad_token_id=TOKENIZER.pad_token_id)


ONE_TURN = Limits(max_turns=1, max_completion_length=120)


def test_without_retries_a_model_samples_what_it_always_did(hesitant: Any) -> None:
    plain = rolled_out([TASK] * 12, generator_of(hesitant), None, ONE_TURN)
    assert [t.num_rejected for t in plain] == [0] * 12
    assert {bool(t.exchanges) for t in plain} == {True, False}
    again = rolled_out([TASK] * 12, generator_of(hesitant), 0, ONE_TURN)
    assert [t.completion_ids for t in again] == [t.completion_ids for t in plain]
    # As it is written down for a trajectory's seed and its turn.
    asked = [Sampling(max_tokens=120, seed=derived_seed(derived_seed(0, i), 0)) for i in range(12)]
    assert [t.completion_ids for t in plain] == sampled(hesitant, plain[0].prompt_ids, asked)


def test_with_retries_a_model_s_kept_turn_is_the_first_draw_that_calls(hesitant: Any) -> None:
    plain = rolled_out([TASK] * 12, generator_of(hesitant), 0, ONE_TURN)
    retried = rolled_out([TASK] * 12, generator_of(hesitant), 6, ONE_TURN)
    for one, other in zip(plain, retried, strict=True):
        lacked_call = one.stop_reason is StopReason.ANSWERED
        assert (other.num_rejected > 0) == lacked_call
        assert lacked_call or other.completion_ids == one.completion_ids
    parts = [(t.num_rejected,) if t.num_rejected else () for t in retried]
    seeds = [derived_seed(derived_seed(0, i), 0, *part) for i, part in enumerate(parts)]
    asked = [Sampling(max_tokens=120, seed=seed) for seed in seeds]
    assert [t.completion_ids for t in retried] == sampled(hesitant, retried[0].prompt_ids, asked)


def sampled(model: Any, prompt_ids: Sequence[int], asked: Sequence[Sampling]) -> list[tuple[int, ...]]:
    """What the model says, asked without a rollout."""
    generator = generator_of(model)
    turns: dict[int, tuple[int, ...]] = {}

    async def ask(index: int) -> None:
        turns[index] = (await generator.generate(prompt_ids, asked[index])).token_ids

    async def ask_all() -> None:
        async with anyio.create_task_group() as group:
            for index in range(len(asked)):
                group.start_soon(ask, index)

    with start_blocking_portal() as portal:
        future = portal.start_task_soon(ask_all)
        generator.serve(until=future)
        future.result()
    return [turns[index] for index in range(len(asked))]


def cost(trajectories: Sequence[Trajectory]) -> float:
    ratio = trajectory_metrics(trajectories)["rollout/rejection_cost"]
    return ratio.total / ratio.count


@pytest.mark.parametrize(("answers", "retries"), [(0.5, 1), (0.7, 3), (0.9, 2)])
def test_the_cost_is_that_of_the_distribution_that_is_really_drawn_from(answers: float, retries: int) -> None:
    count = 1200
    trajectories = rolled_out([TASK] * count, Chance(answers), retries, Limits(max_turns=1, max_completion_length=200))
    assert len({t.prompt_ids for t in trajectories}) == 1
    # Every sequence of draws: the turn that is kept, and how likely it is.
    drawn = {"call": sum(answers**k * (1 - answers) for k in range(retries + 1)), "answer": answers ** (retries + 1)}
    alone = {"call": 1 - answers, "answer": answers}
    share = sum(t.stop_reason is StopReason.ANSWERED for t in trajectories) / count
    error = math.sqrt(drawn["answer"] * drawn["call"] / count)
    assert abs(share - drawn["answer"]) < 4 * error
    expected = sum(drawn[turn] * math.log(drawn[turn] / alone[turn]) for turn in drawn)
    assert cost(trajectories) == pytest.approx(expected, abs=0.05)
    # And for each kind of turn by itself.
    kept = {
        turn: [t for t in trajectories if (t.stop_reason is StopReason.ANSWERED) == (turn == "answer")]
        for turn in drawn
    }
    observed = sum(len(kept[turn]) / count * math.log(len(kept[turn]) / count / alone[turn]) for turn in kept)
    assert cost(trajectories) == pytest.approx(observed, abs=0.05)


def finished(task_id: str, *, calls: bool, num_rejected: int) -> Trajectory:
    generator = Recorder([ANSWER] * num_rejected + [CALL if calls else ANSWER])
    limits = replace(LIMITS, max_turns=1)
    (trajectory,) = rolled_out([replace(TASK, task_id=task_id)], generator, num_rejected, limits)
    assert trajectory.num_rejected == num_rejected
    return trajectory


def test_the_cost_of_a_few_trajectories_by_hand() -> None:
    group = [
        finished("a", calls=True, num_rejected=0),
        finished("a", calls=True, num_rejected=1),
        finished("a", calls=False, num_rejected=3),
    ]
    # Seven draws for three trajectories, five of them without a call.
    assert cost(group) == pytest.approx((2 * math.log(7 / 3) + 3 * math.log(5 / 7)) / 3)
    ratio = trajectory_metrics(group)["rollout/rejected_turns"]
    assert ratio.total / ratio.count == pytest.approx(4 / 3)


def test_a_task_that_always_calls_beside_one_that_never_does_costs_nothing() -> None:
    always = finished("always", calls=True, num_rejected=0)
    never = finished("never", calls=False, num_rejected=3)
    assert cost([always, always, never, never]) == pytest.approx(0.0)


def test_without_retries_there_is_no_cost() -> None:
    figures = trajectory_metrics(
        [finished("a", calls=True, num_rejected=0), finished("a", calls=False, num_rejected=0)]
    )
    assert figures["rollout/rejection_cost"].total == figures["rollout/rejected_turns"].total == 0
    assert figures["rollout/rejection_cost"].count == 2
