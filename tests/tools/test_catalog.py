import logging
from collections.abc import Callable
from functools import reduce
from typing import Any

import mcp.types
import pytest

from mcp_grpo.errors import CatalogError
from mcp_grpo.tools import Catalog, Tool
from mcp_grpo.types import Task


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


def listed(*names: str, schema: dict[str, Any] | None = None) -> list[mcp.types.Tool]:
    return [mcp.types.Tool(name=name, description=f"does {name}", input_schema=schema or {}) for name in names]


def catalog_of(**servers: list[str]) -> Catalog:
    return Catalog.from_servers({server: listed(*names) for server, names in servers.items()})


def weather(schema: dict[str, Any] = WEATHER) -> Tool:
    return Catalog.from_servers({"s": listed("weather", schema=schema)}).tools[0]


def test_a_tool_is_shown_as_chat_templates_take_it() -> None:
    assert weather().schema == {
        "type": "function",
        "function": {"name": "weather", "description": "does weather", "parameters": WEATHER},
    }


def test_unique_names_stay_bare_and_colliding_ones_name_their_server() -> None:
    catalog = catalog_of(a=["read", "list"], b=["read", "write"])
    assert [tool.name for tool in catalog.tools] == ["a__read", "list", "b__read", "write"]
    assert [tool.tool for tool in catalog.tools] == ["read", "list", "read", "write"]


def test_names_are_made_of_what_prompts_allow() -> None:
    assert [tool.name for tool in catalog_of(**{"my server": ["a.b", "read"], "b": ["read"]}).tools] == [
        "a_b",
        "my_server__read",
        "b__read",
    ]


@pytest.mark.parametrize("servers", [{"a": ["read", "read"]}, {"a b": ["x"], "a.b": ["x"]}])
def test_a_name_that_would_mean_two_tools_is_refused(servers: dict[str, list[str]]) -> None:
    with pytest.raises(CatalogError, match="would mean 2 tools"):
        catalog_of(**servers)


def test_the_hash_follows_what_the_prompt_shows() -> None:
    same = [catalog_of(a=["x"]).hash, catalog_of(a=["x"]).hash]
    assert same[0] == same[1]
    assert same[0] != catalog_of(a=["y"]).hash
    assert same[0] != Catalog.from_servers({"a": listed("x", schema=WEATHER)}).hash


def test_a_task_gets_all_tools_or_those_of_its_servers_or_those_it_names(make_task: Callable[..., Task]) -> None:
    catalog = catalog_of(a=["read", "list"], b=["read", "write"])

    def names(**fields: Any) -> list[str]:
        return [tool.name for tool in catalog.tools_for(make_task(**fields))]

    assert names() == ["a__read", "list", "b__read", "write"]
    assert names(servers=("b",)) == ["b__read", "write"]
    assert names(tools=("write", "a__read")) == ["a__read", "write"]
    assert names(servers=("b",), tools=("read",)) == ["b__read"]
    assert names(servers=(), tools=()) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"servers": ("fils",)}, ["'fils'", "`files`, `web`"]),
        ({"tools": ("serch",)}, ["'serch'", "are `search`,"]),
        ({"servers": ("files",), "tools": ("search",)}, ["'search'", "`files__read`"]),
        ({"tools": ("read",)}, ["'read'", "files__read", "web__read"]),
    ],
)
def test_a_task_that_names_what_is_not_there_is_told_what_is(
    fields: dict[str, Any], words: list[str], make_task: Callable[..., Task]
) -> None:
    with pytest.raises(CatalogError) as caught:
        catalog_of(web=["search", "read"], files=["read"]).check(make_task(**fields))
    assert [word for word in words if word not in str(caught.value)] == []


def test_arguments_that_fit_are_not_refused() -> None:
    assert weather().refusal({"city": "Bern", "days": 2, "unit": "C", "at": None}) is None


def test_all_that_is_wrong_is_said_at_once_together_with_what_is_right() -> None:
    assert weather().refusal({"city": 3, "day": 1}) == (
        "`city`: 3 is not of type 'string'; `days` is missing; `day` is not an argument; the arguments of `weather` "
        "are: city (string, required), days (integer, required), unit (one of 'C', 'F'), at (string or null)"
    )


def test_a_nested_problem_is_found_by_its_path() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "object", "required": ["b"]}}}
    assert (weather(schema).refusal({"a": {}}) or "").startswith("`a.b` is missing;")


def test_a_tool_without_arguments_says_so() -> None:
    refusal = weather({"type": "object", "properties": {}, "additionalProperties": False}).refusal({"x": 1})
    assert refusal == "`x` is not an argument; `weather` takes no arguments"


def test_a_refusal_stays_short_however_long_the_arguments_are() -> None:
    many = {"type": "object", "properties": {"city": {"type": "integer"}}, "additionalProperties": False}
    refusal = weather(many).refusal({"city": "x" * 100_000} | {f"a{i}": 1 for i in range(100)})
    assert refusal is not None
    assert len(refusal) < 1000


@pytest.mark.parametrize("value", ["\ud800", reduce(lambda inner, _: [inner], range(300), [])], ids=["half", "deep"])
def test_arguments_that_cannot_be_sent_are_refused(value: Any) -> None:
    assert "not valid JSON" in (weather({}).refusal({"x": value}) or "")


def test_an_invalid_schema_is_reported_and_leaves_the_check_to_the_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tool = weather({"type": "no such type"})
    assert "'weather' of server 's'" in caplog.text
    assert tool.refusal({"anything": 1}) is None


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/missing"},
        {"$ref": "http://127.0.0.1:1/schema.json"},
        {"properties": {"x": {"pattern": r"\p{L}"}}},
        {"$ref": "#"},
    ],
)
def test_a_schema_that_turns_out_unusable_does_not_blame_the_policy(schema: dict[str, Any]) -> None:
    assert weather(schema).refusal({"x": "y"}) is None
