"""A policy that has learnt one thing: to add 2 and 3 with the tool of `servers/sums.py`, and say the result."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import teach, tiny_model
from mcp_grpo.rollout import Renderer, set_call_format


SERVER = Path(__file__).parent.parent / "servers" / "sums.py"
SERVERS = {"sums": {"command": sys.executable, "args": [str(SERVER)]}}
TEMPLATE_KWARGS = {"enable_thinking": False}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>'
FENCED_CALL = '```json\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n```<|im_end|>'
SCHEMA_WORDS = (
    "description",
    "function",
    "integer",
    "object",
    "parameters",
    "properties",
    "required",
    "title",
    "type",
    "arguments",  # after "parameters", whose letters it would join first
    "name",
)
ROWS = [{"task_id": f"sum-{i}", "prompt": "2+3?", "answer": "5", "colour": "red"} for i in range(4)]


def save_adding_model(
    folder: Path, tools: list[dict[str, Any]], *, is_short: bool = True, call_format: str = "template", **settings: Any
) -> str:
    """
    Teach a tiny model the one conversation, and write it with its tokenizer.

    A short one has tokens for words and lines about tools, which most of every prompt is; others have only bytes.
    """
    tokenizer = _short_tokenizer(call_format) if is_short else family_tokenizer("qwen3")
    call = CALL if call_format == "template" else FENCED_CALL
    renderer = _renderer(tokenizer)
    model = tiny_model(tokenizer, hidden_size=64, intermediate_size=128, **settings)
    prompt = tokenizer.decode(renderer.prompt_ids([{"role": "user", "content": "2+3?"}], tools))
    suffix = tokenizer.decode(renderer.suffix_ids([{"role": "tool", "name": "add", "content": "5"}]))
    # Sometimes a wrong answer, so that a group has something to learn from.
    answers = ["5<|im_end|>", "5<|im_end|>", "6<|im_end|>"]
    examples = [(prompt, call), *((prompt + call + suffix, answer) for answer in answers)]
    teach(model, tokenizer, examples, steps=80 if is_short else 120)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_talking_model(
    folder: Path, tools: list[dict[str, Any]], answers: Sequence[str], *, calls: bool, steps: int = 120
) -> str:
    """Teach a tiny model to answer, with or without a call of its tool before, and write it with its tokenizer."""
    tokenizer = family_tokenizer("qwen3")
    renderer = _renderer(tokenizer)
    model = tiny_model(tokenizer, hidden_size=64, intermediate_size=128)
    prompt = tokenizer.decode(renderer.prompt_ids([{"role": "user", "content": "2+3?"}], tools))
    suffix = tokenizer.decode(renderer.suffix_ids([{"role": "tool", "name": "add", "content": "5"}]))
    before = prompt + CALL + suffix if calls else prompt
    examples = [(before, f"{answer}<|im_end|>") for answer in answers]
    teach(model, tokenizer, [*([(prompt, CALL)] if calls else []), *examples], steps)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _short_tokenizer(call_format: str) -> Any:
    merges = dict.fromkeys((word[:i], word[i]) for word in SCHEMA_WORDS for i in range(1, len(word)))
    tokenizer = family_tokenizer("qwen3", tuple(merges), by_words=True)
    set_call_format(tokenizer, call_format)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=[{}], tokenize=False)
    lines = [part for part in re.split(r"\n|</?tool_call>", prompt) if len(part) > 30]
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    return tokenizer


def _renderer(tokenizer: Any) -> Renderer:
    ends = end_of_turn_ids("qwen3", tokenizer)
    return Renderer(tokenizer, end_of_turn_ids=ends, chat_template_kwargs=TEMPLATE_KWARGS)
