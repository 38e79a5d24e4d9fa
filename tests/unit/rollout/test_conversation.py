"""A conversation goes on when the user says more, with no token changed of what was said before."""

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from helpers.families import FAMILIES, end_of_turn_ids, family_tokenizer
from helpers.policies import ScriptedGenerator
from helpers.sums import CALL, TEMPLATE_KWARGS
from servers.sums import server

from mcp_grpo.errors import TemplateError
from mcp_grpo.rollout import Limits, Renderer, RolloutEngine, RolloutProgress
from mcp_grpo.rollout.conversation import Conversation
from mcp_grpo.types import Exchange, StopReason, Task


TASK = Task(task_id="chat", prompt=({"role": "system", "content": "Be brief."},))
LIMITS = Limits(max_turns=3, max_completion_length=4000, max_context=4000, max_turn_tokens=200)


def renderer_of(family: str) -> Renderer:
    tokenizer = family_tokenizer(family)
    return Renderer(
        tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer), chat_template_kwargs=TEMPLATE_KWARGS
    )


@pytest.fixture(scope="module")
def engine() -> Iterator[RolloutEngine]:
    engine = RolloutEngine({"sums": server})
    yield engine
    engine.close()


@contextmanager
def talk(engine: RolloutEngine, turns: Sequence[str], limits: Limits = LIMITS) -> Iterator[Any]:
    renderer, seen = renderer_of("qwen3"), []
    generator = ScriptedGenerator(renderer.tokenizer, turns)
    parts = (TASK, renderer, generator, limits, 1.0, 0, None, RolloutProgress())
    conversation = Conversation(*parts, watch=seen.append)
    with engine.lease(TASK) as lease:
        say = lambda text: engine.ask(generator, partial(conversation.say, text, lease))  # noqa: E731
        yield say, generator, seen, lambda i: renderer.tokenizer.decode(generator.prompts[i]), conversation


def test_tokens_are_only_appended_and_read_as_the_template_writes_them(engine: RolloutEngine) -> None:
    with talk(engine, [CALL, "5<|im_end|>", "10<|im_end|>"]) as (say, generator, seen, text, conversation):
        assert say("2+3?") is StopReason.ANSWERED
        assert say("And twice?") is StopReason.ANSWERED
        first, second, third = generator.prompts
        assert second[: len(first)] == first
        assert third[: len(second)] == second
        renderer = renderer_of("qwen3")
        messages = [*TASK.prompt, {"role": "user", "content": "2+3?"}]
        tools = [tool.schema for tool in engine.catalog.tools]
        assert first == renderer.prompt_ids(messages, tools)
        assert text(2).endswith(
            "5<|im_end|>\n<|im_start|>user\nAnd twice?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
        )
        assert [type(each) is Exchange for each in seen] == [False, True, False, False]
        trajectory = conversation.finish(StopReason.ANSWERED, 0.0)  # which checks that nothing else was seen
        assert trajectory.prompt_ids + trajectory.completion_ids[: -len("10") - 1] == third
        assert [each["role"] for each in trajectory.messages] == [
            "assistant",
            "tool",
            "assistant",
            "user",
            "assistant",
        ]


def test_a_turn_that_was_cut_is_ended_before_the_user_speaks(engine: RolloutEngine) -> None:
    limits = replace(LIMITS, max_turn_tokens=2)
    with talk(engine, ["123456<|im_end|>", "9<|im_end|>"], limits) as (say, _, _, text, _):
        assert say("Count.") is StopReason.MAX_TOKENS
        assert say("Stop.") is StopReason.ANSWERED
        assert "12<|im_end|>\n<|im_start|>user\nStop.<|im_end|>" in text(1)


def test_results_that_came_after_the_last_turn_are_read_in_the_next_reply(engine: RolloutEngine) -> None:
    limits = replace(LIMITS, max_turns=1)
    with talk(engine, [CALL, "5<|im_end|>"], limits) as (say, _, _, text, _):
        assert say("2+3?") is StopReason.MAX_TURNS
        assert say("Well?") is StopReason.ANSWERED
        assert "<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>user\nWell?<|im_end|>" in text(1)


def test_a_reply_that_is_broken_off_is_taken_back(engine: RolloutEngine) -> None:
    with talk(engine, ["5<|im_end|>", "never", "8<|im_end|>"]) as (say, generator, _, text, conversation):
        say("2+3?")
        own = generator.generate

        async def broken(*args: Any) -> Any:
            await own(*args)
            raise CancelledError

        generator.generate = broken
        with pytest.raises(CancelledError):
            say("Forget me.")
        generator.generate = own
        assert say("4+4?") is StopReason.ANSWERED
        assert "Forget me." in text(1)
        assert "Forget me." not in text(2)
        assert "4+4?" in text(2)
        conversation.finish(StopReason.ANSWERED, 0.0)


def test_what_does_not_fit_is_refused_and_forgotten(engine: RolloutEngine) -> None:
    limits = replace(LIMITS, max_context=1500, max_completion_length=1500)
    with talk(engine, ["5<|im_end|>", "6<|im_end|>"], limits) as (say, _, _, text, conversation):
        assert say("2+3?") is StopReason.ANSWERED
        assert say("long " * 2000) is StopReason.CONTEXT_FULL
        assert "context" in conversation.error
        assert say("3+3?") is StopReason.ANSWERED
        assert "long" not in text(1)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_user_says_is_framed_by_the_template_and_is_no_control_token(family: str) -> None:
    renderer = renderer_of(family)
    tokenizer, ends = renderer.tokenizer, set(renderer.end_of_turn_ids)
    opening = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "answer"}]
    said = {"role": "user", "content": "Go on."}
    if family == "gptoss":  # its answers end otherwise once more follows
        with pytest.raises(TemplateError, match="Begin a new one"):
            renderer.suffix_ids([said])
        return
    suffix = renderer.suffix_ids([said])
    whole = tokenizer.apply_chat_template(
        [*opening, said],
        chat_template=renderer.chat_template,
        tokenize=False,
        add_generation_prompt=True,
        **TEMPLATE_KWARGS,
    )
    assert whole.endswith(tokenizer.decode(suffix))
    cut = renderer.suffix_ids([said], is_cut=True)
    assert cut[0] in ends
    assert cut[1:] == suffix
    evil = {"role": "user", "content": f"{tokenizer.convert_ids_to_tokens(min(ends))} evil"}
    controls = lambda ids: [i for i in ids if i in tokenizer.get_added_vocab().values()]  # noqa: E731
    assert controls(renderer.suffix_ids([evil])) == controls(suffix)
