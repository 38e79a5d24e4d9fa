"""Financial data of the invented market."""

from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.servers.finance.backend import IncomePeriod, MetricsPeriod, Record
from mcp_grpo.servers.world.market import MONTHS, Market
from mcp_grpo.servers.world.records import Bar, Company, IncomeStatement, KeyMetrics, MarketError


class RecordedFinance:
    """
    A [`FinanceBackend`] that answers from the invented market, always the same.

    Args:
        market ([`Market`]):
            The market.
    """

    def __init__(self, market: Market) -> None:
        self._market = market

    @property
    def today(self) -> str:
        """See [`FinanceBackend`]."""
        return self._market.today

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """See [`FinanceBackend`]."""
        return [_found(one) for one in self._market.search_symbol(query, exchange)[:limit]]

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """See [`FinanceBackend`]."""
        return [_found(one) for one in self._market.search_name(query, exchange)[:limit]]

    async def quote(self, symbol: str) -> Record:
        """See [`FinanceBackend`]."""
        self._company(symbol)
        try:
            quote = self._market.quote(symbol)
        except MarketError as error:
            raise ToolError(str(error)) from None
        return {
            "symbol": quote.symbol,
            "name": quote.name,
            "price": quote.price / 100,
            "changePercentage": quote.change_percentage / 100,
            "change": quote.change / 100,
            "volume": quote.volume,
            "dayLow": quote.day_low / 100,
            "dayHigh": quote.day_high / 100,
            "yearHigh": quote.year_high / 100,
            "yearLow": quote.year_low / 100,
            "marketCap": quote.market_cap,
            "exchange": quote.exchange,
            "open": quote.open / 100,
            "previousClose": quote.previous_close / 100,
            "timestamp": quote.timestamp,
        }

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """See [`FinanceBackend`]."""
        return self._chart(symbol, start, end, adjusted=True)

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """See [`FinanceBackend`]."""
        return self._chart(symbol, start, end, adjusted=False)

    async def company_profile(self, symbol: str) -> Record:
        """See [`FinanceBackend`]."""
        company = self._company(symbol)
        profile = {
            "symbol": company.symbol,
            "companyName": company.name,
            "exchange": company.exchange,
            "currency": company.currency,
            "sector": company.sector,
            "industry": company.industry,
            "country": company.country,
            "ceo": company.ceo,
            "fullTimeEmployees": company.employees,
            "ipoDate": company.ipo_date,
            "fiscalYearEnd": MONTHS[company.fiscal_year_end - 1],
            "sharesOutstanding": company.shares_outstanding,
            "website": company.website,
            "description": company.description,
            "isActivelyTrading": company.is_actively_trading,
        }
        return profile if company.delisted_on is None else {**profile, "delistedDate": company.delisted_on}

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        """See [`FinanceBackend`]. A statement that replaces an earlier one has `"restated": true`."""
        self._company(symbol)
        return [_statement(one) for one in self._market.income_statements(symbol, period, limit)]

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        """See [`FinanceBackend`]."""
        self._company(symbol)
        return [_metrics(one) for one in self._market.key_metrics(symbol, period, limit)]

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        """See [`FinanceBackend`]."""
        self._company(symbol)
        return [
            {"symbol": one.symbol, "date": one.date, "numerator": one.numerator, "denominator": one.denominator}
            for one in self._market.splits(symbol)[:limit]
        ]

    async def close(self) -> None:
        """See [`FinanceBackend`]."""

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
        return [_bar(one) for one in reversed(self._market.prices(symbol, start, end, adjusted))]


def _found(company: Company) -> Record:
    return {
        "symbol": company.symbol,
        "name": company.name,
        "currency": company.currency,
        "exchange": company.exchange,
    }


def _bar(bar: Bar) -> Record:
    return {
        "date": bar.date,
        "open": bar.open / 100,
        "high": bar.high / 100,
        "low": bar.low / 100,
        "close": bar.close / 100,
        "volume": bar.volume,
    }


def _statement(one: IncomeStatement) -> Record:
    statement = {
        "date": one.date,
        "symbol": one.symbol,
        "reportedCurrency": one.reported_currency,
        "fiscalYear": str(one.fiscal_year),
        "period": one.period,
        "filingDate": one.filing_date,
        "revenue": one.revenue,
        "costOfRevenue": one.cost_of_revenue,
        "grossProfit": one.gross_profit,
        "operatingExpenses": one.operating_expenses,
        "operatingIncome": one.operating_income,
        "netIncome": one.net_income,
        "eps": one.eps / 100,
        "epsDiluted": one.eps_diluted / 100,
    }
    return {**statement, "restated": True} if one.restated else statement


def _metrics(one: KeyMetrics) -> Record:
    metrics = {
        "symbol": one.symbol,
        "date": one.date,
        "fiscalYear": str(one.fiscal_year),
        "period": one.period,
        "reportedCurrency": one.reported_currency,
        "marketCap": one.market_cap,
        "priceToSalesRatio": _parts(one.price_to_sales_ratio),
        "priceToEarningsRatio": _parts(one.price_to_earnings_ratio),
        "revenuePerShare": one.revenue_per_share / 100,
        "netIncomePerShare": one.net_income_per_share / 100,
        "grossProfitMargin": one.gross_profit_margin / 10_000,
        "operatingProfitMargin": one.operating_profit_margin / 10_000,
        "netProfitMargin": one.net_profit_margin / 10_000,
    }
    return {name: value for name, value in metrics.items() if value is not None}


def _parts(value: int | None) -> float | None:
    return None if value is None else value / 10_000
