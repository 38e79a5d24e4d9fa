"""Records of the invented market."""

from dataclasses import dataclass
from typing import Literal


Period = Literal["Q1", "Q2", "Q3", "Q4", "FY", "annual", "quarter"]


class MarketError(LookupError):
    """A question without an answer in the market. Its text says what to ask instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Company:
    """
    A listing and the company behind it. Two classes of shares are two of these with the same `issuer`.

    `fiscal_year_end` is the last month of the fiscal year, 1 to 12; a fiscal year is named after the calendar year in
    which it ends. `currency` is that of prices, `reported_currency` that of figures. `shares_outstanding` are those of
    this class. `acquired_by` is the symbol of the company that bought a delisted one.
    """

    symbol: str
    name: str
    short_name: str
    issuer: int
    share_class: str
    exchange: str
    currency: str
    reported_currency: str
    sector: str
    industry: str
    country: str
    ceo: str
    employees: int
    ipo_date: str
    fiscal_year_end: int
    shares_outstanding: int
    description: str
    website: str
    is_actively_trading: bool
    delisted_on: str | None
    acquired_by: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One trading day. Prices are cents of the listing's currency."""

    date: str
    open: int
    high: int
    low: int
    close: int
    volume: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Quote:
    """The latest trading day. Prices are cents, `market_cap` whole units, and `change_percentage` hundredths of a percent."""

    symbol: str
    name: str
    exchange: str
    date: str
    price: int
    previous_close: int
    change: int
    change_percentage: int
    open: int
    day_low: int
    day_high: int
    year_low: int
    year_high: int
    volume: int
    market_cap: int
    timestamp: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """On `date` each share became `numerator / denominator` shares."""

    symbol: str
    date: str
    numerator: int
    denominator: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IncomeStatement:
    """
    One period. Amounts are whole units of `reported_currency`; `eps` and `eps_diluted` are cents, rounded half up.

    Shares are adjusted for splits. `version` is 0 as filed first and 1 as restated.
    """

    symbol: str
    fiscal_year: int
    period: Period
    date: str
    filing_date: str
    reported_currency: str
    revenue: int
    cost_of_revenue: int
    gross_profit: int
    operating_expenses: int
    operating_income: int
    net_income: int
    eps: int
    eps_diluted: int
    shares: int
    shares_diluted: int
    version: int

    @property
    def restated(self) -> bool:
        """Tell whether these figures replace earlier ones."""
        return self.version > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyMetrics:
    """
    What follows from a statement and from the last price of its period. Ratios are ten-thousandths, per-share amounts
    hundredths, all rounded half up. `None` where there is no price, where price and figures are in different
    currencies, or where the ratio would be negative; the two price ratios are of whole years only.
    """

    symbol: str
    fiscal_year: int
    period: Period
    date: str
    reported_currency: str
    market_cap: int | None
    price_to_sales_ratio: int | None
    price_to_earnings_ratio: int | None
    revenue_per_share: int
    net_income_per_share: int
    gross_profit_margin: int
    operating_profit_margin: int
    net_profit_margin: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SymbolChange:
    """A company that took another name and another symbol."""

    date: str
    old_symbol: str
    new_symbol: str
    old_name: str
    new_name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CeoChange:
    """A change of chief executive."""

    symbol: str
    date: str
    old: str
    new: str
