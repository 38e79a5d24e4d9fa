"""The tools of the finance server, with the names and parameters of Financial Modeling Prep's MCP server."""

import functools
from collections.abc import Awaitable, Callable
from datetime import date, timedelta
from typing import Annotated, Any

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

from mcp_grpo.desk.servers.finance.backend import MAX_DAYS, FinanceBackend, IncomePeriod, MetricsPeriod, Record
from mcp_grpo.desk.servers.serving import READ_ONLY, DeskServer, closing, compact, iso_day, words_of


USUAL_DAYS = 30
MAX_FOUND = 50
MAX_PERIODS = 40
BAR = ("date", "open", "high", "low", "close", "volume")

ToolMaker = Callable[..., Callable[[Callable[..., Awaitable[str]]], object]]
Symbol = Annotated[str, Field(description="Ticker symbol, e.g. VLTA")]
Limit = Annotated[float, Field(description="Most entries to return")]
Exchange = Annotated[str, Field(description="Only this exchange, e.g. NYSE")]
From = Annotated[str, Field(alias="from", description="First day, YYYY-MM-DD")]
To = Annotated[str, Field(description="Last day, YYYY-MM-DD")]


def make_server(backend: FinanceBackend) -> MCPServer:
    """Make the finance server."""
    server = DeskServer("finance", lifespan=closing(backend))
    tool = functools.partial(server.tool, annotations=READ_ONLY, structured_output=False)
    _add_companies(tool, backend)
    _add_prices(tool, backend)
    _add_figures(tool, backend)
    return server


def _add_companies(tool: ToolMaker, backend: FinanceBackend) -> None:
    @tool(name="searchSymbol", description="Find listings by part of their ticker symbol.")
    async def search_symbol(query: str, limit: Limit = 10, exchange: Exchange = "") -> str:
        found = await backend.search_symbol(
            words_of(query, "query"), _limit(limit, MAX_FOUND), exchange.strip() or None
        )
        return compact(found)

    @tool(name="searchName", description="Find listings by words of the company's name.")
    async def search_name(query: str, limit: Limit = 10, exchange: Exchange = "") -> str:
        found = await backend.search_name(words_of(query, "query"), _limit(limit, MAX_FOUND), exchange.strip() or None)
        return compact(found)

    @tool(
        name="getCompanyProfile", description="Who a company is: sector, country, CEO, employees, fiscal year, status."
    )
    async def company_profile(symbol: Symbol) -> str:
        return compact(await backend.company_profile(_symbol(symbol)))


def _add_prices(tool: ToolMaker, backend: FinanceBackend) -> None:
    @tool(name="getQuote", description="Latest price of a listing, with the day's and the year's range.")
    async def quote(symbol: Symbol) -> str:
        return compact(await backend.quote(_symbol(symbol)))

    @tool(
        name="getFullChart",
        description=f"Daily prices adjusted for splits, newest first. At most {MAX_DAYS} days per call; without dates, the last {USUAL_DAYS}.",
    )
    @_with_from
    async def full_chart(symbol: Symbol, from_: From = "", to: To = "") -> str:
        name, start, end = _symbol(symbol), *_range(from_, to, backend.today)
        return _chart(name, start, end, await backend.full_chart(name, start, end))

    @tool(
        name="getUnadjustedChart",
        description=f"Daily prices as traded, not adjusted for splits, newest first. At most {MAX_DAYS} days per call.",
    )
    @_with_from
    async def unadjusted_chart(symbol: Symbol, from_: From = "", to: To = "") -> str:
        name, start, end = _symbol(symbol), *_range(from_, to, backend.today)
        return _chart(name, start, end, await backend.unadjusted_chart(name, start, end))

    @tool(name="getStockSplits", description="Stock splits of a listing, newest first.")
    async def stock_splits(symbol: Symbol, limit: Limit = 10) -> str:
        return compact(await backend.stock_splits(_symbol(symbol), _limit(limit, MAX_PERIODS)))


def _add_figures(tool: ToolMaker, backend: FinanceBackend) -> None:
    @tool(
        name="getIncomeStatement",
        description="Income statements as they stand today, newest first: whole years (FY), or one quarter of each year.",
    )
    async def income_statement(symbol: Symbol, limit: Limit = 4, period: IncomePeriod = "FY") -> str:
        return compact(await backend.income_statement(_symbol(symbol), _limit(limit, MAX_PERIODS), period))

    @tool(
        name="getKeyMetrics", description="Margins, per-share figures and market value by fiscal period, newest first."
    )
    async def key_metrics(symbol: Symbol, limit: Limit = 4, period: MetricsPeriod = "FY") -> str:
        return compact(await backend.key_metrics(_symbol(symbol), _limit(limit, MAX_PERIODS), period))


def _with_from(function: Callable[..., Awaitable[str]]) -> Callable[..., Awaitable[str]]:
    """Let a function be called with `from`, which is no name for a parameter in Python."""

    @functools.wraps(function)
    async def renamed(**arguments: Any) -> str:
        return await function(from_=arguments.pop("from"), **arguments)

    return renamed


def _chart(symbol: str, start: str, end: str, bars: list[Record]) -> str:
    """Return prices as rows under one list of column names: half as long as a record per day."""
    if not bars:
        return compact({"symbol": symbol, "prices": [], "note": f"Not traded on any day from {start} to {end}."})
    return compact({"symbol": symbol, "columns": BAR, "prices": [[bar[name] for name in BAR] for bar in bars]})


def _symbol(value: str) -> str:
    return words_of(value, "symbol").upper()


def _limit(value: float, most: int) -> int:
    if value != value or value < 1:
        raise ToolError(f"`limit` must be at least 1, got {value:g}.")
    return int(min(value, most))


def _range(first: str, last: str, today: str) -> tuple[str, str]:
    """Fill in and check the first and the last day."""
    end = iso_day(last, "to") if last.strip() else date.fromisoformat(today)
    start = iso_day(first, "from") if first.strip() else end - timedelta(days=USUAL_DAYS - 1)
    if start > end:
        raise ToolError(f"`from` ({start}) is after `to` ({end}). Exchange them, or leave `to` out for {today}.")
    if end.isoformat() > today:
        raise ToolError(f"{end} is in the future: the latest day is {today}. Ask for days up to {today}.")
    num_days = (end - start).days + 1
    if num_days > MAX_DAYS:
        raise ToolError(
            f"{start} to {end} are {num_days} days; one call may ask for {MAX_DAYS}. Ask for a shorter range, or call "
            "once per year."
        )
    return start.isoformat(), end.isoformat()
