"""How a chat template writes tool calls, found out by letting it write some."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import TemplateError
from mcp_grpo.types import Message


# Plain ASCII letters: no template changes them, and none writes them by itself.
_NAME = "probename"
_CONTENT = "probecontent"
_ARGUMENTS = {"probekeyone": "probevalueone", "probekeytwo": 24681357}  # a text, which may be quoted, and a number

_SEPARATORS = ((", ", ": "), (",", ":"))

REASONING = ("<think>", "</think>")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonArguments:
    """
    Arguments written as one JSON object.

    Args:
        item_separator (`str`):
            What stands between two arguments.
        key_separator (`str`):
            What stands between an argument's name and its value.
    """

    item_separator: str
    key_separator: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedArguments:
    """
    Arguments written one by one, between tags, and texts among them without quotes.

    Args:
        before_key (`str`):
            What stands before an argument's name.
        before_value (`str`):
            What stands between an argument's name and its value.
        after_value (`str`):
            What stands after an argument's value.
    """

    before_key: str
    before_value: str
    after_value: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallFormat:
    """
    How a tool call is written.

    Args:
        opening (`str`):
            What stands before the tool's name.
        after_name (`str`):
            What stands between the tool's name and its arguments.
        arguments (`JsonArguments` or `TaggedArguments`):
            How the arguments are written.
        closing (`str`):
            What stands after the arguments.
        between (`str`, *optional*):
            What stands between two calls of a turn. `None` if a turn has only one.
        end (`str`):
            The token that ends a turn with tool calls.
        in_reasoning (`bool`):
            Whether the prompt has opened the reasoning when a turn begins.

    Example:

    ```
    <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Paris"}}\\n</tool_call><|im_end|>
    opening               name        after_name       arguments        closing         end
    ```
    """

    opening: str
    after_name: str
    arguments: JsonArguments | TaggedArguments
    closing: str
    between: str | None
    end: str
    in_reasoning: bool


def call_format(
    tokenizer: PreTrainedTokenizerBase,
    *,
    end_of_turn_ids: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> CallFormat:
    """
    Find out how a tokenizer's chat template writes tool calls.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            The policy's tokenizer.
        end_of_turn_ids (`Sequence[int]`):
            Tokens at which the policy's turn ends.
        chat_template_kwargs (`Mapping[str, Any]`, *optional*):
            Passed on to the template.

    Returns:
        [`CallFormat`]: The format. Raises [`TemplateError`] if it is none of those that are known.
    """
    try:
        return _Probe(tokenizer, end_of_turn_ids, chat_template_kwargs or {}).call_format()
    except jinja2.TemplateError as error:
        raise TemplateError(
            f"The chat template of {_named(tokenizer)} refuses to write a plain tool call: {error}. So no grammar "
            'is known for its calls. Set `schema_mask="syntax"`, which needs none, and sample without a constraint.'
        ) from error


class _Probe:
    """A template that is asked to write calls of a tool that does not exist."""

    def __init__(self, tokenizer: Any, end_of_turn_ids: Sequence[int], template_kwargs: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs
        self._ends = [tokenizer.convert_ids_to_tokens(i) for i in end_of_turn_ids]
        self._prompt = self._rendered([], add_generation_prompt=True)

    def call_format(self) -> CallFormat:
        text, end = self._turn([_ARGUMENTS])
        head, found, body = text.partition(_NAME)
        if not found:
            raise self._unknown(text)
        written = self._json(body) or self._tagged(body)
        if written is None:
            raise self._unknown(text)
        after_name, arguments, closing = written
        opening = self._opening(head)
        opened, closed = (self._prompt.rfind(marker) for marker in REASONING)
        return CallFormat(
            opening=opening,
            after_name=after_name,
            arguments=arguments,
            closing=closing,
            between=self._between(opening),
            end=end,
            in_reasoning=opened > closed,
        )

    def _rendered(self, messages: list[Message], **kwargs: Any) -> str:
        conversation = [{"role": "user", "content": "question"}, *messages]
        return self._tokenizer.apply_chat_template(conversation, tokenize=False, **kwargs, **self._template_kwargs)

    def _turn(self, calls: list[dict[str, Any]], content: str = "") -> tuple[str, str]:
        """A turn with calls of these arguments, and the token that ends it."""
        tool_calls = [{"type": "function", "function": {"name": _NAME, "arguments": arguments}} for arguments in calls]
        # With a result, because in some formats (GLM) the turn ends with the first token of the reply to it.
        results: list[Message] = [{"role": "tool", "name": _NAME, "content": "result"} for _ in calls]
        text = self._rendered([{"role": "assistant", "content": content, "tool_calls": tool_calls}, *results])
        text = text[self._start(text) :]
        ends = [(text.find(end), end) for end in self._ends]
        position, end = min(((i, end) for i, end in ends if i >= 0), default=(-1, ""))
        if position < 0:
            raise self._unknown(text)
        return text[:position], end

    def _start(self, text: str) -> int:
        """Where the turn begins: after what it shares with the prompt, but not inside of a control token."""
        start = len(_common_prefix(self._prompt, text))
        for literal in self._tokenizer.get_added_vocab():
            found = text.find(literal, max(0, start - len(literal) + 1))
            if 0 <= found < start:  # the prompt goes on with `<think>` where the turn goes on with `<tool_call>`
                return found
        return start

    def _opening(self, head: str) -> str:
        """What begins a call, without what else a turn begins with."""
        _, found, after_content = self._turn([{}], _CONTENT)[0].partition(_NAME)[0].partition(_CONTENT)
        return (_common_prefix(head[::-1], after_content[::-1])[::-1] if found else head).lstrip()

    def _json(self, body: str) -> tuple[str, JsonArguments, str] | None:
        for item_separator, key_separator in _SEPARATORS:
            written = json.dumps(_ARGUMENTS, separators=(item_separator, key_separator))
            after_name, found, closing = body.partition(written)
            if found:
                return after_name, JsonArguments(item_separator=item_separator, key_separator=key_separator), closing
        return None

    def _tagged(self, body: str) -> tuple[str, TaggedArguments, str] | None:
        (first, text), (second, number) = _ARGUMENTS.items()
        head, _, rest = body.partition(first)
        before_value, _, rest = rest.partition(str(text))
        middle, _, rest = rest.partition(second)
        before_number, found, tail = rest.partition(str(number))
        after_name, before_key = head[: head.rfind("<")], head[head.rfind("<") :]
        after_value, closing = middle.removesuffix(before_key), tail[len(middle) - len(before_key) :]
        # Whatever was taken for a part of the format must explain all that the template wrote.
        explained = [
            (middle, after_value + before_key),
            (before_number, before_value),
            (tail, after_value + closing),
            (self._turn([{}])[0].partition(_NAME)[2], after_name + closing),
        ]
        if not found or any(written != explanation for written, explanation in explained):
            return None
        arguments = TaggedArguments(before_key=before_key, before_value=before_value, after_value=after_value)
        return after_name, arguments, closing

    def _between(self, opening: str) -> str | None:
        """What stands between two calls, if the template writes the second just like the first."""
        call = self._turn([{}])[0].partition(_NAME)[2]
        try:
            calls = self._turn([{}, {}])[0].partition(_NAME)[2]
        except jinja2.TemplateError:  # "This model only supports single tool-calls at once!"
            return None
        second = opening + _NAME + call
        is_repeated = calls.startswith(call) and calls.endswith(second) and len(calls) >= len(call) + len(second)
        return calls[len(call) : len(calls) - len(second)] if is_repeated else None

    def _unknown(self, text: str) -> TemplateError:
        return TemplateError(
            f"No grammar is known for the tool calls of {_named(self._tokenizer)}. Its chat template writes one as {text[:300]!r}, "
            "but known are calls whose arguments are one JSON object (Qwen, Llama, GPT-OSS) or stand between tags "
            '(Qwen3.5, Nemotron, GLM). Set `schema_mask="syntax"`, which needs no grammar, and sample without a constraint.'
        )


def _named(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path) if tokenizer.name_or_path else "this tokenizer"


def _common_prefix(first: str, second: str) -> str:
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in shared)
