"""Formats of tool calls, and grammars of turns that are made of them: what a grammar allows, the parser reads."""

import logging
import random
import re
from typing import Any

import pytest
from helpers.families import FAMILIES, end_of_turn_ids, family_tokenizer

from mcp_grpo.errors import CatalogError, SettingsError, TemplateError
from mcp_grpo.rollout import Renderer
from mcp_grpo.rollout import grammar as grammar_module
from mcp_grpo.rollout.call_format import CallFormat, JsonArguments, TaggedArguments, call_format
from mcp_grpo.rollout.grammar import TurnGrammars
from mcp_grpo.tools.arguments import compiled, problems


REFUSED = ("lfm2", "gemma4")
SUPPORTED = [family for family in FAMILIES if not family.startswith(REFUSED)]

WORD = {"type": "string", "maxLength": 8}
MODE = {"enum": ["fast", "slow"], "type": "string"}


def tool(name: str, properties: dict[str, Any], required: list[str], **more: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": required, "additionalProperties": False, **more}
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TOOLS = [
    tool("get_weather", {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}}, ["city", "days"]),
    tool(
        "get_route",
        {
            "to": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
            "via": {"type": "array", "items": WORD, "maxItems": 2},
            "mode": {"$ref": "#/$defs/Mode"},
            "toll": {"type": "boolean"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        ["mode"],
        **{"$defs": {"Mode": MODE}},
    ),
    tool("stop", {}, []),
]


def family_format(family: str) -> CallFormat:
    tokenizer = family_tokenizer(family)
    return call_format(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer))


def family_grammars(family: str, **kwargs: Any) -> TurnGrammars:
    tokenizer = family_tokenizer(family)
    return TurnGrammars(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer), **kwargs)


def test_json_in_tags_is_found_out() -> None:
    assert family_format("qwen3") == CallFormat(
        opening='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        arguments=JsonArguments(item_separator=", ", key_separator=": "),
        closing="}\n</tool_call>",
        between="\n",
        end="<|im_end|>",
        in_reasoning=False,
    )


def test_bare_json_is_found_out_and_has_one_call_a_turn() -> None:
    found = family_format("llama3_1")
    assert (found.opening, found.after_name, found.closing) == ('{"name": "', '", "parameters": ', "}")
    assert found.between is None


def test_tags_around_each_argument_are_found_out() -> None:
    found = family_format("qwen3_5_think")
    assert found.opening == "<tool_call>\n<function="
    assert found.arguments == TaggedArguments(
        before_key="<parameter=", before_value=">\n", after_value="\n</parameter>\n"
    )
    assert found.closing == "</function>\n</tool_call>"
    assert found.in_reasoning


def test_what_the_template_is_told_decides_whether_a_turn_begins_in_reasoning() -> None:
    tokenizer = family_tokenizer("qwen3_6")
    ends = end_of_turn_ids("qwen3_6", tokenizer)
    assert call_format(tokenizer, end_of_turn_ids=ends).in_reasoning
    told = call_format(tokenizer, end_of_turn_ids=ends, chat_template_kwargs={"enable_thinking": False})
    assert not told.in_reasoning


def test_the_opening_of_a_call_is_whole_although_the_prompt_goes_on_with_a_thought() -> None:
    tokenizer = family_tokenizer("qwen3")
    ends = end_of_turn_ids("qwen3", tokenizer)
    told = call_format(tokenizer, end_of_turn_ids=ends, chat_template_kwargs={"enable_thinking": False})
    assert told.opening == call_format(tokenizer, end_of_turn_ids=ends).opening
    assert told.opening.startswith("<tool_call>")


def test_a_turn_that_ends_with_the_reply_s_first_token_ends_there() -> None:
    assert family_format("glm4moe").end == "<|observation|>"


def template(call: str) -> str:
    """A chat template that writes a call like this."""
    calls = "{%- for call in message.tool_calls %}{%- set call = call.function %}" + call + "{%- endfor %}"
    turn = "{{ message.role }}: {{ message.content }}" + calls + "<|im_end|>"
    return "{%- for message in messages %}" + turn + "{%- endfor %}"


def test_a_format_of_no_known_family_is_found_out_too() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = template("[TOOL_CALLS]{{ call.name }}[ARGS]{{ call.arguments | tojson }}")
    found = call_format(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    assert (found.opening, found.after_name, found.closing) == ("[TOOL_CALLS]", "[ARGS]", "")
    assert found.between == ""


def test_a_template_that_writes_no_plain_call_is_refused_with_its_own_words() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = template("{{ raise_exception('A call needs an id of 9 characters') }}")
    with pytest.raises(TemplateError, match=r"an id of 9 characters.*schema_mask"):
        call_format(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith(REFUSED)])
def test_other_formats_are_refused_with_what_they_look_like_and_the_way_out(family: str) -> None:
    with pytest.raises(TemplateError, match=r'probename.*schema_mask="syntax"'):
        family_format(family)


def written_turn(grammars: TurnGrammars, tokenizer: Any, found: CallFormat, rng: random.Random) -> list[int]:
    """A turn that calls a tool, with random tokens of those that the grammar allows."""
    opening = ("Hm.</think>" if found.in_reasoning else "Hm. ") + found.opening
    turn = tokenizer(opening, add_special_tokens=False)["input_ids"]
    matcher = grammars.grammar(TOOLS).matcher()
    assert matcher.consume_tokens(turn)
    # A text without quotes would go on for long: offer it its end now and then.
    after_value = getattr(found.arguments, "after_value", "")
    closing = tokenizer(after_value, add_special_tokens=False)["input_ids"]
    while not matcher.is_stopped():
        allowed = [i for i, byte in enumerate(matcher.compute_logit_bias()) if byte]
        step = [rng.choice(allowed)]
        if closing and rng.random() < 0.3 and matcher.validate_tokens(closing) == len(closing):
            step = closing
        assert matcher.consume_tokens(step)
        turn += step
    assert matcher.is_accepting()
    return turn


@pytest.mark.parametrize("family", SUPPORTED)
def test_whatever_a_grammar_allows_is_read_as_calls_that_fit_their_schemas(family: str) -> None:
    tokenizer = family_tokenizer(family)
    ends = end_of_turn_ids(family, tokenizer)
    renderer = Renderer(tokenizer, end_of_turn_ids=ends)
    prompt = renderer.prompt_ids([{"role": "user", "content": "question"}], TOOLS)
    grammars, found = TurnGrammars(tokenizer, end_of_turn_ids=ends), family_format(family)
    validators = {t["function"]["name"]: compiled(t["function"]["parameters"]) for t in TOOLS}
    called = set()
    for seed in range(25):
        turn = written_turn(grammars, tokenizer, found, random.Random(seed))
        parsed = renderer.parse(prompt, turn, TOOLS)
        assert parsed.calls, tokenizer.decode(turn)
        for call in parsed.calls:
            assert problems(validators[call.name], call.arguments) == [], tokenizer.decode(turn)
            called.add(call.name)
    assert called == set(validators)


@pytest.mark.parametrize("family", SUPPORTED)
def test_the_grammar_accepts_what_the_template_writes(family: str) -> None:
    tokenizer, found = family_tokenizer(family), family_format(family)
    arguments = {"city": 'Paris, the "town"\n<b>é</b>', "days": 3}
    calls = [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
    messages: list[Any] = [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", "tool_calls": calls * (1 if found.between is None else 2)},
        {"role": "tool", "name": "get_weather", "content": "rain"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    turn = text[text.index(found.opening, text.index("question")) :].partition(found.end)[0] + found.end
    matcher = family_grammars(family).grammar(TOOLS).matcher()
    opened = "</think>" if found.in_reasoning else ""
    assert matcher.consume_tokens(tokenizer(opened + turn, add_special_tokens=False)["input_ids"])
    assert matcher.is_accepting()


def test_without_tools_no_call_is_allowed() -> None:
    tokenizer, grammars = family_tokenizer("qwen3"), family_grammars("qwen3")
    assert grammars.grammar([]).matcher().consume_tokens(tokenizer("Hm.<|im_end|>")["input_ids"])
    assert not grammars.grammar([]).matcher().consume_tokens(tokenizer("Hm.<tool_call>")["input_ids"])


def test_a_schema_that_no_grammar_can_be_made_of_is_refused_by_the_tool_s_name() -> None:
    odd = tool("odd", {"word": {"type": "string", "pattern": "(?=a)b"}}, [])
    with pytest.raises(CatalogError, match=r"'odd'.*allowed_tools"):
        family_grammars("qwen3").grammar([*TOOLS, odd])


def test_a_schema_that_is_only_partly_enforced_is_named(caplog: pytest.LogCaptureFixture) -> None:
    loose = tool("loose", {"words": {"type": "array", "items": WORD, "uniqueItems": True}}, [])
    with caplog.at_level(logging.WARNING, logger="mcp_grpo"):
        family_grammars("qwen3").grammar([*TOOLS, loose])
    assert len(caplog.messages) == 1
    assert re.search(r"'loose'.*uniqueItems", caplog.messages[0])


def test_the_extra_is_named_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"mcp-grpo\[grammar\]"):
        family_grammars("qwen3")
