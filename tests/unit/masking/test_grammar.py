"""Roles by grammar: what the tools' schemas force, and nothing else, is syntax."""

import os
import random
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import trl
from helpers.families import end_of_turn_ids, family_tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from mcp_grpo.masking.grammar import TurnGrammars
from mcp_grpo.masking.roles import GrammarRoles
from mcp_grpo.types import TokenRole


LETTERS = {
    TokenRole.CHOICE: ".",
    TokenRole.TRIGGER: "!",
    TokenRole.STRADDLING: "/",
    TokenRole.FORCED: "_",
}


def tool(name: str, properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
        **more,
    }
    return {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}


TEXT = {"type": "string"}
TOOLS = [
    tool("get_weather", {"city": TEXT}),
    tool("get_time", {"zone": TEXT, "mode": {"enum": ["utc", "local"]}, "exact": {"type": "boolean"}}, ["zone"]),
    tool("move", {"to": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}}),
    tool("list", {}),
]


def family_grammars(family: str, merges: tuple[tuple[str, str], ...] = ()) -> tuple[Any, TurnGrammars]:
    tokenizer = family_tokenizer(family, merges)
    return tokenizer, TurnGrammars(tokenizer, end_of_turn_ids=end_of_turn_ids(family, tokenizer))


TOKENIZER, GRAMMARS = family_grammars("qwen3")


def encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def marked(text: str, tokenizer: Any = TOKENIZER, grammars: TurnGrammars = GRAMMARS, tools: Any = TOOLS) -> str:
    """The roles of a turn, a letter per token."""
    return "".join(LETTERS[role] for role in GrammarRoles(grammars).roles(encoded(tokenizer, text), tools))


def shown(text: str, **kwargs: Any) -> list[str]:
    """The runs of a turn that are forced, at one byte per token."""
    tokens = [TOKENIZER.decode([i]) for i in encoded(TOKENIZER, text)]
    runs = groupby(zip(tokens, marked(text, **kwargs), strict=True), key=lambda pair: pair[1])
    return ["".join(token for token, _ in run) for role, run in runs if role == "_"]


def call(arguments: str, name: str = "get_weather") -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


PARIS = call('{"city": "Paris"}') + "<|im_end|>"
HEAD = ['\n{"name": "', "et_"]


def test_what_the_schemas_leave_open_is_a_choice() -> None:
    assert shown(PARIS) == [*HEAD, 'eather", "arguments": {"city": "', "}}\n</tool_call>"]


def test_the_opening_of_a_call_is_a_trigger_and_the_end_of_a_turn_a_choice() -> None:
    roles = marked(PARIS)
    assert roles[0] == "!"
    assert roles.count("!") == 1
    assert roles[-1] == "."


@pytest.mark.parametrize(
    ("text", "forced"),
    [
        (call('{"zone": "é\\n\\"q\\""}', "get_time"), [*HEAD, 'ime", "arguments": {"zone": "', "}\n</tool_call>"]),
        (
            call('{"zone": "a", "mode": "utc"}', "get_time"),
            [*HEAD, 'ime", "arguments": {"zone": "', ' "', 'ode": "', 'tc"', "}\n</tool_call>"],
        ),
        (
            call('{"zone": "a", "exact": true}', "get_time"),
            [*HEAD, 'ime", "arguments": {"zone": "', ' "', 'xact": ', "rue}}\n</tool_call>"],
        ),
        (
            call('{"to": {"x": -7}}', "move"),
            ['\n{"name": "', 'ove", "arguments": {"to": {"x": ', "}}\n</tool_call>"],
        ),
        (call("{}", "list"), ['\n{"name": "', 'ist", "arguments": {}}\n</tool_call>']),
    ],
    ids=["escapes and unicode", "enum", "optional", "nested", "no arguments"],
)
def test_forced_runs_of_other_calls(text: str, forced: list[str]) -> None:
    assert shown(text + "<|im_end|>") == forced


def test_free_text_and_reasoning_are_choices() -> None:
    opening = "<think>\nParis? I'd call get_weather.\n</think>\n\nLet me see.\n"
    assert marked(opening + PARIS) == "." * len(encoded(TOKENIZER, opening)) + marked(PARIS)


def test_every_call_of_a_turn_has_its_trigger() -> None:
    first, second = call('{"city": "Paris"}'), call("{}", "list")
    roles = marked(f"{first}\n{second}<|im_end|>")
    split = len(encoded(TOKENIZER, first))
    assert roles[: split + 2] == marked(f"{first}<|im_end|>")[:-1] + ".!"  # to go on is a choice
    assert roles[split + 1 :] == marked(f"{second}<|im_end|>")


@pytest.mark.parametrize(
    "text",
    [
        call('{"town": "Paris"}'),
        call('{"city": 3}'),
        call('{"city": "Paris", "country": "France"}'),
        call('{"mode": "utc", "zone": "a"}', "get_time"),
        call('{"city": "Paris"}', "get_rain"),
        call('{"city":"Paris"}'),
        call('{"city": "Paris"')[: -len("}\n</tool_call>")],
        call('{"city": "Paris"}') + " Done.",
        "<think>\n" + call('{"city": "Paris"}'),
        "<tool_call>\nget_weather(Paris)\n</tool_call>",
        call('{"city": "Paris"}') + "\n" + call('{"city": 3}'),
    ],
    ids=[
        "unknown argument",
        "wrong type",
        "one argument too many",
        "another order",
        "unknown tool",
        "other whitespace",
        "broken off",
        "text after the call",
        "call in reasoning",
        "no JSON",
        "second call wrong",
    ],
)
def test_a_turn_that_the_grammar_does_not_accept_has_no_forced_tokens(text: str) -> None:
    assert set(marked(text + "<|im_end|>")) == {".", "!"}


def test_a_turn_that_ran_out_of_tokens_has_no_forced_tokens() -> None:
    assert set(marked(PARIS.removesuffix("<|im_end|>"))) == {".", "!"}


def test_a_token_that_the_tokenizer_does_not_know_spoils_the_turn_and_nothing_else() -> None:
    ids = encoded(TOKENIZER, PARIS)
    for position in (0, 9):
        spoilt = [*ids[:position], len(TOKENIZER) + 7, *ids[position:]]
        assert TokenRole.FORCED not in GrammarRoles(GRAMMARS).roles(spoilt, TOOLS)


def test_a_call_spelt_without_its_control_tokens_has_no_forced_tokens() -> None:
    pieces = "<", "tool_call>", PARIS.removeprefix("<tool_call>")
    ids = [i for piece in pieces for i in encoded(TOKENIZER, piece)]
    assert TOKENIZER.decode(ids) == PARIS
    assert set(GrammarRoles(GRAMMARS).roles(ids, TOOLS)) == {TokenRole.CHOICE}


def test_at_one_byte_per_token_forced_is_where_the_grammar_allows_one_token() -> None:
    calls = call('{"zone": "a", "exact": true}', "get_time"), call('{"to": {"x": 12}}', "move")
    ids = [*encoded(TOKENIZER, "\n".join(calls)), TOKENIZER.eos_token_id]
    matcher = GRAMMARS.grammar(TOOLS).matcher()
    for token, role in zip(ids, GrammarRoles(GRAMMARS).roles(ids, TOOLS), strict=True):
        num_allowed = sum(byte.bit_count() for byte in matcher.compute_bitmask())
        if role in (TokenRole.FORCED, TokenRole.CHOICE) and token != TOKENIZER.eos_token_id:
            assert (num_allowed == 1) == (role is TokenRole.FORCED)
        assert matcher.consume_token(token)


@pytest.mark.parametrize("seed", range(8))
def test_how_the_bytes_are_cut_into_tokens_changes_no_role(seed: int) -> None:
    rng = random.Random(seed)
    text = PARIS.removesuffix("<|im_end|>").removeprefix("<tool_call>").removesuffix("</tool_call>")
    symbols = [TOKENIZER.convert_ids_to_tokens(i) for i in encoded(TOKENIZER, text)]
    pairs = {(symbols[i], symbols[i + 1]) for i in rng.sample(range(len(symbols) - 1), 20)}
    tokenizer, grammars = family_grammars("qwen3", tuple(sorted(pairs)))
    ids, bytewise, start = encoded(tokenizer, PARIS), marked(PARIS), 0
    for token, role in zip(ids, marked(PARIS, tokenizer, grammars), strict=True):
        is_control = token in tokenizer.get_added_vocab().values()
        covered = bytewise[start : start + (1 if is_control else len(tokenizer.decode([token])))]
        start += len(covered)
        begins_forced = "/" if covered[0] == "_" else "."
        assert role == (covered[0] if len(set(covered)) == 1 else begins_forced)
    assert start == len(bytewise) > len(ids)


@pytest.mark.parametrize(
    ("family", "text", "roles"),
    [
        (
            "llama3_2",
            'So: {"name": "list", "parameters": {}}<|eot_id|>',
            "...." + "!" * 8 + "__" + "." + "_" * len('ist", "parameters": {}}') + ".",
        ),
        (
            "gptoss",
            " to=functions.list<|channel|>commentary json<|message|>{}<|call|>",
            "." + "!" * 13 + "." + "___" + "_" * (1 + len("commentary json") + 1) + "__" + ".",
        ),
        (
            "qwen3_5_think",
            "Hm\n</think>\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
            "</function>\n</tool_call><|im_end|>",
            "..."
            + "..."
            + "!"
            + "_" * len("\n<function=")
            + "."
            + "___"
            + "."
            + "_" * (len("weather>\n<parameter=city>\n") - 1)
            + "." * len("Oslo\n</parameter>")
            + "_" * (len("\n</function>\n") + 1)
            + ".",
        ),
        (
            "glm4moe",
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n</tool_call><|observation|>",
            "!" + "." + "___" + "." + "_" * len("weather") + "_" * 8 + "." * 5 + "__" + ".",
        ),
    ],
    ids=["llama3_2", "gptoss", "qwen3_5_think", "glm4moe"],
)
def test_other_families_have_their_own_syntax(family: str, text: str, roles: str) -> None:
    tokenizer, grammars = family_grammars(family)
    assert marked(text, tokenizer, grammars) == roles


def test_an_argument_that_looks_like_the_opening_of_a_call_opens_none() -> None:
    tokenizer, grammars = family_grammars("llama3_2")
    text = '{"name": "greet", "parameters": {"name": "Ann"}}<|eot_id|>'
    roles = marked(text, tokenizer, grammars, [tool("greet", {"name": TEXT})])
    assert roles == "!" * 8 + "_" * len(' "greet", "parameters": {"name": "') + "." * 4 + "__" + "."


def test_a_call_at_the_beginning_of_a_message_is_opened_although_an_earlier_one_mentions_it() -> None:
    tokenizer, grammars = family_grammars("gptoss")
    thought = "<|channel|>analysis<|message|>Call to=functions.list?<|end|>"
    start = len(encoded(tokenizer, thought + "<|start|>assistant "))
    text = thought + "<|start|>assistant to=functions.list<|channel|>commentary json<|message|>{}<|call|>"
    assert marked(text, tokenizer, grammars)[start:].startswith("!" * len("to=functions.") + ".")


def test_a_tag_opens_a_call_wherever_it_is_written_out_in_letters() -> None:
    tokenizer = family_tokenizer("llama3_2")  # has no control tokens for calls
    tokenizer.chat_template = TOKENIZER.chat_template.replace("<|im_end|>", "<|eot_id|>")
    grammars = TurnGrammars(tokenizer, end_of_turn_ids=end_of_turn_ids("llama3_2", tokenizer))
    roles = marked(call("{}", "list") + "\n" + call("{}", "list") + "<|eot_id|>", tokenizer, grammars)
    assert roles.count("!") == 2 * len("<tool_call>")
    assert roles.count("_") > 2 * len("</tool_call>")


def test_a_set_of_tools_is_compiled_once() -> None:
    _, grammars = family_grammars("qwen3")
    roles = GrammarRoles(grammars)
    for city in range(100):
        roles.roles(encoded(TOKENIZER, call(f'{{"city": "{city}"}}') + "<|im_end|>"), TOOLS)
    assert grammars.num_compiled == 1
    roles.roles(encoded(TOKENIZER, PARIS), [TOOLS[0]])
    roles.roles(encoded(TOKENIZER, PARIS), list(reversed(TOOLS)))
    assert grammars.num_compiled == 3


def test_a_turn_without_a_call_is_not_walked() -> None:
    _, grammars = family_grammars("qwen3")
    assert set(marked("Just text.<|im_end|>", grammars=grammars)) == {"."}
    assert grammars.num_compiled == 0


QWEN3 = os.environ.get("MCP_GRPO_QWEN3_TOKENIZER")


@pytest.fixture(scope="module")
def qwen3() -> tuple[Any, TurnGrammars]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(QWEN3)
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return tokenizer, TurnGrammars(tokenizer, end_of_turn_ids=[151645, 151643])


@pytest.mark.skipif(QWEN3 is None, reason="MCP_GRPO_QWEN3_TOKENIZER names no folder with Qwen3's tokenizer")
@pytest.mark.parametrize(
    ("tools", "roles"),
    [
        (TOOLS, "!_____./________.._."),  # `get` is common to two tools, so `_weather` is syntax and a choice
        ([TOOLS[0], *TOOLS[2:]], "!_____._________.._."),
    ],
    ids=["two tools begin alike", "the first token tells the tools apart"],
)
def test_roles_of_a_call_in_qwen3_s_own_tokens(qwen3: Any, tools: Any, roles: str) -> None:
    tokenizer, grammars = qwen3
    assert len(encoded(tokenizer, PARIS)) == 20
    assert marked(PARIS, tokenizer, grammars, tools) == roles
