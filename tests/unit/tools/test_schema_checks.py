"""Whatever a server's schema asks for and the policy writes, a check ends in a short time."""

import math
import socket
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, validators

from mcp_grpo.tools.arguments import SchemaError, compiled, problems
from mcp_grpo.tools.catalog import Tool


DRAFT_7 = "http://json-schema.org/draft-07/schema#"
EVIL = r"^(\w+\s?)*$"
LONG = "a" * 5_000 + "!"


def shared_references(num_levels: int, **last: Any) -> dict[str, Any]:
    """A schema of which the number of parts to check doubles with each level."""
    levels = {str(i): {"allOf": [{"$ref": f"#/$defs/{i + 1}"}] * 2} for i in range(num_levels)}
    return {"$defs": levels | {str(num_levels): {"type": "object"}}, "$ref": "#/$defs/0", **last}


SLOW: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pattern": ({"properties": {"x": {"pattern": EVIL}}}, {"x": LONG}),
    "pattern of Python's own engine": ({"properties": {"x": {"pattern": r"^(a|aa)+$"}}}, {"x": "a" * 60 + "b"}),
    "pattern of another dialect": ({"properties": {"x": {"$schema": DRAFT_7, "pattern": EVIL}}}, {"x": LONG}),
    "names": ({"patternProperties": {EVIL: {"type": "string"}}, "additionalProperties": False}, {LONG: 1}),
    "name of names": ({"propertyNames": {"pattern": EVIL}}, {LONG: 1}),
    "references": (shared_references(30), {"x": 1}),
    "references that are evaluated": (shared_references(30, unevaluatedProperties=False), {"x": 1}),
    "lists": ({"properties": {"x": {"items": {"enum": list(range(10_000))}}}}, {"x": ["a"] * 100_000}),
    "items that cannot be sorted": (
        {"properties": {"x": {"uniqueItems": True}}},
        {"x": [{"a": i} for i in range(20_000)]},
    ),
    "alternatives": (
        {"properties": {"x": {"items": {"anyOf": [{"properties": {"a": {"const": i}}} for i in range(500)]}}}},
        {"x": [{"a": -1}] * 1_000},
    ),
}


@pytest.mark.parametrize("case", SLOW)
@pytest.mark.parametrize("coerces", [False, True])
def test_a_check_ends_in_time_and_what_was_too_slow_is_left_to_the_server(case: str, coerces: bool) -> None:
    schema, arguments = SLOW[case]
    tool = Tool(name="t", server="s", tool="t", description="", input_schema=schema, coerces=coerces)
    start = time.thread_time()
    for _ in range(5):
        prepared = tool.prepare(arguments)
    assert time.thread_time() - start < 2
    assert prepared.arguments == arguments


def test_who_gave_up_on_a_schema_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    schema, arguments = SLOW["references"]
    checker = compiled(schema)
    for _ in range(3):
        assert problems(checker, arguments) == []
    assert caplog.text.count("from now on only the server checks") == 1


def test_a_schema_that_is_too_large_to_read_is_none() -> None:
    schema = {"properties": {f"x{i}": {"type": "string", "description": "d" * 50} for i in range(5_000)}}
    start = time.thread_time()
    with pytest.raises(SchemaError, match="more than 100000 characters"):  # told before it is read
        compiled(schema)
    assert time.thread_time() - start < 1


def test_what_a_schema_refers_to_elsewhere_is_not_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        url = f"http://127.0.0.1:{elsewhere.getsockname()[1]}/schema"
        tool = Tool(name="t", server="s", tool="t", description="", input_schema={"properties": {"x": {"$ref": url}}})
        fetching = threading.Thread(target=tool.prepare, args=({"x": 1},), daemon=True)
        fetching.start()
        fetching.join(30)
        assert not fetching.is_alive()
        elsewhere.setblocking(False)
        with pytest.raises(BlockingIOError):
            elsewhere.accept()


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"pattern": "^a+$"}, "aab"),
        ({"pattern": "^a+$"}, "aaa"),
        (
            {"patternProperties": {"^x": {"type": "string"}}, "additionalProperties": False},
            {"x1": 1, "y": 2, "x2": "a"},
        ),
        (
            {"properties": {"y": {}}, "patternProperties": {"^x": {}}, "additionalProperties": {"type": "null"}},
            {"z": 1},
        ),
        ({"uniqueItems": True}, [1, True, 0, False]),
        ({"uniqueItems": True}, [1, 1.0]),
        ({"uniqueItems": True}, [{"a": [1, "1"]}, {"a": ["1", 1]}, "1"]),
        ({"uniqueItems": True}, [{"a": 1, "b": 2}, {"b": 2, "a": 1}]),
        ({"uniqueItems": False}, [1, 1]),
        ({"properties": {"a": {}}, "unevaluatedProperties": False}, {"a": 1, "b": 1}),
        ({"allOf": [{"properties": {"a": {}}}], "unevaluatedProperties": False}, {"a": 1}),
        ({"$defs": {"a": {"type": "string"}}, "items": {"$ref": "#/properties/x/$defs/a"}}, ["a", 1]),
        ({"$schema": DRAFT_7, "items": [{"type": "string"}], "additionalItems": False}, ["a", 1]),
        (
            {"items": {"$id": "urn:a", "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "string"}},
            [1],
        ),
    ],
)
def test_what_is_right_and_what_is_wrong_is_as_the_standard_says(schema: dict[str, Any], value: Any) -> None:
    whole = {"properties": {"x": schema}}
    if schema.get("$schema") == DRAFT_7:
        whole = {"$schema": DRAFT_7, "properties": {"x": {k: v for k, v in schema.items() if k != "$schema"}}}
        assert problems(compiled(whole), {"x": value})
    else:
        assert bool(problems(compiled(whole), {"x": value})) == (
            not Draft202012Validator(whole).is_valid({"x": value})
        )


PARTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["string", "integer", "number", "boolean", "null", "array"])},
    optional={"description": st.text(max_size=3), "enum": st.just([1]), "default": st.none()},
)
SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object"), "properties": st.dictionaries(st.sampled_from("abc"), PARTS)},
    optional={
        "required": st.lists(st.sampled_from("abcd"), unique=True, min_size=1),
        "additionalProperties": st.booleans() | PARTS,
        "$schema": st.sampled_from([DRAFT_7, "http://json-schema.org/draft-04/schema#"]),
        "maxProperties": st.just(1),
    },
)
VALUES = st.dictionaries(
    st.sampled_from("abcd"),
    st.none()
    | st.booleans()
    | st.integers(-2, 2)
    | st.sampled_from([1.0, 0.5, math.nan])
    | st.text(max_size=2)
    | st.just([]),
)


@settings(max_examples=4 * settings.default.max_examples)
@given(schema=SCHEMAS, value=VALUES)
def test_what_is_let_pass_at_a_glance_is_valid(schema: dict[str, Any], value: dict[str, Any]) -> None:
    checker, kind = compiled(schema), validators.validator_for(schema, default=Draft202012Validator)
    assert bool(checker.errors(value)) == (not kind(schema).is_valid(value))


def test_ordinary_arguments_are_checked_at_a_glance(monkeypatch: pytest.MonkeyPatch) -> None:
    checker = compiled({"type": "object", "properties": {"a": {"type": "integer", "title": "A"}}, "required": ["a"]})
    monkeypatch.setattr("mcp_grpo.tools.schema_checks._found", lambda *_: pytest.fail("It was looked at in detail."))
    assert checker.errors({"a": 1, "b": "more"}) == []


def test_a_pause_of_the_process_is_not_the_schema_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector's time counts as this thread's."""
    clock, pauses = time.thread_time, iter([0.0, 10.0])
    monkeypatch.setattr("mcp_grpo.tools.schema_checks.time.thread_time", lambda: clock() + next(pauses, 10.0))
    checker = compiled({"properties": {f"x{i}": {"type": ["string"]} for i in range(40)}})
    assert problems(checker, {"x0": None}) == ["`x0`: None is not of type 'string'"]
