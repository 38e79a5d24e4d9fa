"""The face of a source of financial data: one method per tool."""

from typing import Any, Literal, Protocol


Record = dict[str, Any]
IncomePeriod = Literal["Q1", "Q2", "Q3", "Q4", "FY"]
MetricsPeriod = Literal["Q1", "Q2", "Q3", "Q4", "FY", "annual", "quarter"]

MAX_DAYS = 366
"""Longest range of dates, first and last day included, that one call for prices may ask for."""


class FinanceBackend(Protocol):
    """
    Source of the finance server's data.

    Every method returns records with the field names of Financial Modeling Prep's API, newest first where they are
    dated. Errors that the caller can correct are raised as `ToolError` with a text for the policy. Arguments are already
    checked: `limit` is at least 1, `symbol` is in capitals, dates are ISO dates with `start <= end`, `MAX_DAYS` at most.
    """

    @property
    def today(self) -> str:
        """Return the present day as an ISO date: the last day of prices that are asked for without dates."""
        ...

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """Find listings whose symbol contains `query`: `symbol`, `name`, `currency`, `exchange`."""
        ...

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """Find listings whose company name has the words of `query`: fields as in [`search_symbol`]."""
        ...

    async def quote(self, symbol: str) -> Record:
        """
        Return the latest trading day: `symbol`, `name`, `price`, `changePercentage`, `change`, `volume`, `dayLow`,
        `dayHigh`, `yearHigh`, `yearLow`, `marketCap`, `exchange`, `open`, `previousClose`, `timestamp` (Unix seconds).
        """
        ...

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """Return daily prices adjusted for splits: `date`, `open`, `high`, `low`, `close`, `volume`."""
        ...

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """Return daily prices as traded: fields as in [`full_chart`]."""
        ...

    async def company_profile(self, symbol: str) -> Record:
        """
        Return `symbol`, `companyName`, `exchange`, `currency`, `sector`, `industry`, `country`, `ceo`,
        `fullTimeEmployees`, `ipoDate`, `description`, `isActivelyTrading`, and other short fields that the source has.
        """
        ...

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        """
        Return `date`, `symbol`, `reportedCurrency`, `fiscalYear`, `period`, `filingDate`, `revenue`, `costOfRevenue`,
        `grossProfit`, `operatingExpenses`, `operatingIncome`, `netIncome`, `eps`, `epsDiluted`.
        """
        ...

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        """Return `date`, `symbol`, `reportedCurrency`, `fiscalYear`, `period`, and the metrics that the source has."""
        ...

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        """
        Return `symbol`, `date`, `numerator`, `denominator`: each old share became numerator / denominator new ones.
        """
        ...

    async def close(self) -> None:
        """Close the connections. Called once, when the server ends."""
        ...
