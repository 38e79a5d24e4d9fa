import logging
from collections.abc import Callable
from typing import Any

import mcp.types
import pytest

from mcp_grpo.errors import CatalogError
from mcp_grpo.tools import Catalog, ServerConfig
from mcp_grpo.tools.catalog import catalog_changes, offered_tools
from mcp_grpo.tools.names import ranked
from mcp_grpo.types import Task


WEATHER = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}


def listed(*names: str, schema: dict[str, Any] | None = None) -> list[mcp.types.Tool]:
    return [mcp.types.Tool(name=name, description=f"does {name}", input_schema=schema or {}) for name in names]


def catalog_of(**servers: list[str]) -> Catalog:
    return Catalog.from_servers({server: listed(*names) for server, names in servers.items()})


def configured(**options: Any) -> ServerConfig:
    return ServerConfig(name="s", transport="stdio", command="server", **options)


def test_a_tool_is_shown_as_chat_templates_take_it() -> None:
    (weather,) = Catalog.from_servers({"s": listed("weather", schema=WEATHER)}).tools
    assert weather.schema == {
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
        ({"servers": ("files",), "tools": ("search",)}, ["'search'", "offered by `web`", "`servers`: `files`"]),
        ({"tools": ("read",)}, ["'read'", "files__read", "web__read"]),
    ],
)
def test_a_task_that_names_what_is_not_there_is_told_what_is(
    fields: dict[str, Any], words: list[str], make_task: Callable[..., Task]
) -> None:
    with pytest.raises(CatalogError) as caught:
        catalog_of(web=["search", "read"], files=["read"]).check(make_task(**fields))
    assert [word for word in words if word not in str(caught.value)] == []


def test_all_that_tasks_name_wrongly_is_told_at_once_each_with_the_nearest_name(
    make_task: Callable[..., Task],
) -> None:
    tasks = [make_task(task_id=f"t{n}", tools=("serch", "reed")) for n in range(5)]
    tasks += [
        make_task(task_id="s", servers=("fils",), tools=("write",)),
        make_task(task_id="fine", tools=("search",)),
    ]
    with pytest.raises(CatalogError) as caught:
        catalog_of(web=["search"], files=["read", "write"]).check(*tasks)
    assert str(caught.value).splitlines() == [
        "3 names in the tasks do not fit the servers:",
        "  - tool 'serch' (5 tasks: 't0', 't1', 't2' and 2 more) does not exist. The nearest names are `search`, `read`, `write`.",
        "  - tool 'reed' (5 tasks: 't0', 't1', 't2' and 2 more) does not exist. The nearest names are `read`, `write`, `search`.",
        "  - server 'fils' (1 task: 's') is not configured. The nearest names are `files`, `web`.",
        "  The servers are `web`, `files`; their tools are `search`, `read`, `write`.",
    ]


def test_a_script_may_only_call_what_its_task_may_use(make_task: Callable[..., Task]) -> None:
    catalog = catalog_of(web=["search"], files=["read", "write"])

    def told(*calls: str, **fields: Any) -> list[str]:
        return catalog.mismatches([make_task(task_id="t", **fields)], lambda task: calls)

    assert told("search", "read") == []
    (unknown,) = told("read", "reed")
    assert "tool 'reed' in a `solution` (1 task: 't') does not exist. The nearest names are `read`" in unknown
    (left_out,) = told("write", tools=("read",))
    assert "'write' in a `solution` (1 task: 't') is not among the task's `tools`" in left_out
    (elsewhere,) = told("search", servers=("files",))
    assert "is offered by `web`, which is not among the task's `servers`: `files`" in elsewhere


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("send_slack_message", "slack_post_message"),
        ("tavily_qna_search", "tavily_qna"),
        ("get_stock_quote", "getQuote"),
        ("list_slack_channels", "slack_list_channels"),
        ("execute_python", "run_python"),
        ("income_statement", "getIncomeStatement"),
    ],
)
def test_the_nearest_name_is_that_of_the_same_words_or_of_the_heir(written: str, meant: str) -> None:
    names = ["tavily_search", "tavily_qna", "getQuote", "getIncomeStatement", "getStockSplits", "slack_get_users"]
    names += ["slack_post_message", "slack_list_channels", "run_python"]
    assert ranked(written, names)[0] == meant


def test_an_invalid_schema_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Catalog.from_servers({"s": listed("weather", schema={"type": "no such type", "properties": []})})
    assert "'weather' of server 's'" in caplog.text


def test_only_allowed_tools_are_offered_and_never_the_one_that_resets() -> None:
    tools = listed("read", "write", "reset")
    config = configured(allowed_tools=("write", "reset"), reset_tool="reset", isolation="exclusive")
    assert [tool.name for tool in offered_tools(configured(), tools)] == ["read", "write", "reset"]
    assert [tool.name for tool in offered_tools(config, tools)] == ["write"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"allowed_tools": ("read", "serch")}, ["`allowed_tools`", "'s'", "'serch'", "are `search`, `read`"]),
        ({"idempotent_tools": ("serch",)}, ["`idempotent_tools`", "'serch'", "are `search`, `read`"]),
        ({"reset_tool": "rest", "isolation": "meta"}, ["`reset_tool`", "'rest'", "are `read`, `search`"]),
        ({"state_tool": "stat", "isolation": "meta"}, ["`state_tool`", "'stat'", "`read`"]),
        ({"argument_aliases": {"town": "citi"}}, ["`argument_aliases`", "'town'", "'citi'", "are `city`, `days`"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_an_option_that_names_what_the_server_has_not_is_told_what_it_has(
    options: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(CatalogError) as caught:
        offered_tools(configured(**options), [*listed("read"), *listed("search", schema=WEATHER)])
    assert [word for word in words if word not in str(caught.value)] == []


def test_all_options_that_name_what_the_server_has_not_are_told_at_once() -> None:
    options: dict[str, Any] = {"allowed_tools": ("reed",), "idempotent_tools": ("serch",)}
    with pytest.raises(CatalogError, match=r"(?s)'reed'.*`read`.*'serch'.*`search`.*'citi'") as caught:
        offered_tools(configured(argument_aliases={"town": "citi"}, **options), listed("read", "search"))
    assert len(str(caught.value).splitlines()) == 3


def test_an_alias_applies_where_its_argument_is_and_it_is_not_an_argument_itself() -> None:
    schemas = {"weather": WEATHER, "list": {}, "search": {"properties": {"town": {}, "city": {}}}}
    tools = [tool for name, schema in schemas.items() for tool in listed(name, schema=schema)]
    servers = {"s": tools, "other": listed("x", schema=WEATHER)}
    catalog = Catalog.from_servers(servers, [configured(argument_aliases={"town": "city"})])
    aliases = {tool.name: dict(tool.aliases) for tool in catalog.tools}
    assert aliases == {"weather": {"town": "city"}, "list": {}, "search": {}, "x": {}}


def test_a_tool_is_repeatable_if_it_or_the_configuration_says_so() -> None:
    hints = {"read": {"readOnlyHint": True}, "put": {"idempotentHint": True}, "post": {"readOnlyHint": False}}
    tools = [mcp.types.Tool.model_validate({"name": n, "inputSchema": {}, "annotations": h}) for n, h in hints.items()]
    catalog = Catalog.from_servers({"s": [*tools, *listed("set", "add")]}, [configured(idempotent_tools=("set",))])
    assert [tool.name for tool in catalog.tools if tool.is_repeatable] == ["read", "put", "set"]
    assert [tool.name for tool in catalog.tools if tool.is_read_only] == ["read"]


def test_two_listings_are_compared_in_words() -> None:
    before = [*listed("read", "write", "move"), *listed("list", schema=WEATHER)]
    after = [*listed("read", "copy"), *listed("write", schema=WEATHER)]
    after += [mcp.types.Tool(name="move", description="new", input_schema=WEATHER)]
    assert catalog_changes(before, after) == [
        "`list` was removed",
        "`copy` was added",
        "the schema of `write` changed",
        "the description and the schema of `move` changed",
    ]


def test_the_order_of_a_listing_and_what_no_prompt_shows_are_no_change() -> None:
    before = listed("read", "write")
    titled = [tool.model_copy(update={"title": "T"}) for tool in reversed(before)]
    assert catalog_changes(before, titled) == []
