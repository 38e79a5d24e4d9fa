"""Formats of tool calls, and grammars of turns that are made of them: what a grammar allows, the parser reads."""

import logging
import random
import re
from typing import Any

import pytest
from helpers.families import FAMILIES, FENCED_FAMILIES, end_of_turn_ids, family_tokenizer

from mcp_grpo.errors import CatalogError, SettingsError, TemplateError
from mcp_grpo.masking import grammar as grammar_module
from mcp_grpo.masking.formats import CallSyntax, detect_syntax
from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.rollout import Renderer
from mcp_grpo.tools.arguments import compiled, problems


REFUSED = ("lfm2", "gemma4")
SUPPORTED = [*(family for family in FAMILIES if not family.startswith(REFUSED)), *FENCED_FAMILIES]

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


def family_format(family: str, **kwargs: Any) -> CallSyntax:
    tokenizer = family_tokenizer(family)
    return detect_syntax(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer), **kwargs)


def shown(found: CallSyntax) -> dict[str, Any]:
    """A format, its control tokens as texts."""
    return {
        part: found.spelling.shown(text)
        for source in (found, found.notation)
        for part in getattr(type(source), "__slots__", ())
        if isinstance(text := getattr(source, part), str)
    }


def family_grammars(family: str, **kwargs: Any) -> TurnGrammars:
    tokenizer = family_tokenizer(family)
    return TurnGrammars(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer), **kwargs)


def test_json_in_tags_is_found_out() -> None:
    assert shown(family_format("qwen3")) == {
        "trigger": "<tool_call>",
        "before_name": '\n{"name": "',
        "after_name": '", "arguments": {',
        "key_quote": '"',
        "colon": ": ",
        "comma": ", ",
        "quote": '"',
        "closing": "}\n</tool_call>",
        "between": "\n",
        "after_last": "",
        "header": "<|im_start|>assistant\n",
        "end": "<|im_end|>",
    }


def test_bare_json_is_found_out_and_has_one_call_a_turn() -> None:
    found = family_format("llama3_1")
    assert found.is_bare
    assert (found.trigger, found.notation.after_name) == ('{"name": "', '", "parameters": {')
    assert found.between is None


def test_tags_around_each_argument_are_found_out() -> None:
    found = family_format("qwen3_5_think")
    parts = shown(found)
    assert parts["trigger"] + parts["before_name"] == "<tool_call>\n<function="
    assert (parts["before_key"], parts["after_key"]) == (">\n<parameter=", ">\n")
    assert (parts["after_value"], parts["closing"]) == ("\n</parameter>", "\n</function>\n</tool_call>")
    assert found.reasoning.is_open


def test_what_the_template_is_told_decides_whether_a_turn_begins_in_reasoning() -> None:
    assert family_format("qwen3_6").reasoning.is_open
    assert not family_format("qwen3_6", chat_template_kwargs={"enable_thinking": False}).reasoning.is_open


# The first has control tokens for tags. To the second they are text, so that `<t` begins both.
@pytest.mark.parametrize("family", ["qwen3", "llama3_1"])
def test_the_opening_of_a_call_is_whole_although_the_prompt_goes_on_with_a_thought(family: str) -> None:
    tokenizer = family_tokenizer(family)
    template = family_tokenizer("qwen3").chat_template.replace("<|im_end|>", tokenizer.eos_token)
    found, told = (
        detect_syntax(
            tokenizer,
            end_of_turn_ids=[tokenizer.eos_token_id],
            chat_template=template,
            chat_template_kwargs={"enable_thinking": is_thinking},
        )
        for is_thinking in (True, False)
    )
    assert told.spelling.shown(told.trigger) == found.spelling.shown(found.trigger) == "<tool_call>"


def test_a_turn_that_ends_with_the_reply_s_first_token_ends_there() -> None:
    assert shown(family_format("glm4moe"))["end"] == "<|observation|>"


def test_what_follows_the_last_call_is_no_part_of_a_call() -> None:
    found = family_format("nemotron_3_nano")
    assert shown(found)["closing"] == "\n</function>\n</tool_call>"
    assert (found.between, found.after_last) == ("\n", "\n")


def tokenizer_with(call: str, before: str = "", after: str = "") -> Any:
    """A tokenizer whose chat template writes calls like this, with something around all of them."""
    calls = "{%- for call in message.tool_calls %}{%- set call = call.function %}" + call + "{%- endfor %}"
    turn = "{%- if message.tool_calls %}" + before + calls + after + "{%- endif %}"
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{%- for message in messages %}{{ message.role }}: {{ message.content }}" + turn + "<|im_end|>{%- endfor %}"
        "{%- if add_generation_prompt %}{{ 'assistant: ' }}{%- endif %}"
    )
    return tokenizer


NAME, ARGUMENTS = "{{ call.name }}", "{{ call.arguments | tojson }}"
LIST_ITEM = '{"name": "' + NAME + '", "arguments": ' + ARGUMENTS + "}{%- if not loop.last -%}, {% endif %}"


def test_a_format_of_no_known_family_is_found_out_too() -> None:
    tokenizer = tokenizer_with(f"[TOOL_CALLS]{NAME}[ARGS]{ARGUMENTS}")
    found = detect_syntax(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    assert (found.trigger, found.notation.after_name, found.notation.closing) == ("[TOOL_CALLS]", "[ARGS]{", "")
    assert found.between == ""


def test_of_several_marks_before_a_name_the_first_that_every_call_has_opens_it() -> None:
    call = f"<tool_call>function<|im_start|>{NAME}\n{ARGUMENTS}</tool_call>"
    tokenizer = tokenizer_with(call, "<tool_response>", "</tool_response>")
    parts = shown(detect_syntax(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id]))
    assert (parts["trigger"], parts["before_name"]) == ("<tool_call>", "function<|im_start|>")
    assert (parts["closing"], parts["between"], parts["after_last"]) == ("</tool_call>", "", "</tool_response>")


@pytest.mark.parametrize(
    ("tokenizer", "turn"),
    [
        (tokenizer_with(LIST_ITEM, "<tool_call>[", "]"), "<tool_call>[{}, {}]<|im_end|>"),
        (tokenizer_with(LIST_ITEM, "[", "]"), "[{}, {}]<|im_end|>"),
        (
            tokenizer_with("<tool_call>" + LIST_ITEM.partition("{%-")[0], "<tool_response>", "</tool_response>"),
            "<tool_response><tool_call>{}<tool_call>{}</tool_response><|im_end|>",
        ),
    ],
    ids=["a list of calls", "a bare list of calls", "tokens around all calls"],
)
def test_a_grammar_has_every_call_of_a_turn(tokenizer: Any, turn: str) -> None:
    grammars = TurnGrammars(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])
    stop, weather = (
        f'{{"name": "{name}", "arguments": {arguments}}}'
        for name, arguments in (("stop", "{}"), ("get_weather", '{"city": "Oslo", "days": 3}'))
    )
    for calls, is_right in (((weather, stop), True), ((stop, weather), True), ((stop, weather[:-1]), False)):
        matcher = grammars.grammar(TOOLS).matcher()
        ids = tokenizer(turn.format(*calls), add_special_tokens=False)["input_ids"]
        assert (matcher.consume_tokens(ids) and matcher.is_accepting()) == is_right


def test_a_template_that_writes_no_plain_call_is_refused_with_its_own_words() -> None:
    tokenizer = tokenizer_with("{{ raise_exception('A call needs an id of 9 characters') }}")
    with pytest.raises(TemplateError, match=r"an id of 9 characters.*schema_mask"):
        detect_syntax(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])


def test_a_format_that_is_not_found_out_is_refused_with_what_it_looks_like_and_the_way_out() -> None:
    tokenizer = tokenizer_with(f"{ARGUMENTS} -> {NAME}")
    with pytest.raises(TemplateError, match=r'-> probetool.*schema_mask="off"'):
        detect_syntax(tokenizer, end_of_turn_ids=[tokenizer.eos_token_id])


@pytest.mark.parametrize("family", [family for family in FAMILIES if family.startswith(REFUSED)])
def test_formats_without_a_grammar_are_refused_with_what_they_look_like_and_the_way_out(family: str) -> None:
    with pytest.raises(TemplateError, match=r'name[({].*schema_mask="syntax"'):
        family_grammars(family)


def opening_of(found: CallSyntax) -> str:
    return found.spelling.shown(found.trigger + found.before_name)


def written_turn(grammars: TurnGrammars, tokenizer: Any, found: CallSyntax, rng: random.Random) -> list[int]:
    """A turn that calls a tool, with random tokens of those that the grammar allows."""
    opening = ("Hm.</think>" if found.reasoning.is_open else "Hm. ") + opening_of(found).lstrip()
    turn = tokenizer(opening, add_special_tokens=False)["input_ids"]
    matcher = grammars.grammar(TOOLS).matcher()
    assert matcher.consume_tokens(turn)
    # A text without quotes would go on for long: offer it its end now and then.
    closing = tokenizer(shown(found).get("after_value", ""), add_special_tokens=False)["input_ids"]
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
    turn = text[text.index(opening_of(found), text.index("question")) :]
    turn = "".join(turn.partition(found.spelling.shown(found.end))[:2])
    matcher = family_grammars(family).grammar(TOOLS).matcher()
    opened = "</think>" if found.reasoning.is_open else ""
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
