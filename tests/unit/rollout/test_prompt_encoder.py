"""Prompts that begin with the same tools have the tokens of their whole text, which is not encoded again."""

from typing import Any

import pytest
from helpers.families import FAMILIES, end_of_turn_ids, family_tokenizer

from mcp_grpo.rollout import Renderer
from mcp_grpo.rollout.prompt_encoder import PromptEncoder


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": "Weather.", "parameters": {"type": "object", "properties": {}}},
    }
    for name in ("get_weather", "get_wind")
]
QUESTIONS = ("Why?", " Where to?\n\n", "<|im_end|> so?", "Ünïcödé 数字")


class _Counting:
    """A tokenizer that notes how many characters it has read."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.read: list[int] = []

    def __call__(self, text: str, **kwargs: Any) -> Any:
        self.read.append(len(text))
        return self._tokenizer(text, **kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_have_the_tokens_of_their_whole_text(family: str) -> None:
    tokenizer = family_tokenizer(family)
    renderer = Renderer(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer))
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(
            messages, tools=TOOLS, tokenize=False, add_generation_prompt=True, chat_template=renderer.chat_template
        )
        assert list(renderer.prompt_ids(messages, TOOLS)) == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_what_prompts_have_in_common_is_read_once() -> None:
    counting = _Counting(family_tokenizer("qwen3"))
    encoder = PromptEncoder(counting, ["<|im_end|>"])
    head = "<|im_start|>system\n" + "tools " * 100 + "<|im_end|>"
    tails = [f"\n<|im_start|>user\n{question}<|im_end|>" for question in "abc"]
    ids = [encoder.encode(head + tail) for tail in tails]
    assert counting.read == [len(head), len(tails[0]), len(head + tails[0]), len(tails[1]), len(tails[2])]
    assert ids == [tuple(family_tokenizer("qwen3")(head + tail)["input_ids"]) for tail in tails]


def test_a_prompt_without_an_end_is_read_whole() -> None:
    tokenizer = family_tokenizer("qwen3")
    assert PromptEncoder(tokenizer, ["<|im_end|>"]).encode("hello") == tuple(tokenizer("hello")["input_ids"])


def test_a_tokenizer_that_begins_each_text_differently_reads_all_prompts_whole() -> None:
    texts: list[str] = []

    def tokenizer(text: str, **kwargs: Any) -> dict[str, list[int]]:
        texts.append(text)
        return {"input_ids": [0, *map(ord, text)]}

    encoder = PromptEncoder(tokenizer, ["|"])
    assert encoder.encode("a|b") == (0, *map(ord, "a|b"))
    texts.clear()
    assert encoder.encode("a|c") == (0, *map(ord, "a|c"))
    assert texts == ["a|c"]
