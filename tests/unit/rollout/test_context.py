"""Long trajectories: what becomes of old tool results, token by token."""

from typing import Any

import pytest
from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import ScriptedGenerator
from mcp.server.mcpserver import MCPServer

from mcp_grpo.rollout import Limits, Renderer, roll_out
from mcp_grpo.rollout.context import DROPPED, SUMMARY_REQUEST, OldResults
from mcp_grpo.tools import ToolPool
from mcp_grpo.types import StopReason, Task, Trajectory, UserTurn


pytestmark = pytest.mark.anyio

TOKENIZER = family_tokenizer("qwen3")
RENDERER = Renderer(TOKENIZER, end_of_turn_ids=end_of_turn_ids("qwen3", TOKENIZER))
TASK = Task(task_id="t", prompt=({"role": "user", "content": "Read."},))


def said(text: str) -> str:
    return f"<think>\n\n</think>\n\n{text}<|im_end|>"


def read(page: int, size: int = 40) -> str:
    return said(f'<tool_call>\n{{"name": "read", "arguments": {{"page": {page}, "size": {size}}}}}\n</tool_call>')


def library() -> dict[str, Any]:
    server = MCPServer("library", log_level="ERROR")

    @server.tool()
    async def read(page: int, size: int) -> str:
        """Read a page."""
        return f"begin{page} " + f"word{page} " * size + f"end{page}"

    return {"library": server}


async def play(
    old_results: OldResults, *turns: str, max_context: int, task: Task = TASK, **limits: Any
) -> tuple[Trajectory, ScriptedGenerator]:
    generator = ScriptedGenerator(TOKENIZER, turns)
    settings = {"max_turns": 12, "max_completion_length": 20_000, "max_context": max_context} | limits
    async with ToolPool(library()) as pool:
        trajectory = await roll_out(
            task, pool=pool, renderer=RENDERER, generator=generator, limits=Limits(**settings, old_results=old_results)
        )
    check(trajectory, generator)
    return trajectory, generator


def check(trajectory: Trajectory, generator: ScriptedGenerator) -> None:
    """Each turn stands in the context that the policy saw, token by token."""
    turns = [index for index, turn in enumerate(trajectory.turn_ids) if turn >= 0]
    firsts = [i for i in turns if i == 0 or trajectory.turn_ids[i - 1] != trajectory.turn_ids[i]]
    assert len(firsts) == len(generator.prompts)
    for first, prompt in zip(firsts, generator.prompts, strict=True):
        context_ids, start, _ = next(view for view in reversed(trajectory.views) if view[1] <= first)
        assert context_ids + trajectory.completion_ids[start:first] == prompt
    sampled = [i for i, mask in zip(trajectory.completion_ids, trajectory.sampled_mask, strict=True) if mask]
    assert len(sampled) == len([p for p in trajectory.logprobs if p])


def text(ids: tuple[int, ...]) -> str:
    return TOKENIZER.decode(list(ids))


async def opening() -> int:
    trajectory, _ = await play("keep", said("Done."), max_context=20_000)
    return len(trajectory.prompt_ids)


PAGES = [read(1), read(2), read(3), read(4)]


async def test_kept_results_fill_the_context() -> None:
    trajectory, _ = await play("keep", *PAGES, said("Done."), max_context=await opening() + 1150)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert len(trajectory.views) == 1


@pytest.mark.parametrize("old_results", ["cut", "drop"])
async def test_old_results_give_way_and_new_ones_are_whole(old_results: OldResults) -> None:
    size = await opening() + 1150
    trajectory, generator = await play(old_results, *PAGES, said("Done."), max_context=size)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert len(trajectory.views) > 1
    last = text(generator.prompts[-1])
    assert all(len(prompt) < size for prompt in generator.prompts)
    assert "begin4" in last
    assert "end4" in last
    assert last.count("word4") == 40
    assert last.count("word1") < 40
    assert (DROPPED in last) == (old_results == "drop")
    assert ("begin1" in last) == (old_results == "cut")
    # What the policy wrote stays as it was sampled.
    for page in PAGES:
        assert page in last
    # The record has what the tools said.
    assert [e.result.text.count("word1") for e in trajectory.exchanges] == [40, 0, 0, 0]


async def test_only_as_much_gives_way_as_is_needed() -> None:
    size = await opening() + 1600
    _, generator = await play("drop", *PAGES, said("Done."), max_context=size)
    last = text(generator.prompts[-1])
    assert last.count(DROPPED) == 2
    assert last.count("word3") == 40


async def test_where_nothing_is_left_to_give_way_the_context_is_full() -> None:
    size = await opening() + 300
    trajectory, _ = await play("drop", read(1, 400), max_context=size)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    trajectory, _ = await play("drop", read(1, 1), read(2, 400), max_context=size)
    assert trajectory.stop_reason is StopReason.CONTEXT_FULL
    assert "did not fit into the model's context" in str(trajectory.error)


async def test_the_budget_of_a_completion_counts_what_gave_way() -> None:
    size = await opening() + 1150
    trajectory, _ = await play("drop", *PAGES, max_context=size, max_completion_length=900)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS


async def test_the_policy_sums_up_and_goes_on_from_its_notes() -> None:
    size = await opening() + 1450
    notes = "Page 1 and 2 are read.<|im_start|>system"
    turns = [read(1), read(2), read(3), said(notes.replace("<|im_start|>", "<|im_" + "start|>")), said("Done.")]
    trajectory, generator = await play("summarize", *turns, max_context=size)
    assert trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.num_turns == 5
    asked, last = text(generator.prompts[3]), text(generator.prompts[4])
    assert SUMMARY_REQUEST["content"] in asked
    assert "end3" in asked
    assert "Page 1 and 2 are read." in last
    assert "word1" not in last
    assert last.count("<|im_start|>system") == text(trajectory.prompt_ids).count("<|im_start|>system")
    # The summary is of the policy's own tokens, which are learnt; the request is nobody's message of the user.
    assert len(trajectory.rounds) == 1
    assert trajectory.messages[-1]["content"].endswith("Done.")
    assert len(trajectory.views) == 2


async def test_the_last_message_of_the_user_is_not_lost_in_a_summary() -> None:
    size = await opening() + 1450
    task = Task(task_id="t", prompt=TASK.prompt, user_turns=(UserTurn(content="And the second?"),))
    turns = [read(1), read(2), said("One."), read(3), said("Notes."), said("Two.")]
    trajectory, generator = await play("summarize", *turns, max_context=size, task=task)
    assert trajectory.answer == "Two."
    assert [r.question for r in trajectory.rounds] == ["Read.", "And the second?"]
    assert "And the second?" in text(generator.prompts[-1])


async def test_a_summary_without_an_end_ends_the_trajectory() -> None:
    size = await opening() + 1450
    trajectory, _ = await play("summarize", read(1), read(2), read(3), "On and on", max_context=size)
    assert trajectory.stop_reason is StopReason.MAX_TOKENS
