"""Financial Modeling Prep's stable API."""

import os
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers.finance.backend import IncomePeriod, MetricsPeriod, Record
from mcp_grpo.desk.servers.vendor import Limits, VendorClient, only, required_key


KEY = "FMP_API_KEY"

_LISTING = ("symbol", "name", "currency", "exchange")
_QUOTE = (
    "symbol", "name", "price", "changePercentage", "change", "volume", "dayLow", "dayHigh", "yearHigh", "yearLow",
    "marketCap", "exchange", "open", "previousClose", "timestamp",
)  # fmt: skip
_BAR = ("date", "open", "high", "low", "close", "volume")
_PROFILE = (
    "symbol", "companyName", "exchange", "currency", "sector", "industry", "country", "ceo", "fullTimeEmployees",
    "ipoDate", "description", "isActivelyTrading", "marketCap", "website",
)  # fmt: skip
_INCOME = (
    "date", "symbol", "reportedCurrency", "fiscalYear", "period", "filingDate", "revenue", "costOfRevenue",
    "grossProfit", "operatingExpenses", "operatingIncome", "netIncome", "eps", "epsDiluted",
)  # fmt: skip
_METRICS = (
    "date", "symbol", "reportedCurrency", "fiscalYear", "period", "marketCap", "enterpriseValue", "evToSales",
    "evToEBITDA", "currentRatio", "returnOnEquity", "returnOnAssets", "returnOnInvestedCapital", "earningsYield",
    "freeCashFlowYield", "workingCapital", "netDebtToEBITDA",
)  # fmt: skip
_SPLIT = ("symbol", "date", "numerator", "denominator")


class FMPBackend:
    """Financial Modeling Prep's data, with the key in `FMP_API_KEY`; `FMP_BASE_URL` overrides the address."""

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "recorded")
        url = os.environ.get("FMP_BASE_URL") or "https://financialmodelingprep.com/stable"
        self._client = VendorClient("FMP", url, KEY, key, {"apikey": key}, limits)

    @property
    def today(self) -> str:
        return datetime.now(UTC).date().isoformat()

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        return await self._search("search-symbol", query, limit, exchange)

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        return await self._search("search-name", query, limit, exchange)

    async def quote(self, symbol: str) -> Record:
        return (await self._about(symbol, "quote", _QUOTE))[0]

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return await self._chart(symbol, "full", start, end)

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return await self._chart(symbol, "non-split-adjusted", start, end)

    async def company_profile(self, symbol: str) -> Record:
        return (await self._about(symbol, "profile", _PROFILE))[0]

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        return (await self._about(symbol, "income-statement", _INCOME, limit=limit, period=period))[:limit]

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        return (await self._about(symbol, "key-metrics", _METRICS, limit=limit, period=period))[:limit]

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        """Return splits; none is a valid answer."""
        records = await self._records("splits", {"symbol": symbol, "limit": limit})
        return [only(record, _SPLIT) for record in records[:limit]]

    async def close(self) -> None:
        await self._client.close()

    async def _search(self, path: str, query: str, limit: int, exchange: str | None) -> list[Record]:
        records = await self._records(path, {"query": query, "limit": limit, "exchange": exchange})
        return [only(record, _LISTING) for record in records[:limit]]

    async def _chart(self, symbol: str, kind: str, start: str, end: str) -> list[Record]:
        params = {"symbol": symbol, "from": start, "to": end}
        records = await self._records(f"historical-price-eod/{kind}", params)
        if not records:
            raise ToolError(
                f"There are no prices of {symbol!r} from {start} to {end}. Check the symbol with searchSymbol, and the dates."
            )
        bars = [only(_named_as_traded(record), _BAR) for record in records]
        if not all(len(bar) == len(_BAR) for bar in bars):
            raise self._client.unexpected(records[:1])
        return sorted(bars, key=lambda bar: bar["date"], reverse=True)

    async def _about(self, symbol: str, path: str, fields: tuple[str, ...], **params: Any) -> list[Record]:
        records = await self._records(path, {"symbol": symbol} | params)
        if not records:
            raise ToolError(f"FMP has nothing on {symbol!r}. Look the symbol up with searchSymbol or searchName.")
        return [only(record, fields) for record in records]

    async def _records(self, path: str, params: Mapping[str, Any]) -> list[Record]:
        return self._client.records(await self._client.get(path, params))


def _named_as_traded(record: Record) -> Record:
    """Rename the prices of the unadjusted series, which FMP calls `adjOpen`, `adjClose` and so on."""
    names = {"adjOpen": "open", "adjHigh": "high", "adjLow": "low", "adjClose": "close"}
    return record | {name: record[old] for old, name in names.items() if old in record and name not in record}
