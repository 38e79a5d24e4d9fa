"""What becomes of a call's arguments before they are sent: mended where that is wanted, checked, or refused."""

import json
from functools import reduce
from typing import Any

import mcp.types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.tools import Catalog, ServerConfig, Tool
from mcp_grpo.tools.arguments import compiled, problems


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "at": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def tool(schema: dict[str, Any] = WEATHER, **options: Any) -> Tool:
    listed = [mcp.types.Tool(name="weather", input_schema=schema)]
    config = ServerConfig(name="s", transport="stdio", command="server", **options)
    return Catalog.from_servers({"s": listed}, [config]).tools[0]


def refusal(arguments: dict[str, Any], schema: dict[str, Any] = WEATHER, **options: Any) -> str | None:
    return tool(schema, **options).prepare(arguments).refusal


def with_type(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A schema of one argument, `x`."""
    return {"type": "object", "properties": {"x": schema}, **more}


def test_arguments_that_fit_are_sent_as_they_are() -> None:
    arguments = {"city": "Bern", "days": 2, "unit": "C", "at": None}
    prepared = tool(argument_aliases={"town": "city"}, coerce_arguments=True).prepare(arguments)
    assert prepared.arguments is arguments
    assert (prepared.repairs, prepared.refusal) == ((), None)


def test_all_that_is_wrong_is_said_at_once_together_with_what_is_right() -> None:
    assert refusal({"city": 3, "day": 1}) == (
        "`city`: 3 is not of type 'string'; `days` is missing; `day` is not an argument; the arguments of `weather` "
        "are: city (string, required), days (integer, required), unit (one of 'C', 'F'), at (string or null)"
    )


def test_a_nested_problem_is_found_by_its_path() -> None:
    assert (refusal({"x": {}}, with_type({"type": "object", "required": ["b"]})) or "").startswith("`x.b` is missing;")


def test_a_tool_without_arguments_says_so() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    assert refusal({"x": 1}, schema) == "`x` is not an argument; `weather` takes no arguments"


def test_a_refusal_stays_short_however_long_the_arguments_are() -> None:
    many = {"type": "object", "properties": {"city": {"type": "integer"}}, "additionalProperties": False}
    refused = refusal({"city": "x" * 100_000} | {f"a{i}": 1 for i in range(100)}, many)
    assert refused is not None
    assert len(refused) < 1000


@pytest.mark.parametrize("value", ["\ud800", reduce(lambda inner, _: [inner], range(300), [])], ids=["half", "deep"])
@pytest.mark.parametrize("schema", [{}, {"properties": []}, {"properties": {"x": 1}, "required": 1}], ids=str)
def test_arguments_that_cannot_be_sent_are_refused(value: Any, schema: dict[str, Any]) -> None:
    assert "not valid JSON" in (refusal({"x": value}, schema) or "")


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no such type"},
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"properties": {"x": {"pattern": r"\p{L}"}}},
        {"$ref": "#"},
    ],
)
@pytest.mark.parametrize("coerce", [False, True])
def test_a_schema_that_cannot_be_used_does_not_blame_the_policy(schema: dict[str, Any], coerce: bool) -> None:
    prepared = tool(schema, coerce_arguments=coerce).prepare({"x": "y"})
    assert (prepared.arguments, prepared.refusal) == ({"x": "y"}, None)


def test_an_alias_is_taken_for_its_argument_and_the_policy_is_told() -> None:
    prepared = tool(argument_aliases={"town": "city"}).prepare({"town": "Bern", "days": 1})
    assert dict(prepared.arguments) == {"city": "Bern", "days": 1}
    assert prepared.repairs == ("`town` was taken for `city`",)
    assert prepared.refusal is None


@pytest.mark.parametrize("given", [{"city": "Bern", "town": "Rome"}, {"town": "Rome", "place": "Bern"}])
def test_an_alias_does_not_replace_what_is_there(given: dict[str, str]) -> None:
    prepared = tool(argument_aliases={"town": "city", "place": "city"}).prepare({**given, "days": 1})
    assert "is not an argument" in (prepared.refusal or "")
    assert len(prepared.arguments) == 3


def test_what_an_alias_cannot_mend_is_still_refused_with_what_it_could() -> None:
    prepared = tool(argument_aliases={"town": "city"}).prepare({"town": "Bern"})
    assert (prepared.refusal or "").startswith("`days` is missing;")
    assert prepared.repairs == ("`town` was taken for `city`",)


def test_nothing_is_coerced_unless_it_is_asked_for() -> None:
    prepared = tool().prepare({"city": "Bern", "days": "3"})
    assert "'3' is not of type 'integer'" in (prepared.refusal or "")
    assert prepared.arguments == {"city": "Bern", "days": "3"}


@pytest.mark.parametrize(
    ("schema", "written", "read", "words"),
    [
        ({"type": "integer"}, "3", 3, "as the integer 3, not as text"),
        ({"type": "number"}, "2.5", 2.5, "as the number 2.5, not as text"),
        ({"type": "boolean"}, "true", True, "as the boolean true, not as text"),
        ({"type": "boolean"}, "False", False, "as the boolean false, not as text"),
        ({"type": ["integer", "null"]}, "null", None, "as null, not as text"),
        ({"type": "object"}, '{"a": 1}', {"a": 1}, "as an object, not as text"),
        ({"type": "array"}, '["a"]', ["a"], "as a list, not as text"),
        ({"type": "string"}, 8001, "8001", 'as the text "8001", not as a number'),
        ({"type": "number"}, "1" * 100, int("1" * 100), "as a number, not as text"),
        ({"$ref": "#/$defs/count"}, "3", 3, "as the integer 3, not as text"),
        ({"anyOf": [{"$ref": "#/$defs/count"}, {"type": "null"}]}, "3", 3, "as the integer 3, not as text"),
        ({"type": "integer", "minimum": 2}, " 3 ", 3, "as the integer 3, not as text"),
    ],
)
def test_a_value_that_plainly_spells_what_is_asked_for_is_read_as_that_and_the_policy_is_told(
    schema: dict[str, Any], written: Any, read: Any, words: str
) -> None:
    weather = tool(with_type(schema, **{"$defs": {"count": {"type": "integer"}}}), coerce_arguments=True)
    prepared = weather.prepare({"x": written})
    assert prepared.refusal is None
    assert prepared.arguments == {"x": read}
    assert type(prepared.arguments["x"]) is type(read)
    assert prepared.repairs == (f"`x` was read {words}",)


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        ({"type": "integer"}, "three"),
        ({"type": "integer"}, "2.5"),
        ({"type": "integer"}, "007"),
        ({"type": "integer", "maximum": 2}, "3"),
        ({"type": "number"}, "NaN"),
        ({"type": "number"}, "1e999"),
        ({"type": "boolean"}, "yes"),
        ({"type": "boolean"}, 1),
        ({"type": "string"}, True),
        ({"type": "object"}, "[1]"),
        ({"type": "array"}, "[" * 300 + "]" * 300),
        ({"type": "array"}, "[" * 100_000),
        ({"enum": ["a"]}, '"a"'),
    ],
)
def test_a_value_that_spells_something_else_is_refused_as_it_was_written(schema: dict[str, Any], written: Any) -> None:
    prepared = tool(with_type(schema), coerce_arguments=True).prepare({"x": written})
    assert prepared.refusal is not None
    assert prepared.arguments == {"x": written}
    assert prepared.repairs == ()


@pytest.mark.parametrize("schema", [{"type": "string"}, {}, {"type": ["integer", "string"]}, {"enum": ["3", 3]}])
def test_a_value_that_is_valid_as_it_was_written_is_left_alone(schema: dict[str, Any]) -> None:
    weather = tool(with_type(schema, required=["y"]), coerce_arguments=True)
    assert weather.prepare({"x": "3"}).arguments == {"x": "3"}  # though the arguments as a whole are not valid


@pytest.mark.parametrize(
    ("schema", "written", "read", "num_read"),
    [
        ({"type": "array", "items": {"type": "integer"}}, [1, "2", "3"], [1, 2, 3], 2),
        ({"type": "array", "items": {"type": "string"}}, ["a", 2], ["a", "2"], 1),
        ({"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]}, ["1", "2"], [1, 2], 2),
        ({"type": "array", "items": {"anyOf": [{"type": "integer"}, {"maxLength": 1}]}}, ["1", "22"], ["1", 22], 1),
    ],
)
def test_items_of_lists_are_read_too(schema: dict[str, Any], written: list, read: list, num_read: int) -> None:
    prepared = tool(with_type(schema), coerce_arguments=True).prepare({"x": written})
    assert prepared.arguments == {"x": read}
    assert prepared.repairs == (f"{num_read} of the items of `x` were read as what they spell",)


def test_one_argument_that_cannot_be_read_does_not_keep_others_from_being_read() -> None:
    prepared = tool(coerce_arguments=True).prepare({"city": 3, "days": "soon"})
    assert prepared.arguments == {"city": "3", "days": "soon"}
    assert (prepared.refusal or "").startswith("`days`: 'soon' is not of type 'integer'; the arguments")


def test_an_alias_is_read_like_its_argument() -> None:
    prepared = tool(argument_aliases={"n": "days"}, coerce_arguments=True).prepare({"city": "Bern", "n": "3"})
    assert prepared.arguments == {"city": "Bern", "days": 3}
    assert prepared.repairs == ("`n` was taken for `days`", "`days` was read as the integer 3, not as text")


def test_the_arguments_of_the_policy_are_not_edited() -> None:
    arguments = {"town": "Bern", "days": "3"}
    tool(argument_aliases={"town": "city"}, coerce_arguments=True).prepare(arguments)
    assert arguments == {"town": "Bern", "days": "3"}


_TYPES = st.sampled_from(["integer", "number", "boolean", "null", "string", "object", "array"])
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(kinds=st.lists(_TYPES, min_size=1, max_size=3), value=_VALUES, is_spelt=st.booleans())
def test_whatever_is_sent_is_valid_and_whatever_was_valid_is_sent_unchanged(
    kinds: list[str], value: Any, is_spelt: bool
) -> None:
    schema = with_type({"type": kinds[0] if len(kinds) == 1 else sorted(set(kinds))})
    arguments = {"x": json.dumps(value) if is_spelt else value}
    prepared = tool(schema, coerce_arguments=True).prepare(arguments)
    was_valid = not problems(compiled(schema), arguments)
    assert (prepared.refusal is None) == (not problems(compiled(schema), prepared.arguments))
    assert bool(prepared.repairs) == (prepared.arguments != arguments)
    assert not (was_valid and prepared.repairs)


@pytest.mark.parametrize("text", ['{"days": NaN}', '{"days": 1e999}', '{"days": -Infinity}'])
def test_a_number_that_json_does_not_have_is_the_policy_s_fault_and_not_sent_as_null(text: str) -> None:
    assert "not valid JSON" in str(refusal({"city": "Bern", **json.loads(text)}))


def test_a_number_that_cannot_be_checked_is_left_to_the_server() -> None:
    assert refusal({"x": 10**400}, with_type({"type": "number", "multipleOf": 0.5})) is None
