import json
import subprocess
import sys
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from mcp import Client
from mcp.server.mcpserver import MCPServer

from mcp_grpo.desk.servers.finance.recorded import RecordedFinance
from mcp_grpo.desk.servers.finance.server import make_server
from mcp_grpo.desk.world.market import Market
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.anyio

ROOT = Path(__file__).parents[3]
VENDOR = json.loads((ROOT / "tests/data/vendor_tools.json").read_text())["finance"]
"""The same tools as the vendor's own server lists them."""


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


@pytest.fixture(scope="module")
def server(market: Market) -> MCPServer:
    return make_server(RecordedFinance(market))


def process(*args: str) -> ServerConfig:
    command = ("-m", "mcp_grpo.desk.servers.finance", *args)
    return ServerConfig(name="finance", transport="stdio", command=sys.executable, args=command, cwd=str(ROOT))


async def ask(pool: ToolPool, tool: str, /, **arguments: Any) -> Any:
    result = await pool.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.OK, result.text
    return json.loads(result.text)


async def error(server: MCPServer, tool: str, /, **arguments: Any) -> str:
    async with ToolPool({"finance": server}) as pool:
        result = await pool.call(ToolCall(name=tool, arguments=arguments))
    assert result.kind is ResultKind.TOOL_ERROR, result.text
    return result.text


async def test_the_tools_are_those_of_the_vendor(server: MCPServer) -> None:
    async with Client(server) as client:
        tools = (await client.list_tools()).tools
    assert {tool.name for tool in tools} == set(VENDOR)
    for tool in tools:
        real = VENDOR[tool.name]
        ours = tool.input_schema["properties"]
        assert {name: (one["type"], one.get("enum")) for name, one in ours.items()} == {
            name: (one["type"], one.get("enum")) for name, one in real["properties"].items()
        }
        assert tool.input_schema["required"] == real["required"]
        assert tool.annotations
        assert tool.annotations.read_only_hint
        assert 0 < len(tool.description or "") < 150


async def test_a_real_process_answers_every_tool(market: Market) -> None:
    split = next(one for one in market.companies() if market.splits(one.symbol))
    async with ToolPool([process()]) as pool:
        found = await ask(pool, "searchSymbol", query="vlta")
        named = await ask(pool, "searchName", query="northwind logistics")
        quote = await ask(pool, "getQuote", symbol="vlta")
        adjusted, traded = [
            await ask(pool, tool, symbol="VLTA", **{"from": "2024-03-25", "to": "2024-04-05"})
            for tool in ("getFullChart", "getUnadjustedChart")
        ]
        profile = await ask(pool, "getCompanyProfile", symbol="VLTA")
        years = await ask(pool, "getIncomeStatement", symbol="VLTA", limit=3)
        quarters = await ask(pool, "getIncomeStatement", symbol="VLTA", period="Q2")
        metrics = await ask(pool, "getKeyMetrics", symbol="VLTA", period="quarter", limit=2)
        splits = await ask(pool, "getStockSplits", symbol=split.symbol)
    assert [one["symbol"] for one in found] == ["VLTA", "VLTAA"]
    assert [one["name"] for one in named] == [market.search_name("northwind logistics")[0].name]
    assert quote["price"] == market.quote("VLTA").price / 100
    days = market.prices("VLTA", "2024-03-25", "2024-04-05")
    assert [row[0] for row in adjusted["prices"]] == [bar.date for bar in reversed(days)]
    assert [row[4] for row in traded["prices"]] == [
        bar.close / 100 for bar in reversed(market.prices("VLTA", "2024-03-25", "2024-04-05", adjusted=False))
    ]
    assert profile["ceo"] == market.company("VLTA").ceo
    assert [one["revenue"] for one in years] == [one.revenue for one in market.income_statements("VLTA", "FY", 3)]
    assert {one["period"] for one in quarters} == {"Q2"}
    assert len(metrics) == 2
    assert splits[0]["date"] == market.splits(split.symbol)[0].date


@pytest.mark.full
async def test_the_seed_chooses_the_world() -> None:
    async with ToolPool([process("--seed", "3")]) as pool:
        profile = await ask(pool, "getCompanyProfile", symbol="VLTA")
    assert profile["ceo"] == Market(seed=3).company("VLTA").ceo


async def test_prices_around_a_split_depend_on_the_chart(market: Market, server: MCPServer) -> None:
    split = next(
        split
        for one in market.companies()
        for split in market.splits(one.symbol)
        if (split.numerator, split.denominator) == (2, 1) and len(market.splits(one.symbol)) == 1
    )
    day = market.close_on_or_before(split.symbol, (date.fromisoformat(split.date) - timedelta(days=1)).isoformat())
    assert day
    async with ToolPool({"finance": server}) as pool:
        dates = {"from": day.date, "to": day.date}
        adjusted = await ask(pool, "getFullChart", symbol=split.symbol, **dates)
        traded = await ask(pool, "getUnadjustedChart", symbol=split.symbol, **dates)
    assert traded["prices"][0][4] == 2 * adjusted["prices"][0][4]


async def test_restated_statements_say_so(market: Market, server: MCPServer) -> None:
    first, restated = next(pair for pair in market.restatements() if pair[1].period == "FY")
    async with ToolPool({"finance": server}) as pool:
        years = await ask(pool, "getIncomeStatement", symbol=restated.symbol, limit=10)
    shown = {one["fiscalYear"]: one for one in years}
    assert shown[str(first.fiscal_year)]["revenue"] == restated.revenue
    assert [year for year, one in shown.items() if "restated" in one] == [str(restated.fiscal_year)]


async def test_a_day_without_trading_is_not_an_error_and_says_so(market: Market, server: MCPServer) -> None:
    company = next(one for one in market.companies() if market.halts(one.symbol))
    day = market.halts(company.symbol)[0]
    async with ToolPool({"finance": server}) as pool:
        chart = await ask(pool, "getFullChart", symbol=company.symbol, **{"from": day, "to": day})
    assert chart["prices"] == []
    assert day in chart["note"]


async def test_a_chart_without_dates_is_the_last_month(market: Market, server: MCPServer) -> None:
    async with ToolPool({"finance": server}) as pool:
        chart = await ask(pool, "getFullChart", symbol="VLTA")
    days = [row[0] for row in chart["prices"]]
    assert days[0] == market.today
    assert days[-1] >= "2025-06-01"
    assert len(days) > 15


async def test_one_call_may_ask_for_a_leap_year_and_not_for_a_day_more(server: MCPServer) -> None:
    async with ToolPool({"finance": server}) as pool:
        year = await ask(pool, "getFullChart", symbol="VLTA", **{"from": "2024-01-01", "to": "2024-12-31"})
    assert len(year["prices"]) > 240
    assert "367 days" in await error(
        server, "getFullChart", symbol="VLTA", **{"from": "2024-01-01", "to": "2025-01-01"}
    )


@pytest.mark.parametrize(
    ("tool", "arguments", "words"),
    [
        ("getQuote", {"symbol": "NOPE"}, "searchSymbol"),
        ("getCompanyProfile", {"symbol": " "}, "`symbol` is empty"),
        ("getFullChart", {"symbol": "VLTA", "from": "2025-07-01", "to": "2025-07-04"}, "in the future"),
        ("getFullChart", {"symbol": "VLTA", "from": "2020-03-01", "to": "2020-04-01"}, "Prices begin on 2021-01-04"),
        ("getFullChart", {"symbol": "VLTA", "from": "2024-05-01", "to": "2024-04-01"}, "is after `to`"),
        ("getFullChart", {"symbol": "VLTA", "from": "March 2024"}, "a date like 2024-03-28"),
        ("getIncomeStatement", {"symbol": "VLTA", "limit": 0}, "at least 1"),
        ("searchName", {"query": ""}, "`query` is empty"),
    ],
)
async def test_what_the_policy_can_mend_is_a_tool_error(
    tool: str, arguments: dict[str, Any], words: str, server: MCPServer
) -> None:
    assert words in await error(server, tool, **arguments)


async def test_renamed_delisted_and_young_companies_explain_themselves(market: Market, server: MCPServer) -> None:
    change = market.symbol_changes()[0]
    gone = next(one for one in market.companies() if one.delisted_on)
    young = next(one for one in market.companies() if one.ipo_date > "2021-06-01")
    assert change.new_symbol in await error(server, "getQuote", symbol=change.old_symbol)
    assert change.new_symbol in await error(server, "getFullChart", symbol=change.old_symbol)
    assert str(gone.delisted_on) in await error(server, "getQuote", symbol=gone.symbol)
    assert "was delisted on" in await error(server, "getFullChart", symbol=gone.symbol)
    early = {"from": "2021-02-01", "to": "2021-02-10"}
    assert f"was listed on {young.ipo_date}" in await error(server, "getFullChart", symbol=young.symbol, **early)


async def test_an_argument_that_a_tool_does_not_have_is_refused(server: MCPServer) -> None:
    async with ToolPool({"finance": server}) as pool:
        result = await pool.call(ToolCall(name="getFullChart", arguments={"symbol": "VLTA", "start": "2024-01-01"}))
    assert result.kind is ResultKind.INVALID_ARGUMENTS


async def test_the_same_question_has_the_same_answer(server: MCPServer) -> None:
    async with ToolPool({"finance": server}) as pool:
        one, two = [
            await pool.call(ToolCall(name="getKeyMetrics", arguments={"symbol": "VLTB", "limit": 4})) for _ in range(2)
        ]
    assert one.text == two.text


@pytest.mark.full
def test_a_backend_that_there_is_not_is_refused() -> None:
    command = [sys.executable, "-m", "mcp_grpo.desk.servers.finance", "--backend", "live"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2
    assert "'recorded', 'fmp', 'polygon'" in done.stderr


def test_a_server_starts_without_what_training_needs() -> None:
    heavy = "{'torch', 'transformers', 'datasets', 'trl', 'accelerate'}"
    script = f"import sys, mcp_grpo.desk.servers.finance.__main__, mcp_grpo.desk.servers.search.__main__; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "set()"
