"""What a source of financial data has to answer: one method per tool."""

from typing import Any, Literal, Protocol


Record = dict[str, Any]
IncomePeriod = Literal["Q1", "Q2", "Q3", "Q4", "FY"]
MetricsPeriod = Literal["Q1", "Q2", "Q3", "Q4", "FY", "annual", "quarter"]

MAX_DAYS = 366
"""Longest range of dates, first and last day included, that one call for prices may ask for."""


class FinanceBackend(Protocol):
    """
    Where the finance server has its data from.

    Every method returns records with the field names of Financial Modeling Prep's API, newest first where they are
    dated. What the caller can mend is raised as `mcp.server.mcpserver.exceptions.ToolError` with a text that says what
    to do; the policy reads it. The server has checked and filled in the arguments: `limit` is at least 1, `symbol` is
    in capitals, and dates are ISO dates with `start <= end` that are at most `MAX_DAYS` days.
    """

    @property
    def today(self) -> str:
        """The present day as an ISO date: the last day of prices that are asked for without dates."""
        ...

    async def search_symbol(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """Listings whose symbol begins with or contains `query`: `symbol`, `name`, `currency`, `exchange`."""
        ...

    async def search_name(self, query: str, limit: int, exchange: str | None) -> list[Record]:
        """Listings whose company name holds the words of `query`: same fields as [`search_symbol`]."""
        ...

    async def quote(self, symbol: str) -> Record:
        """
        The latest trading day: `symbol`, `name`, `price`, `changePercentage`, `change`, `volume`, `dayLow`, `dayHigh`,
        `yearHigh`, `yearLow`, `marketCap`, `exchange`, `open`, `previousClose`, `timestamp` (Unix seconds).
        """
        ...

    async def full_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """Daily prices adjusted for splits: `date`, `open`, `high`, `low`, `close`, `volume`."""
        ...

    async def unadjusted_chart(self, symbol: str, start: str, end: str) -> list[Record]:
        """Daily prices as they were traded: same fields as [`full_chart`]."""
        ...

    async def company_profile(self, symbol: str) -> Record:
        """
        `symbol`, `companyName`, `exchange`, `currency`, `sector`, `industry`, `country`, `ceo`, `fullTimeEmployees`,
        `ipoDate`, `description`, `isActivelyTrading`, and what else the source has that is short.
        """
        ...

    async def income_statement(self, symbol: str, limit: int, period: IncomePeriod) -> list[Record]:
        """
        `date`, `symbol`, `reportedCurrency`, `fiscalYear`, `period`, `filingDate`, `revenue`, `costOfRevenue`,
        `grossProfit`, `operatingExpenses`, `operatingIncome`, `netIncome`, `eps`, `epsDiluted`.
        """
        ...

    async def key_metrics(self, symbol: str, limit: int, period: MetricsPeriod) -> list[Record]:
        """`date`, `symbol`, `reportedCurrency`, `fiscalYear`, `period`, and the metrics that the source has."""
        ...

    async def stock_splits(self, symbol: str, limit: int) -> list[Record]:
        """`symbol`, `date`, `numerator`, `denominator`: each old share became numerator / denominator new ones."""
        ...

    async def close(self) -> None:
        """Let go of connections. Called once, when the server ends."""
        ...
