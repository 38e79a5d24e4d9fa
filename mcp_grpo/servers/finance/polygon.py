"""Polygon's REST API, which is now called Massive."""

import os
from collections.abc import Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast
from urllib.parse import quote

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.servers.finance.backend import IncomePeriod, MetricsPeriod, Record
from mcp_grpo.servers.vendor import Limits, VendorClient, required_key


KEY = "POLYGON_API_KEY"
MAX_REPORTS = 100  # that the API gives at once

_EXCHANGES = {"NASDAQ": "XNAS", "NYSE": "XNYS", "AMEX": "XASE", "NYSEARCA": "ARCX", "BATS": "BATS"}
_NAMES = {code: name for name, code in _EXCHANGES.items()}
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
    The market as Polygon has it, with the key in `POLYGON_API_KEY`.

    `POLYGON_BASE_URL` is another address than the vendor's. It has no key metrics, sectors or names of CEOs.

    Args:
        limits ([`Limits`], *optional*):
            How long to wait and how much to ask.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "recorded")
        url = os.environ.get("POLYGON_BASE_URL") or "https://api.polygon.io"
        self._client = VendorClient("Polygon", url, KEY, key, {"Authorization": f"Bearer {key}"}, limits)

    @property
    def today(self) -> str:
        """See [`FinanceBackend.today`]."""
        return datetime.now(UTC).date().isoformat()

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """See [`FinanceBackend.search_symbol`]. Only symbols that begin with `query`."""
        first = query.upper()
        return await self._listings({"ticker.gte": first, "ticker.lt": first + "~"}, limit, exchange)

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """See [`FinanceBackend.search_name`]."""
        return await self._listings({"search": query}, limit, exchange)

    async def quote(self, symbol: str) -> Record:
        """See [`FinanceBackend.quote`]. Of the last trading day that has ended, or of the present one where the plan has it."""
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
        """See [`FinanceBackend.full_chart`]."""
        return await self._chart(symbol, start, end, is_adjusted=True)

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """See [`FinanceBackend.unadjusted_chart`]."""
        return await self._chart(symbol, start, end, is_adjusted=False)

    async def company_profile(self, symbol: str) -> Record:
        """See [`FinanceBackend.company_profile`]."""
        company = await self._company(symbol)
        record = {
            "symbol": symbol,
            "companyName": company.get("name"),
            "exchange": _exchange(company),
            "currency": str(company.get("currency_name") or "").upper() or None,
            "industry": company.get("sic_description"),
            "country": str(company.get("locale") or "").upper() or None,
            "fullTimeEmployees": company.get("total_employees"),
            "ipoDate": company.get("list_date"),
            "description": company.get("description"),
            "isActivelyTrading": company.get("active"),
            "marketCap": company.get("market_cap"),
            "website": company.get("homepage_url"),
        }
        return _known(record)

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        """See [`FinanceBackend.income_statement`]."""
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
        """See [`FinanceBackend.key_metrics`]. There are none."""
        raise ToolError("Polygon has no key metrics. Work them out from getIncomeStatement and getQuote.")

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        """See [`FinanceBackend.stock_splits`]."""
        params = {"ticker": symbol, "limit": min(limit, 1000), "sort": "execution_date", "order": "desc"}
        return [
            _known(
                {
                    "symbol": symbol,
                    "date": split.get("execution_date"),
                    "numerator": split.get("split_to"),
                    "denominator": split.get("split_from"),
                }
            )
            for split in (await self._results("v3/reference/splits", params))[:limit]
        ]

    async def close(self) -> None:
        """See [`FinanceBackend.close`]."""
        await self._client.close()

    async def _listings(self, params: Mapping[str, Any], limit: int, exchange: str | None) -> list[Record]:
        code = _EXCHANGES.get(exchange.upper(), exchange.upper()) if exchange else None
        wanted = {"market": "stocks", "active": "true", "exchange": code, "limit": min(limit, 1000)}
        found = await self._results("v3/reference/tickers", {**params, **wanted})
        return [
            _known(
                {
                    "symbol": one.get("ticker"),
                    "name": one.get("name"),
                    "currency": str(one.get("currency_name") or "").upper() or None,
                    "exchange": _exchange(one),
                }
            )
            for one in found[:limit]
        ]

    async def _chart(self, symbol: str, start: str, end: str, *, is_adjusted: bool) -> list[Record]:
        bars = await self._bars(symbol, start, end, is_adjusted=is_adjusted)
        if not bars:
            raise ToolError(
                f"There are no prices of {symbol!r} from {start} to {end}. Check the symbol with searchSymbol, and the dates."
            )
        return [
            {
                "date": datetime.fromtimestamp(bar["t"] / 1000, UTC).date().isoformat(),
                "open": bar["o"],
                "high": bar["h"],
                "low": bar["l"],
                "close": bar["c"],
                "volume": bar["v"],
            }
            for bar in bars
        ]

    async def _bars(self, symbol: str, start: str, end: str, *, is_adjusted: bool) -> list[Record]:
        """Daily bars, newest first."""
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
        if not isinstance(results, list) or not all(isinstance(one, dict) for one in cast(list[Any], results)):
            raise self._client.unexpected(answer)
        return cast(list[Record], results)

    def _income(self, symbol: str, report: Record) -> Record:
        financials = report.get("financials")
        lines = cast(Record, financials).get("income_statement") if isinstance(financials, dict) else None
        if not isinstance(lines, dict):
            raise self._client.unexpected(report)
        figures = {name: cast(Record, lines).get(line) for name, line in _INCOME.items()}
        values = {name: cast(Record, one).get("value") for name, one in figures.items() if isinstance(one, dict)}
        revenue = figures["revenue"]
        record = {
            "date": report.get("end_date"),
            "symbol": symbol,
            "reportedCurrency": cast(Record, revenue).get("unit") if isinstance(revenue, dict) else None,
            "fiscalYear": report.get("fiscal_year"),
            "period": report.get("fiscal_period"),
            "filingDate": report.get("filing_date"),
        }
        return _known(record | values)


def _exchange(listing: Record) -> str | None:
    code = listing.get("primary_exchange")
    return _NAMES.get(str(code), str(code)) if code else None


def _known(record: Record) -> Record:
    return {name: value for name, value in record.items() if value is not None}
