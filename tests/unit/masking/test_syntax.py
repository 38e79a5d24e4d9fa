"""What is forced in a tool call, labelled by hand, byte by byte and token by token."""

import time
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
from data.golden_calls import GOLDENS, ONE, TIME, TWO, Golden, tool
from data.golden_tokens import SOURCES, load
from helpers.families import FAMILIES, end_of_turn_ids, family_tokenizer
from transformers import PreTrainedTokenizerFast

from mcp_grpo.masking.roles import SyntaxRoles
from mcp_grpo.masking.vocabulary import Vocabulary
from mcp_grpo.rollout import Renderer
from mcp_grpo.types import TokenRole


LETTERS = {TokenRole.FORCED: "f", TokenRole.CHOICE: "c", TokenRole.TRIGGER: "t", TokenRole.STRADDLING: "s"}
REAL = load()


@cache
def of_family(family: str) -> tuple[PreTrainedTokenizerFast, SyntaxRoles]:
    """A tokenizer with one token per byte and the family's control tokens."""
    tokenizer = family_tokenizer(family)
    return tokenizer, SyntaxRoles(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer))


@cache
def real(name: str, family: str) -> tuple[SyntaxRoles, Vocabulary]:
    """The tokens of a real tokenizer, with the template of a family."""
    tokenizer = REAL[name].tokenizer()
    tokenizer.chat_template = SOURCES[name].template(family)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in SOURCES[name].ends]
    return SyntaxRoles(tokenizer, end_of_turn_ids=ends), Vocabulary(tokenizer)


def by_definition(labels: bytes) -> str:
    """The role of a token, by the labels of its bytes."""
    if b"t" in labels:
        return "t"
    return {frozenset(b"f"): "f", frozenset(b"c"): "c", frozenset(b"fc"): "s"}[frozenset(labels)]


def labels_of(text: str, tokenizer: PreTrainedTokenizerFast, roles: SyntaxRoles, tools: Any) -> str:
    """A letter per byte, for a tokenizer with one token per byte: control tokens have as many as their texts."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = Vocabulary(tokenizer).pieces(ids)
    assert b"".join(pieces) == text.encode()
    return "".join(LETTERS[role] * len(piece) for role, piece in zip(roles.roles(ids, tools), pieces, strict=True))


@pytest.mark.parametrize("golden", GOLDENS, ids=lambda golden: golden.id)
def test_every_byte_is_what_it_was_labelled_by_hand(golden: Golden) -> None:
    assert labels_of(golden.text, *of_family(golden.family), golden.tools) == golden.labels.decode()


CUT = [(name, golden) for name, source in SOURCES.items() for golden in source.goldens()]


@pytest.mark.parametrize(("name", "golden"), CUT, ids=lambda part: getattr(part, "id", part))
def test_tokens_of_real_tokenizers_have_the_role_that_their_bytes_give_them(name: str, golden: Golden) -> None:
    roles, vocabulary = real(name, golden.family)
    ids, pieces = REAL[name].turns[golden.id], REAL[name].pieces
    assert b"".join(pieces[i] for i in ids) == SOURCES[name].text(golden).encode()
    assert vocabulary.pieces(ids) == [pieces[i] for i in ids]
    ends = accumulate((len(pieces[i]) for i in ids), initial=0)
    labels = SOURCES[name].labels(golden)
    expected = [by_definition(labels[start:end]) for start, end in pairwise(ends)]
    assert [LETTERS[role] for role in roles.roles(ids, golden.tools)] == expected


def shown(name: str, golden_id: str, tools: Any) -> list[str]:
    """Tokens of a golden call with the letters of their roles."""
    golden = next(golden for golden in GOLDENS if golden.id == golden_id)
    roles, vocabulary = real(name, golden.family)
    ids = REAL[name].turns[golden_id]
    return [
        f"{LETTERS[role]} {piece.decode()}"
        for role, piece in zip(roles.roles(ids, tools), vocabulary.pieces(ids), strict=True)
    ]


def lines(text: str) -> list[str]:
    return [line.replace("⏎", "\n").replace("␣", " ") for line in text.split()]


EXAMPLE = "qwen3: the only tool"


def test_the_example_of_the_design_by_qwen3_s_own_tokens() -> None:
    # Two tools, one of which allows other arguments than its own: 13 of 19 tokens of the call are forced.
    names = [tool("get_weather", {"city": {"type": "string"}}, "city"), TIME]
    assert shown("qwen3", EXAMPLE, names) == [
        "t <tool_call>",
        "f \n",
        'f {"',
        "f name",
        'f ":',
        'f  "',
        "c get",
        "s _weather",  # `_w` tells it from `get_time`
        'f ",',
        'f  "',
        "f arguments",
        'f ":',
        'f  {"',
        "s city",  # another argument could have come first
        'f ":',
        'f  "',
        "c Paris",
        's "}}\n',  # the value ends, and no other argument follows; the rest is forced
        "f </tool_call>",
        "c <|im_end|>",
    ]


@pytest.mark.parametrize(
    ("tools", "num_forced"),
    [
        ([tool("get_weather", {"city": {"type": "string"}}, "city"), TIME], 13),
        ([*ONE, TIME], 14),  # no other arguments: the key is forced, too
        (ONE, 16),  # no other tools: so is the name
        (
            [tool("get_weather", {"city": {"type": "string"}, "days": {}}, "city", additionalProperties=False), TIME],
            13,
        ),
    ],
)
def test_the_fewer_alternatives_the_more_is_forced(tools: Any, num_forced: int) -> None:
    assert [line[0] for line in shown("qwen3", EXAMPLE, tools)].count("f") == num_forced


def test_llama_s_own_tokens() -> None:
    assert shown("llama3_1", "llama3_1: two tools", TWO) == [
        't {"',
        "t name",
        't ":',
        't  "',
        "c get",
        "s _fore",
        "f cast",
        'f ",',
        'f  "',
        "f parameters",
        'f ":',
        'f  {"',
        "s city",
        'f ":',
        'f  "',
        "c Paris",
        's "}}',
        "c <|eot_id|>",
    ]


def test_gemma_s_own_tokens_without_control_tokens_for_calls() -> None:
    call = shown("gemma3", "qwen3: no arguments, because there are none", golden_tools("no arguments, because"))
    assert call == [
        "t <",
        "t tool",
        "t _",
        "t call",
        "t >",
        "f \n",
        'f {"',
        "f name",
        'f ":',
        'f  "',
        "s stop",
        'f ",',
        'f  "',
        "f arguments",
        'f ":',
        "f  {",
        "f }}",
        "f \n",
        "f </",
        "f tool",
        "f _",
        "f call",
        "f >",
        "c <eos>",
    ]


def golden_tools(shows: str) -> Any:
    return next(golden.tools for golden in GOLDENS if golden.shows.startswith(shows))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_s_format_is_understood(family: str) -> None:
    assert of_family(family)[1].is_supported


def test_a_format_of_no_known_kind_has_no_forced_tokens() -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = (
        "{% for m in messages %}{% for c in m.tool_calls %}{{ c.function.arguments | tojson }} -> {{ c.function.name }}"
        "<|im_end|>{% endfor %}{% endfor %}"
    )
    roles = SyntaxRoles(tokenizer, end_of_turn_ids=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    ids = tokenizer('<tool_call>{"city": "Paris"} -> get_weather<|im_end|>')["input_ids"]
    assert not roles.is_supported
    assert set(roles.roles(ids, ONE)) == {TokenRole.CHOICE}


FRAME = "{%- for m in messages -%}{{ m.content }}{%- if m.tool_calls -%}FORMAT<|im_end|>{%- endif -%}{%- endfor -%}"
CALLS = "{%- for c in m.tool_calls -%}CALL{%- endfor -%}"
NAME, ARGUMENTS = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"


@pytest.mark.parametrize(
    ("template", "marked"),
    [
        (
            CALLS.replace("CALL", f"<tool_call>{NAME}[ARGS]{ARGUMENTS}"),
            '‹<tool_call>›get_f«orecast[ARGS]{"»c«ity": "»Paris"}‹<tool_call>›get_t«ime[ARGS]{"»c«ity": "»Oslo"}',
        ),
        (
            "<tool_call>["
            + CALLS.replace(
                "CALL", f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}{{%- if not loop.last -%}}, {{% endif %}}'
            )
            + "]",
            '‹<tool_call>›«[{"name": "»get_f«orecast", "arguments": {"»c«ity": "»Paris"}«}»,« {"name": "»get_t«ime", "arguments":'
            ' {"»c«ity": "»Oslo"}«}»]',
        ),
        (
            "<tool_response>"
            + CALLS.replace("CALL", f"<tool_call>{NAME}<|im_start|>{ARGUMENTS}</tool_call>")
            + "</tool_response>",
            '<tool_response>‹<tool_call>›get_f«orecast<|im_start|>{"»c«ity": "»Paris"}«</tool_call>»</tool_response>',
        ),
    ],
    ids=["a trigger for each call", "a list of calls", "tokens around all calls"],
)
def test_a_format_is_derived_from_a_template_that_nobody_has_seen(template: str, marked: str) -> None:
    tokenizer = family_tokenizer("qwen3")
    tokenizer.chat_template = FRAME.replace("FORMAT", template)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    roles = SyntaxRoles(tokenizer, end_of_turn_ids=[end])
    golden = Golden("qwen3", "", TWO, marked + "<|im_end|>")
    assert labels_of(golden.text, tokenizer, roles, TWO) == golden.labels.decode()


def test_the_example_in_the_documentation_is_true() -> None:
    assert SyntaxRoles.__doc__ is not None
    marked = next(line.strip() for line in SyntaxRoles.__doc__.splitlines() if "«\\n" in line).replace("\\n", "\n")
    city = {"city": {"type": "string"}}
    tools = tuple(tool(name, city, "city", additionalProperties=False) for name in ("get_forecast", "get_time"))
    golden = Golden("qwen3", "", tools, marked)
    assert labels_of(golden.text, *of_family("qwen3"), golden.tools).replace("t", "c") == golden.labels.decode()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


def test_control_tokens_that_are_written_out_in_letters_open_no_call_and_spoil_the_turn() -> None:
    tokenizer, roles = of_family("qwen3")

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    end, letters = encode("<|im_end|>"), [i for character in CALL for i in encode(character)]
    assert tokenizer.decode(letters) == CALL
    assert set(roles.roles(letters + end, ONE)) == {TokenRole.CHOICE}
    assert TokenRole.FORCED in roles.roles(encode(CALL) + end, ONE)
    both = roles.roles(encode(CALL) + letters + end, ONE)  # parsers that look at the text find two calls
    assert set(both) == {TokenRole.TRIGGER, TokenRole.CHOICE}


def test_bytes_that_are_no_text_are_part_of_no_valid_call() -> None:
    tokenizer, roles = of_family("qwen3")
    ids = tokenizer(CALL + "<|im_end|>", add_special_tokens=False)["input_ids"]
    half = tokenizer("é", add_special_tokens=False)["input_ids"][:1]
    where = ids.index(tokenizer.convert_tokens_to_ids("P"))
    assert TokenRole.FORCED not in roles.roles(ids[:where] + half + ids[where:], ONE)


def test_a_value_that_is_nested_too_deeply_stops_nothing() -> None:
    anything = [tool("deep", {"x": {}}, "x")]
    text = '<tool_call>\n{"name": "deep", "arguments": {"x": ' + "[" * 5000 + "]" * 5000 + "}}\n</tool_call><|im_end|>"
    assert "f" not in labels_of(text, *of_family("qwen3"), anything)


def test_tools_of_the_same_name_in_another_task_are_others() -> None:
    tokenizer, roles = of_family("qwen3")
    narrow, wide = [*ONE], [tool("get_weather", {"city": {"type": "string"}}, "city")]
    counts = [labels_of(CALL + "<|im_end|>", tokenizer, roles, tools).count("f") for tools in (narrow, wide, narrow)]
    assert counts[0] == counts[2] > counts[1]


def test_the_prompt_may_have_opened_or_closed_the_reasoning() -> None:
    # With `enable_thinking=False` the prompt ends with an empty thought.
    tokenizer = family_tokenizer("qwen3_6")
    ends = end_of_turn_ids("qwen3_6", tokenizer)
    call = "<tool_call>\n<function=list>\n</function>\n</tool_call><|im_end|>"
    for kwargs, is_call in (({}, False), ({"enable_thinking": False}, True)):
        roles = SyntaxRoles(tokenizer, end_of_turn_ids=ends, chat_template_kwargs=kwargs)
        assert ("f" in labels_of(call, tokenizer, roles, [tool("list", {}, additionalProperties=False)])) == is_call


def test_a_call_is_read_although_the_prompt_ends_with_an_empty_thought() -> None:
    tokenizer = family_tokenizer("qwen3")
    ends = end_of_turn_ids("qwen3", tokenizer)
    roles = SyntaxRoles(tokenizer, end_of_turn_ids=ends, chat_template_kwargs={"enable_thinking": False})
    assert labels_of(CALL + "<|im_end|>", tokenizer, roles, ONE) == labels_of(
        CALL + "<|im_end|>", *of_family("qwen3"), ONE
    )
    assert "f" in labels_of(CALL + "<|im_end|>", tokenizer, roles, ONE)


def test_a_large_batch_takes_little_time() -> None:
    names = [f"server_{i}_get_weather" for i in range(20)]
    tools = [tool(name, {"city": {"type": "string"}, "days": {"type": "integer"}}, "city") for name in names]
    roles, _ = real("qwen3", "qwen3")
    call = REAL["qwen3"].turns[EXAMPLE]
    word = call[6]
    turn = [word] * (2000 - len(call)) + call
    tools[0]["function"]["name"] = "get_weather"
    start = time.process_time()
    for _ in range(512):
        found = roles.roles(turn, tools)
    assert time.process_time() - start < 2  # 0.2 s on a core of its own
    assert len(found) == 2000
    assert TokenRole.FORCED in found


@cache
def renderer_of(family: str) -> Renderer:
    tokenizer = family_tokenizer(family)
    return Renderer(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer))


@pytest.mark.parametrize("golden", [g for g in GOLDENS if b"f" in g.labels], ids=lambda golden: golden.id)
def test_what_has_forced_tokens_is_read_as_calls_by_the_rollout(golden: Golden) -> None:
    renderer = renderer_of(golden.family)
    prompt = renderer.prompt_ids([{"role": "user", "content": "question"}], golden.tools)
    ids = renderer.tokenizer(golden.text, add_special_tokens=False)["input_ids"]
    parsed = renderer.parse(prompt, ids, golden.tools)
    assert parsed.malformed is None
    assert parsed.calls
    assert {call.name for call in parsed.calls} <= {offered["function"]["name"] for offered in golden.tools}
