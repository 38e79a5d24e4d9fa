"""Whatever a policy writes into a call, its values are never forced, and a broken call has nothing forced in it."""

import json
import re
from functools import cache
from itertools import accumulate
from typing import Any

import pytest
from helpers.families import EVERY_FAMILY, end_of_turn_ids, family_tokenizer
from helpers.marks import full
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mcp_grpo.masking.roles import SyntaxRoles
from mcp_grpo.masking.vocabulary import Vocabulary
from mcp_grpo.rollout import Renderer
from mcp_grpo.types import TokenRole


KEYS = ["al", "alpha", "beta", "beta_two", "gamma"]
NAMES = ["look", "look_up", "lose"]
# Letters that occur nowhere in a call but in its values.
LETTERS = "ZQÉ東🎉"
WORDS = "true|false|null|True|False|None"
JSON_FAMILIES = [full("qwen2_5"), "qwen3", "llama3_1", full("gptoss"), "qwen2_5_json"]


class Writer:
    """Writes turns as a policy would that follows a family's template, and reads their roles."""

    def __init__(self, family: str, merges: tuple[tuple[str, str], ...] = ()) -> None:
        self.tokenizer: PreTrainedTokenizerFast = family_tokenizer(family, merges)
        self.ends = end_of_turn_ids(family, self.tokenizer)
        self.roles = SyntaxRoles(self.tokenizer, end_of_turn_ids=self.ends)
        self.vocabulary = Vocabulary(self.tokenizer)
        self.renderer = Renderer(self.tokenizer, end_of_turn_ids=self.ends)
        self.prompt = self._render([], add_generation_prompt=True)

    def _render(self, messages: list, **kwargs: Any) -> str:
        question = {"role": "user", "content": "question"}
        return str(self.tokenizer.apply_chat_template([question, *messages], tokenize=False, **kwargs))

    def turn(self, name: str, arguments: dict[str, Any]) -> str:
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        turn = {"role": "assistant", "content": "", "tool_calls": [call]}
        text = self._render([turn, {"role": "tool", "name": name, "content": "result"}])
        shared = next((i for i, (a, b) in enumerate(zip(self.prompt, text, strict=False)) if a != b), len(self.prompt))
        ids = self.ids(text[shared:])
        last = next(i for i, token_id in enumerate(ids) if token_id in self.ends)
        return b"".join(self.vocabulary.pieces(ids[: last + 1])).decode()

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def read(self, text: str, tools: list) -> list[tuple[str, Any]]:
        """The calls of a turn as the rollout reads them."""
        prompt = self.renderer.prompt_ids([{"role": "user", "content": "question"}], tools)
        return [(call.name, call.arguments) for call in self.renderer.parse(prompt, self.ids(text), tools).calls]

    def is_forced(self, text: str, tools: list) -> list[bool]:
        """One entry per byte of a turn, by the tokens it is in."""
        ids = self.ids(text)
        roles = self.roles.roles(ids, tools)
        assert len(roles) == len(ids)
        pieces = self.vocabulary.pieces(ids)
        return [role is TokenRole.FORCED for role, piece in zip(roles, pieces, strict=True) for _ in piece]


@cache
def writer(family: str) -> Writer:
    return Writer(family)


def schema_of(value: Any, closed: bool) -> dict[str, Any]:
    """The narrowest schema of a value, so that as much as possible is forced."""
    match value:
        case bool():
            return {"type": "boolean"}
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case list():
            schemas = [schema_of(item, closed) for item in value]
            return {
                "type": "array",
                "items": schemas[0] if schemas and schemas.count(schemas[0]) == len(schemas) else {},
            }
    properties = {key: schema_of(item, closed) for key, item in value.items()}
    closing = {"additionalProperties": False} if closed else {}
    return {"type": "object", "properties": properties, "required": list(properties), **closing}


@st.composite
def offers(draw: st.DrawFn, arguments: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """The name of a tool that takes the arguments, and tools among which it is."""
    name, closed = draw(st.sampled_from(NAMES)), draw(st.booleans())
    schema = schema_of(arguments, closed)
    optional = draw(st.sets(st.sampled_from(KEYS)))
    schema["required"] = [key for key in schema["required"] if key not in optional]
    for key in draw(st.sets(st.sampled_from(KEYS))) - schema["properties"].keys():
        schema["properties"][key] = draw(st.sampled_from([{"type": "string"}, {"type": "integer"}, {}]))
    others = draw(st.sets(st.sampled_from(NAMES))) - {name}
    tools = [{"name": name, "parameters": schema}, *({"name": other, "parameters": {}} for other in sorted(others))]
    return name, [{"type": "function", "function": {"description": "", **tool}} for tool in tools]


def values(texts: st.SearchStrategy[str], keys: st.SearchStrategy[str], has_null: bool = True) -> Any:
    floats = st.floats(allow_nan=False, allow_infinity=False)
    scalars = st.one_of(st.booleans(), st.integers(), floats, texts, *([st.none()] if has_null else []))
    return st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=5
    )


def plain_values(family: str) -> Any:
    # Early templates of Gemma 4 write null as Python does, which their own parser cannot read.
    return values(st.text(LETTERS), st.sampled_from(KEYS), has_null=not family.startswith("gemma4"))


QUICK = settings(
    max_examples=min(25, settings.default.max_examples), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@pytest.mark.parametrize("family", EVERY_FAMILY)
@given(data=st.data())
@QUICK
def test_no_byte_of_a_value_is_in_a_forced_token_whatever_the_family(family: str, data: st.DataObject) -> None:
    arguments = data.draw(st.dictionaries(st.sampled_from(KEYS), plain_values(family), max_size=4))
    name, tools = data.draw(offers(arguments))
    turn = writer(family).turn(name, arguments)
    is_forced = writer(family).is_forced(turn, tools)
    assert any(is_forced) or not arguments
    # The end of a text or a number is a choice as well, so one more byte is looked at.
    for found in re.finditer(f"[{LETTERS}]+(?s:.)|[-+.0-9]*[0-9]e?(?s:.)|{WORDS}", turn):
        start, end = len(turn[: found.start()].encode()), len(turn[: found.end()].encode())
        assert not any(is_forced[start:end]), found[0]


def written(value: Any, comma: str = ", ", colon: str = ": ") -> list[tuple[str, bool]]:
    """JSON in parts, each with whether it belongs to a value: the quote that opens a text does not, its end does."""
    if isinstance(value, str):
        return [('"', False), (json.dumps(value, ensure_ascii=False)[1:], True)]
    if not isinstance(value, (dict, list)):
        return [(json.dumps(value), True)]
    parts = [("{" if isinstance(value, dict) else "[", False)]
    for i, item in enumerate(value):
        parts += [(comma, False)] if i else []
        if isinstance(value, dict):
            parts += [(json.dumps(item, ensure_ascii=False) + colon, False), *written(value[item])]
        else:
            parts += written(item)
    return [*parts, ("}" if isinstance(value, dict) else "]", False)]


TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text('"{}[],:\\ \nan', max_size=12),
    st.sampled_from(['", "', "}}", '"}}\n', '{"name": "look", "arguments": {', "\\", "\\u0022", " to=functions.look"]),
    st.lists(st.sampled_from(["```", "```json\n", "}", "\n", '{"name": "', " "]), max_size=6).map("".join),
)


@pytest.mark.parametrize("family", JSON_FAMILIES)
@given(data=st.data())
@QUICK
def test_any_json_survives_and_stays_a_choice(family: str, data: st.DataObject) -> None:
    arguments = data.draw(st.dictionaries(TEXTS | st.sampled_from(KEYS), values(TEXTS, TEXTS), max_size=4))
    assume(not any(literal in json.dumps(arguments) for literal in writer(family).vocabulary.added))
    name, tools = data.draw(offers(arguments))
    turn, parts = writer(family).turn(name, arguments), written(arguments)
    before, found, _ = turn.partition("".join(part for part, _ in parts))
    assert found
    assert writer(family).read(turn, tools) == [(name, arguments)]
    is_forced = writer(family).is_forced(turn, tools)
    assert any(is_forced)
    start = len(before.encode())
    for part, is_value in parts:
        end = start + len(part.encode())
        assert not (is_value and any(is_forced[start:end])), part
        start = end


@pytest.mark.parametrize("family", EVERY_FAMILY)
@given(data=st.data())
@QUICK
def test_where_a_byte_is_forced_any_other_spoils_the_call(family: str, data: st.DataObject) -> None:
    arguments = data.draw(st.dictionaries(st.sampled_from(KEYS), plain_values(family), max_size=4))
    name, tools = data.draw(offers(arguments))
    turn = writer(family).turn(name, arguments)
    is_forced = writer(family).is_forced(turn, tools)
    starts = accumulate((len(character.encode()) for character in turn), initial=0)
    forced = [i for i, start in enumerate(starts) if i < len(turn) and is_forced[start]]
    assume(forced)
    where = data.draw(st.sampled_from(forced))
    other = data.draw(st.sampled_from('x"}{,: \n<>=0\\').filter(lambda other: other != turn[where]))
    assert not any(writer(family).is_forced(turn[:where] + other + turn[where + 1 :], tools))
    assert not any(writer(family).is_forced(turn[:where] + turn[where + 1 :], tools))


@pytest.mark.parametrize("family", EVERY_FAMILY)
@given(data=st.data())
@QUICK
def test_a_turn_that_breaks_off_has_nothing_forced(family: str, data: st.DataObject) -> None:
    arguments = data.draw(st.dictionaries(st.sampled_from(KEYS), plain_values(family), max_size=4))
    name, tools = data.draw(offers(arguments))
    writes = writer(family)
    ids = writes.ids(writes.turn(name, arguments))
    length = data.draw(st.integers(0, len(ids) - 1))
    assert TokenRole.FORCED not in writes.roles.roles(ids[:length], tools)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_6", "llama3_1", "gemma4", "qwen2_5_json"])
@given(data=st.data())
@settings(QUICK, max_examples=15)
def test_a_token_is_forced_if_all_its_bytes_are_however_the_text_is_cut(family: str, data: st.DataObject) -> None:
    arguments = data.draw(st.dictionaries(st.sampled_from(KEYS), plain_values(family), max_size=3))
    name, tools = data.draw(offers(arguments))
    pairs = ['"}', "}}", '",', " {", '{"', "_u", "al", 'a"', ":3", '":', ">\n", "\n<", "</", "ok"]
    letters = {"\n": "Ċ", " ": "Ġ"}
    merges = [
        tuple(letters.get(c, c) for c in pair) for pair in data.draw(st.lists(st.sampled_from(pairs), unique=True))
    ]
    cut = Writer(family, merges=tuple(merges) or (("q", "q"),))
    turn = cut.turn(name, arguments)
    by_byte = writer(family).is_forced(turn, tools)
    start, ids = 0, cut.ids(turn)
    for role, piece in zip(cut.roles.roles(ids, tools), cut.vocabulary.pieces(ids), strict=True):
        assert (role is TokenRole.FORCED) == all(by_byte[start : start + len(piece)])
        start += len(piece)


def test_a_set_of_syntax_tokens_would_mask_values() -> None:
    # Why the mask is not a list of token ids: the same tokens are syntax in one place and a value in another.
    writes = writer("qwen3")
    arguments = {"al": '{"a": [1, 2]}'}
    turn = writes.turn("look", arguments)
    tools = [{"type": "function", "function": {"name": "look", "parameters": schema_of(arguments, closed=True)}}]
    naive = {writes.tokenizer.convert_tokens_to_ids(letter) for letter in '{}[]":,'}
    start = turn.index('{\\"a')
    value = writes.ids(turn)[len(writes.ids(turn[:start])) :][: len('{\\"a\\": [1, 2]}')]
    assert naive & set(value)
    is_forced = writes.is_forced(turn, tools)
    assert not any(is_forced[start : start + len(value)])
    assert is_forced[turn.index('{"name')]
