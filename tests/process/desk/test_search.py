import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer

from mcp_grpo.desk.servers.search.recorded import RecordedSearch
from mcp_grpo.desk.servers.search.server import make_server
from mcp_grpo.desk.world.corpus import Corpus
from mcp_grpo.desk.world.market import Market
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
VENDOR = json.loads((ROOT / "tests/data/vendor_tools.json").read_text())["search"]
"""The same tools as the vendor's own server lists them."""

COMMAND = ("-m", "mcp_grpo.desk.servers.search")


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


@pytest.fixture(scope="module")
def corpus(market: Market) -> Corpus:
    return Corpus(market)


@pytest.fixture(scope="module")
def server(corpus: Corpus) -> MCPServer:
    return make_server(RecordedSearch(corpus))


@pytest.fixture
def address() -> Iterator[str]:
    """Of a search server over HTTP, in a process of its own."""
    command = [sys.executable, *COMMAND, "--transport", "http", "--port", "0"]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert running.stderr
    yield running.stderr.readline().strip()
    running.terminate()
    running.communicate()


async def ask(pool: ToolPool, tool: str, /, **arguments: Any) -> Any:
    result = await pool.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.OK, result.text
    return json.loads(result.text)


async def use_every_tool(pool: ToolPool, corpus: Corpus) -> None:
    found = (await ask(pool, "tavily_search", query="Voltaris Foods headquarters", max_results=6))["results"]
    assert [one["url"] for one in found] == [hit.page.url for hit in corpus.search("Voltaris Foods headquarters", 6)]
    read = await ask(pool, "tavily_extract", urls=[found[0]["url"]], format="text")
    page = corpus.page(found[0]["url"])
    assert page
    assert page.text in read["results"][0]["raw_content"]
    answer = await ask(pool, "tavily_qna", query="Where are the headquarters of Voltaris Foods?")
    source = corpus.page(answer["url"])
    assert source
    assert answer["answer"] in source.text


async def test_the_tools_are_those_of_the_vendor_and_a_short_answer(server: MCPServer) -> None:
    async with Client(server) as client:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
    assert set(tools) == {*VENDOR, "tavily_qna"}
    assert all(tool.annotations and tool.annotations.read_only_hint for tool in tools.values())
    for name, real in VENDOR.items():
        schema = tools[name].input_schema
        assert schema["required"] == real["required"]
        for argument, ours in schema["properties"].items():
            theirs = real["properties"][argument]
            for key in ("type", "enum", "minimum", "maximum", "items"):
                assert ours.get(key) == theirs.get(key)


async def test_a_real_process_answers_every_tool(corpus: Corpus) -> None:
    config = ServerConfig(name="search", transport="stdio", command=sys.executable, args=COMMAND, cwd=str(ROOT))
    async with ToolPool([config]) as pool:
        await use_every_tool(pool, corpus)


async def test_a_real_process_answers_over_http(corpus: Corpus, address: str) -> None:
    async with ToolPool([ServerConfig(name="search", transport="http", url=address)]) as pool:
        await use_every_tool(pool, corpus)


async def test_arguments_narrow_a_search(server: MCPServer) -> None:
    async with ToolPool({"search": server}) as pool:
        recent = await ask(pool, "tavily_search", query="revenue", time_range="month", max_results=20)
        year = await ask(pool, "tavily_search", query="revenue", start_date="2023-01-01", end_date="2023-12-31")
        filings = await ask(pool, "tavily_search", query="revenue", include_domains=["filings.example"])
        others = await ask(pool, "tavily_search", query="revenue", exclude_domains=["filings.example"], max_results=20)
    assert all(one["published_date"] >= "2025-05-30" for one in recent["results"])
    assert {one["published_date"][:4] for one in year["results"]} == {"2023"}
    assert all("//filings.example/" in one["url"] for one in filings["results"])
    assert others["results"]
    assert not any("//filings.example/" in one["url"] for one in others["results"])


async def test_an_advanced_search_returns_longer_excerpts(server: MCPServer) -> None:
    async with ToolPool({"search": server}) as pool:
        short, long = [
            await ask(pool, "tavily_search", query="Northwind Logistics annual report", search_depth=depth)
            for depth in ("basic", "advanced")
        ]
    assert len(json.dumps(long)) > len(json.dumps(short))


async def test_a_query_reads_only_a_part_of_a_page(corpus: Corpus, server: MCPServer) -> None:
    page = corpus.pages("filing")[0]
    async with ToolPool({"search": server}) as pool:
        part = await ask(pool, "tavily_extract", urls=[page.url], query="net income")
    text = part["results"][0]["raw_content"]
    assert "Net income" in text
    assert "Risk factors" not in text


async def test_nothing_found_is_not_an_error(server: MCPServer) -> None:
    async with ToolPool({"search": server}) as pool:
        found = await ask(pool, "tavily_search", query="xylophonic zzz")
    assert found["results"] == []


async def test_pages_that_do_not_exist_are_named(corpus: Corpus, server: MCPServer) -> None:
    good, bad = corpus.pages()[0].url, "https://nowhere.example/page"
    async with ToolPool({"search": server}) as pool:
        both = await ask(pool, "tavily_extract", urls=[good, bad])
        none = await pool.call(ToolCall(name="tavily_extract", arguments={"urls": [bad]}))
    assert [one["url"] for one in both["results"]] == [good]
    assert [one["url"] for one in both["failed_results"]] == [bad]
    assert none.kind is ResultKind.TOOL_ERROR
    assert bad in none.text


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("tavily_search", {"query": " "}, "`query` is empty"),
        ("tavily_search", {"query": "revenue", "start_date": "last week"}, "a date like 2024-03-28"),
        ("tavily_extract", {"urls": []}, "1 to 20 addresses"),
        ("tavily_qna", {"query": "zzz"}, "other words"),
    ],
)
async def test_what_the_policy_can_mend_is_a_tool_error(
    tool: str, arguments: dict[str, Any], words: str, server: MCPServer
) -> None:
    async with ToolPool({"search": server}) as pool:
        result = await pool.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.TOOL_ERROR
    assert words in result.text


async def test_a_short_answer_may_be_stale_where_the_market_is_not(
    market: Market, corpus: Corpus, server: MCPServer
) -> None:
    stale = [fact for fact in corpus.facts("ceo") if fact.is_stale]
    wrong = 0
    async with ToolPool({"search": server}) as pool:
        for fact in stale[:40]:
            company = market.company(fact.symbol)
            reply = await ask(pool, "tavily_qna", query=f"Who is the CEO of {company.short_name}?")
            wrong += company.ceo not in reply["answer"] and fact.value in reply["answer"]
    assert wrong >= 5
