"""Polygon's REST API, which is now called Massive."""

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast
from urllib.parse import quote

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers.finance.backend import IncomePeriod, MetricsPeriod, Record
from mcp_grpo.desk.servers.vendor import Limits, VendorClient, required_key


KEY = "POLYGON_API_KEY"
MAX_REPORTS = 100  # that the API gives at once

_EXCHANGES = {"NASDAQ": "XNAS", "NYSE": "XNYS", "AMEX": "XASE", "NYSEARCA": "ARCX", "BATS": "BATS"}
_NAMES = {code: name for name, code in _EXCHANGES.items()}
# Our names of fields, and theirs.
_LISTING = {"symbol": "ticker", "name": "name", "currency": "currency_name", "exchange": "primary_exchange"}
_PROFILE = {
    "companyName": "name",
    "exchange": "primary_exchange",
    "currency": "currency_name",
    "industry": "sic_description",
    "country": "locale",
    "fullTimeEmployees": "total_employees",
    "ipoDate": "list_date",
    "description": "description",
    "isActivelyTrading": "active",
    "marketCap": "market_cap",
    "website": "homepage_url",
}
_SPLIT = {"date": "execution_date", "numerator": "split_to", "denominator": "split_from"}
_REPORT = {"fiscalYear": "fiscal_year", "period": "fiscal_period", "filingDate": "filing_date"}
_BAR = {"open": "o", "high": "h", "low": "l", "close": "c", "volume": "v"}
_INCOME = {
    "revenue": "revenues",
    "costOfRevenue": "cost_of_revenue",
    "grossProfit": "gross_profit",
    "operatingExpenses": "operating_expenses",
    "operatingIncome": "operating_income_loss",
    "netIncome": "net_income_loss",
    "eps": "basic_earnings_per_share",
    "epsDiluted": "diluted_earnings_per_share",
}


class PolygonBackend:
    """
    Polygon's data, with the key in `POLYGON_API_KEY`; `POLYGON_BASE_URL` overrides the address.

    There are no key metrics, sectors or names of CEOs.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "recorded")
        url = os.environ.get("POLYGON_BASE_URL") or "https://api.polygon.io"
        self._client = VendorClient("Polygon", url, KEY, key, {"Authorization": f"Bearer {key}"}, limits)

    @property
    def today(self) -> str:
        return datetime.now(UTC).date().isoformat()

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """Find symbols that begin with `query`, not those that only contain it."""
        first = query.upper()
        return await self._listings({"ticker.gte": first, "ticker.lt": first + "~"}, limit, exchange)

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        return await self._listings({"search": query}, limit, exchange)

    async def quote(self, symbol: str) -> Record:
        """Return the last finished trading day, or the present one where the plan has it."""
        company = await self._company(symbol)
        today = date.fromisoformat(self.today)
        bars = await self._bars(symbol, (today - timedelta(days=365)).isoformat(), today.isoformat(), is_adjusted=True)
        if not bars:
            raise ToolError(f"Polygon has no prices of {symbol!r} in the last year. It may no longer be traded.")
        last, before = bars[0], bars[1] if len(bars) > 1 else bars[0]
        change = last["c"] - before["c"]
        record = {
            "symbol": symbol,
            "name": company.get("name"),
            "price": last["c"],
            "changePercentage": round(100 * change / before["c"], 4) if before["c"] else None,
            "change": round(change, 4),
            "volume": last["v"],
            "dayLow": last["l"],
            "dayHigh": last["h"],
            "yearHigh": max(bar["h"] for bar in bars),
            "yearLow": min(bar["l"] for bar in bars),
            "marketCap": company.get("market_cap"),
            "exchange": _exchange(company),
            "open": last["o"],
            "previousClose": before["c"],
            "timestamp": last["t"] // 1000,
        }
        return _known(record)

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return await self._chart(symbol, start, end, is_adjusted=True)

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return await self._chart(symbol, start, end, is_adjusted=False)

    async def company_profile(self, symbol: str) -> Record:
        return {"symbol": symbol} | _renamed(await self._company(symbol), _PROFILE)

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        is_year = period == "FY"
        params = {
            "ticker": symbol,
            "timeframe": "annual" if is_year else "quarterly",
            "limit": min(MAX_REPORTS, limit if is_year else 4 * limit),
            "sort": "period_of_report_date",
            "order": "desc",
        }
        reports = await self._results("vX/reference/financials", params)
        found = [self._income(symbol, report) for report in reports if report.get("fiscal_period") == period]
        if not found:
            raise ToolError(
                f"Polygon has no income statement of {symbol!r} for {period}. Check the symbol with searchSymbol."
            )
        return found[:limit]

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        """Refuse: there are none."""
        raise ToolError("Polygon has no key metrics. Work them out from getIncomeStatement and getQuote.")

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        params = {"ticker": symbol, "limit": min(limit, 1000), "sort": "execution_date", "order": "desc"}
        splits = await self._results("v3/reference/splits", params)
        return [{"symbol": symbol} | _renamed(split, _SPLIT) for split in splits[:limit]]

    async def close(self) -> None:
        await self._client.close()

    async def _listings(self, params: Mapping[str, Any], limit: int, exchange: str | None) -> list[Record]:
        code = _EXCHANGES.get(exchange.upper(), exchange.upper()) if exchange else None
        wanted = {"market": "stocks", "active": "true", "exchange": code, "limit": min(limit, 1000)}
        found = await self._results("v3/reference/tickers", {**params, **wanted})
        return [_renamed(one, _LISTING) for one in found[:limit]]

    async def _chart(self, symbol: str, start: str, end: str, *, is_adjusted: bool) -> list[Record]:
        bars = await self._bars(symbol, start, end, is_adjusted=is_adjusted)
        if not bars:
            raise ToolError(
                f"There are no prices of {symbol!r} from {start} to {end}. Check the symbol with searchSymbol, and the dates."
            )
        days = [datetime.fromtimestamp(bar["t"] / 1000, UTC).date().isoformat() for bar in bars]
        return [{"date": day} | _renamed(bar, _BAR) for day, bar in zip(days, bars, strict=True)]

    async def _bars(self, symbol: str, start: str, end: str, *, is_adjusted: bool) -> list[Record]:
        """Return daily bars, newest first."""
        path = f"v2/aggs/ticker/{quote(symbol, safe='')}/range/1/day/{start}/{end}"
        params = {"adjusted": "true" if is_adjusted else "false", "sort": "desc", "limit": 50_000}
        bars = await self._results(path, params)
        if not all(isinstance(bar.get(name), int | float) for bar in bars for name in "tohlcv"):
            raise self._client.unexpected(bars[:1])
        return bars

    async def _company(self, symbol: str) -> Record:
        answer = await self._client.get(f"v3/reference/tickers/{quote(symbol, safe='')}", {})
        company = cast(Record, answer).get("results") if isinstance(answer, dict) else None
        if not isinstance(company, dict):
            raise self._client.unexpected(answer)
        return cast(Record, company)

    async def _results(self, path: str, params: Mapping[str, Any]) -> list[Record]:
        answer = await self._client.get(path, params)
        if not isinstance(answer, dict) or "status" not in answer or cast(Record, answer)["status"] == "ERROR":
            raise self._client.unexpected(answer)
        results = cast(Record, answer).get("results") or []  # left out where there are none
        return self._client.records({**answer, "results": results}, "results")

    def _income(self, symbol: str, report: Record) -> Record:
        financials = report.get("financials")
        lines = cast(Record, financials).get("income_statement") if isinstance(financials, dict) else None
        if not isinstance(lines, dict):
            raise self._client.unexpected(report)
        figures = {name: cast(Record, lines).get(line) for name, line in _INCOME.items()}
        values = {name: cast(Record, one).get("value") for name, one in figures.items() if isinstance(one, dict)}
        revenue = figures["revenue"]
        currency = cast(Record, revenue).get("unit") if isinstance(revenue, dict) else None
        record = {"date": report.get("end_date"), "symbol": symbol, "reportedCurrency": currency}
        return _known(record | _renamed(report, _REPORT) | values)


def _exchange(listing: Record) -> str | None:
    code = listing.get("primary_exchange")
    return _NAMES.get(str(code), str(code)) if code else None


def _renamed(record: Record, names: Mapping[str, str]) -> Record:
    """Return fields under our names, in our form, without those that the vendor does not have."""
    found = {name: record.get(theirs) for name, theirs in names.items()}
    for name in ("currency", "country"):
        if name in found:
            found[name] = str(found[name] or "").upper() or None
    if "exchange" in found:
        found["exchange"] = _exchange(record)
    return _known(found)


def _known(record: Record) -> Record:
    return {name: value for name, value in record.items() if value is not None}
