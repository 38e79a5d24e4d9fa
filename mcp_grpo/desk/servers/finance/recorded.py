"""Financial data of the invented market."""

import re
from typing import Any

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.desk.servers.finance.backend import IncomePeriod, MetricsPeriod, Record
from mcp_grpo.desk.world.market import MONTHS, Market
from mcp_grpo.desk.world.records import Company, MarketError


# Attributes of the market's records; `/100` for what it keeps in hundredths.
_LISTING = "symbol name currency exchange"
_QUOTE = (
    "symbol name price/100 change_percentage/100 change/100 volume day_low/100 day_high/100 year_high/100 year_low/100 "
    "market_cap exchange open/100 previous_close/100 timestamp"
)
_BAR = "date open/100 high/100 low/100 close/100 volume"
_STATEMENT = (
    "date symbol reported_currency fiscal_year period filing_date revenue cost_of_revenue gross_profit "
    "operating_expenses operating_income net_income eps/100 eps_diluted/100"
)
_METRICS = (
    "symbol date fiscal_year period reported_currency market_cap price_to_sales_ratio/10000 "
    "price_to_earnings_ratio/10000 revenue_per_share/100 net_income_per_share/100 gross_profit_margin/10000 "
    "operating_profit_margin/10000 net_profit_margin/10000"
)
_SPLIT = "symbol date numerator denominator"


class RecordedFinance:
    """A [`FinanceBackend`] that answers from the invented market, always the same."""

    def __init__(self, market: Market) -> None:
        self._market = market

    @property
    def today(self) -> str:
        return self._market.today

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        return [_record(one, _LISTING) for one in self._market.search_symbol(query, exchange)[:limit]]

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        return [_record(one, _LISTING) for one in self._market.search_name(query, exchange)[:limit]]

    async def quote(self, symbol: str) -> Record:
        try:
            return _record(self._market.quote(symbol), _QUOTE)
        except MarketError as error:
            raise ToolError(str(error)) from None

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return self._chart(symbol, start, end, adjusted=True)

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        return self._chart(symbol, start, end, adjusted=False)

    async def company_profile(self, symbol: str) -> Record:
        company = self._company(symbol)
        profile = {
            "symbol": company.symbol,
            "companyName": company.name,
            **_record(company, "exchange currency sector industry country ceo"),
            "fullTimeEmployees": company.employees,
            "ipoDate": company.ipo_date,
            "fiscalYearEnd": MONTHS[company.fiscal_year_end - 1],
            **_record(company, "shares_outstanding website description is_actively_trading"),
        }
        return profile if company.delisted_on is None else {**profile, "delistedDate": company.delisted_on}

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        """Return statements; one that replaces an earlier one has `"restated": true`."""
        self._company(symbol)
        return [
            _record(one, _STATEMENT) | ({"restated": True} if one.restated else {})
            for one in self._market.income_statements(symbol, period, limit)
        ]

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        self._company(symbol)
        return [_record(one, _METRICS) for one in self._market.key_metrics(symbol, period, limit)]

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        self._company(symbol)
        return [_record(one, _SPLIT) for one in self._market.splits(symbol)[:limit]]

    async def close(self) -> None: ...

    def _company(self, symbol: str) -> Company:
        try:
            return self._market.company(symbol)
        except MarketError as error:
            raise ToolError(str(error)) from None

    def _chart(self, symbol: str, start: str, end: str, adjusted: bool) -> list[Record]:
        company = self._company(symbol)
        first = self._market.first_day(symbol)
        if end < first:
            why = f"{symbol} was listed on {first}" if first == company.ipo_date else f"Prices begin on {first}"
            raise ToolError(f"{why}; there are none up to {end}. Ask for days from {first} on.")
        if company.delisted_on and start > company.delisted_on:
            raise ToolError(
                f"{symbol} was delisted on {company.delisted_on}; there are no prices from {start} on. Ask for days up "
                f"to {company.delisted_on}."
            )
        return [_record(one, _BAR) for one in reversed(self._market.prices(symbol, start, end, adjusted))]


def _record(value: Any, attributes: str) -> Record:
    """Return attributes under the names that the vendor's API has for them, without those that are `None`."""
    record: Record = {}
    for attribute in attributes.split():
        name, _, divisor = attribute.partition("/")
        found = getattr(value, name)
        if found is not None:
            found = str(found) if name == "fiscal_year" else found / int(divisor) if divisor else found
            record[re.sub(r"_(\w)", lambda letter: letter[1].upper(), name)] = found
    return record
