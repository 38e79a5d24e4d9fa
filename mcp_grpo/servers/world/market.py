"""The invented market: a database of listings, prices and figures that is the same on every machine."""

import hashlib
import sqlite3
from collections.abc import Sequence
from dataclasses import fields
from datetime import date, timedelta
from operator import attrgetter
from typing import Any

from mcp_grpo.servers.world.companies import COUNTRIES, CURRENCIES, Issuer, make_issuers
from mcp_grpo.servers.world.days import FIRST_DAY, TODAY
from mcp_grpo.servers.world.names import INDUSTRIES
from mcp_grpo.servers.world.prices import make_prices
from mcp_grpo.servers.world.records import (
    Bar,
    CeoChange,
    Company,
    IncomeStatement,
    KeyMetrics,
    MarketError,
    Period,
    Quote,
    Split,
    SymbolChange,
)
from mcp_grpo.servers.world.statements import QUARTERS, Figures, make_figures
from mcp_grpo.servers.world.stream import Stream


MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


def _columns(value: type, *types: str) -> str:
    return ", ".join(f"{one.name} {kind}" for one, kind in zip(fields(value), types, strict=True))


_TEXT, _INT = "TEXT", "INTEGER"
_SCHEMA = f"""
CREATE TABLE company ({_columns(Company, *(_TEXT,) * 3, _INT, *(_TEXT,) * 8, _INT, _TEXT, *(_INT,) * 2, *(_TEXT,) * 2, _INT, *(_TEXT,) * 2)});
CREATE UNIQUE INDEX company_symbol ON company (symbol);
CREATE TABLE split ({_columns(Split, _TEXT, _TEXT, _INT, _INT)});
CREATE TABLE symbol_change ({_columns(SymbolChange, *(_TEXT,) * 5)});
CREATE TABLE ceo_change ({_columns(CeoChange, *(_TEXT,) * 4)});
CREATE TABLE halt (symbol TEXT, date TEXT);
CREATE TABLE price (
    symbol TEXT, date TEXT, open INTEGER, high INTEGER, low INTEGER, close INTEGER, volume INTEGER,
    traded_open INTEGER, traded_high INTEGER, traded_low INTEGER, traded_close INTEGER, traded_volume INTEGER,
    PRIMARY KEY (symbol, date)
) WITHOUT ROWID;
CREATE TABLE income_statement ({_columns(IncomeStatement, _TEXT, _INT, *(_TEXT,) * 4, *(_INT,) * 11)});
CREATE INDEX income_statement_symbol ON income_statement (symbol, period, fiscal_year);
"""
_TABLES = ("company", "split", "symbol_change", "ceo_change", "halt", "price", "income_statement")


class Market:
    """
    The invented market.

    It is made in memory, from integers and SHAKE-256 only. Prices of a listing are made when they are first asked for.

    Args:
        seed (`int`, *optional*, defaults to `0`):
            Which world.

    Example:

    ```python
    market = Market()
    market.prices("VLTA", "2024-03-01", "2024-03-31", adjusted=False)
    ```
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.today = TODAY.isoformat()
        # A server may answer on another thread than the one that made it; never on two at the same time.
        self._database = sqlite3.connect(":memory:", check_same_thread=False, isolation_level=None)
        self._database.executescript(_SCHEMA)
        self._issuers = make_issuers(seed)
        self._by_symbol = {symbol: issuer for issuer in self._issuers for symbol, _, _ in issuer.listings}
        self._priced: set[str] = set()
        self._companies: dict[str, Company] = {}
        self._fill()

    def companies(self) -> list[Company]:
        """All listings, also those that are no longer traded, by symbol."""
        return [self._companies[symbol] for symbol in sorted(self._companies)]

    def company(self, symbol: str) -> Company:
        """
        A listing by its symbol.

        Args:
            symbol (`str`):
                In capitals.

        Returns:
            [`Company`]: The listing.

        Raises:
            [`MarketError`]: There is none; the text names the new symbol of one that was renamed.
        """
        if symbol in self._companies:
            return self._companies[symbol]
        for change in self.symbol_changes():
            if change.old_symbol == symbol:
                raise MarketError(
                    f"{symbol} has been renamed: {change.old_name} became {change.new_name} on {change.date} and is now "
                    f"{change.new_symbol}. Ask for {change.new_symbol}."
                )
        raise MarketError(f"Unknown symbol {symbol!r}. Use searchSymbol or searchName to find the right one.")

    def search_symbol(self, query: str, exchange: str | None = None) -> list[Company]:
        """
        Listings whose symbol contains a text: the same symbol first, then those that begin with it, then the others.

        Args:
            query (`str`):
                Part of a symbol.
            exchange (`str`, *optional*):
                Only listings of this exchange.

        Returns:
            `list[Company]`: The listings.
        """
        part = query.strip().upper()
        found = [one for one in self.companies() if part and part in one.symbol and _is_on(one, exchange)]
        return sorted(found, key=lambda one: (one.symbol != part, not one.symbol.startswith(part), one.symbol))

    def search_name(self, query: str, exchange: str | None = None) -> list[Company]:
        """
        Listings whose present name contains every word of a text; where there are none, any of its words.

        Args:
            query (`str`):
                Words of a name.
            exchange (`str`, *optional*):
                Only listings of this exchange.

        Returns:
            `list[Company]`: Those with the most words first, then by symbol.
        """
        words = query.lower().replace(",", " ").split()
        counts = {
            one.symbol: sum(word in one.name.lower() for word in words)
            for one in self.companies()
            if _is_on(one, exchange)
        }
        best = len(words) if len(words) in counts.values() else 1
        found = [symbol for symbol, count in counts.items() if words and count >= best]
        return [self._companies[symbol] for symbol in sorted(found, key=lambda symbol: (-counts[symbol], symbol))]

    def search(self, query: str) -> list[Company]:
        """Listings by symbol, then by name."""
        found = self.search_symbol(query)
        return found + [one for one in self.search_name(query) if one not in found]

    def prices(self, symbol: str, start: str, end: str, adjusted: bool = True) -> list[Bar]:
        """
        Trading days between two dates, both included.

        Args:
            symbol (`str`):
                Symbol of a listing.
            start (`str`):
                ISO date of the first day.
            end (`str`):
                ISO date of the last day.
            adjusted (`bool`, *optional*, defaults to `True`):
                Whether prices and volumes before a split are in shares of today.

        Returns:
            `list[Bar]`: Oldest first. Days on which the exchange was closed or trading was halted are not there.
        """
        self._price(symbol)
        prefix = "" if adjusted else "traded_"
        names = ", ".join(prefix + one for one in ("open", "high", "low", "close", "volume"))
        rows = self._database.execute(
            f"SELECT date, {names} FROM price WHERE symbol = ? AND date BETWEEN ? AND ? ORDER BY date",
            (symbol, start, end),
        )
        return [
            Bar(date=day, open=opening, high=high, low=low, close=close, volume=volume)
            for day, opening, high, low, close, volume in rows
        ]

    def first_day(self, symbol: str) -> str:
        """First day for which there are prices of a listing."""
        return max(self.company(symbol).ipo_date, FIRST_DAY.isoformat())

    def close_on_or_before(self, symbol: str, day: str, adjusted: bool = True) -> Bar | None:
        """The last trading day up to a date, or `None` where there is none."""
        self._price(symbol)
        row = self._database.execute(
            "SELECT MAX(date) FROM price WHERE symbol = ? AND date <= ?", (symbol, day)
        ).fetchone()
        return self.prices(symbol, row[0], row[0], adjusted)[0] if row[0] else None

    def quote(self, symbol: str) -> Quote:
        """
        The latest trading day of a listing.

        Args:
            symbol (`str`):
                Symbol of a listing.

        Returns:
            [`Quote`]: What it was traded at. A listing that is halted has a `date` before today.

        Raises:
            [`MarketError`]: There is no such listing, or it is no longer traded.
        """
        company = self.company(symbol)
        if company.delisted_on:
            fate = f"it was acquired by {company.acquired_by}" if company.acquired_by else "it is bankrupt"
            raise MarketError(
                f"{symbol} ({company.name}) has no quote: {fate} and was delisted on {company.delisted_on}. Its prices up "
                "to that day are in getFullChart."
            )
        last = self.close_on_or_before(symbol, self.today)
        if last is None:
            raise MarketError(f"{symbol} has never been traded.")
        year = self.prices(symbol, (TODAY - timedelta(days=365)).isoformat(), last.date)
        previous = year[-2].close
        moment = date.fromisoformat(last.date)
        return Quote(
            symbol=symbol,
            name=company.name,
            exchange=company.exchange,
            date=last.date,
            price=last.close,
            previous_close=previous,
            change=last.close - previous,
            change_percentage=_rounded(10_000 * (last.close - previous), previous),
            open=last.open,
            day_low=last.low,
            day_high=last.high,
            year_low=min(bar.low for bar in year),
            year_high=max(bar.high for bar in year),
            volume=last.volume,
            market_cap=_rounded(last.close * company.shares_outstanding, 100),
            timestamp=(moment - date(1970, 1, 1)).days * 86_400 + 20 * 3_600,
        )

    def splits(self, symbol: str) -> list[Split]:
        """Splits of a listing, newest first."""
        self.company(symbol)
        return self._select(Split, "split WHERE symbol = ? ORDER BY date DESC", symbol)

    def symbol_changes(self) -> list[SymbolChange]:
        """Companies that took another name and symbol, oldest first."""
        return self._select(SymbolChange, "symbol_change ORDER BY date, old_symbol")

    def ceo_changes(self) -> list[CeoChange]:
        """Changes at the head of issuers, oldest first."""
        return self._select(CeoChange, "ceo_change ORDER BY date, symbol")

    def halts(self, symbol: str) -> list[str]:
        """Dates on which the exchange was open but the listing was not traded, oldest first."""
        self.company(symbol)
        rows = self._database.execute("SELECT date FROM halt WHERE symbol = ? ORDER BY date", (symbol,))
        return [day for (day,) in rows]

    def income_statements(self, symbol: str, period: Period = "FY", limit: int = 100) -> list[IncomeStatement]:
        """
        Statements as they stand today: restated figures where there are any.

        Args:
            symbol (`str`):
                Symbol of a listing. Classes of shares have the same statements.
            period (`str`, *optional*, defaults to `"FY"`):
                Fiscal years (`"FY"` or `"annual"`), the same quarter of each (`"Q1"` to `"Q4"`), or all quarters
                (`"quarter"`).
            limit (`int`, *optional*, defaults to `100`):
                Most statements to return.

        Returns:
            `list[IncomeStatement]`: Newest first.
        """
        latest = {(one.fiscal_year, one.period): one for one in self._versions(symbol, period)}
        return sorted(latest.values(), key=lambda one: one.date, reverse=True)[:limit]

    def first_reported(self, symbol: str, fiscal_year: int, period: Period) -> IncomeStatement:
        """
        A statement as it was filed first, whether or not it was restated later.

        Args:
            symbol (`str`):
                Symbol of a listing.
            fiscal_year (`int`):
                Calendar year in which the fiscal year ends.
            period (`str`):
                `"FY"` or `"Q1"` to `"Q4"`.

        Returns:
            [`IncomeStatement`]: The first version.
        """
        return next(one for one in self._versions(symbol, period) if one.fiscal_year == fiscal_year)

    def restatements(self) -> list[tuple[IncomeStatement, IncomeStatement]]:
        """Every statement that was replaced and the one that replaced it, by symbol and date."""
        return [
            (self.first_reported(one.symbol, one.fiscal_year, one.period), one)
            for one in self._select(
                IncomeStatement, "income_statement WHERE version = 1 ORDER BY symbol, date, period"
            )
        ]

    def key_metrics(self, symbol: str, period: Period = "FY", limit: int = 100) -> list[KeyMetrics]:
        """
        Metrics as they follow from the statements as they stand today.

        Args:
            symbol (`str`):
                Symbol of a listing.
            period (`str`, *optional*, defaults to `"FY"`):
                As of [`~Market.income_statements`].
            limit (`int`, *optional*, defaults to `100`):
                Most periods to return.

        Returns:
            `list[KeyMetrics]`: Newest first.
        """
        company = self.company(symbol)
        return [self._metrics(company, one) for one in self.income_statements(symbol, period, limit)]

    def digest(self) -> str:
        """SHA-256 of everything in the database."""
        for symbol in sorted(self._companies):
            self._price(symbol)
        total = hashlib.sha256()
        for table in _TABLES:
            order = "symbol, date" if table == "price" else "rowid"
            total.update(repr(self._database.execute(f"SELECT * FROM {table} ORDER BY {order}").fetchall()).encode())
        return total.hexdigest()

    def _fill(self) -> None:
        self._database.execute("BEGIN")
        for issuer in self._issuers:
            figures = make_figures(self.seed, issuer)
            for symbol, share_class, percent in issuer.listings:
                company = self._listing(issuer, symbol, share_class, figures[-1].shares * percent // 100)
                self._companies[symbol] = company
                self._insert("company", [company])
                self._insert(
                    "split",
                    [
                        Split(symbol=symbol, date=day.isoformat(), numerator=numerator, denominator=denominator)
                        for day, numerator, denominator in issuer.splits
                    ],
                )
                self._database.executemany(
                    "INSERT INTO halt VALUES (?, ?)", [(symbol, day.isoformat()) for day in sorted(issuer.halted)]
                )
                self._insert("income_statement", [_statement(symbol, issuer, one) for one in figures])
            for day, old, new in issuer.ceo_changes:
                self._insert("ceo_change", [CeoChange(symbol=issuer.key, date=day.isoformat(), old=old, new=new)])
            if issuer.renamed_on and issuer.former_symbol and issuer.former_name:
                self._insert(
                    "symbol_change",
                    [
                        SymbolChange(
                            date=issuer.renamed_on.isoformat(),
                            old_symbol=issuer.former_symbol,
                            new_symbol=issuer.key,
                            old_name=issuer.former_name,
                            new_name=issuer.short_name,
                        )
                    ],
                )
        self._database.execute("COMMIT")

    def _listing(self, issuer: Issuer, symbol: str, share_class: str, shares: int) -> Company:
        sector, _, goods = INDUSTRIES[issuer.industry]
        kind = f" Class {share_class} shares." if share_class else ""
        return Company(
            symbol=symbol,
            name=f"{issuer.name} Class {share_class}" if share_class else issuer.name,
            short_name=issuer.short_name,
            issuer=issuer.number,
            share_class=share_class,
            exchange=issuer.exchange,
            currency=CURRENCIES[issuer.exchange],
            reported_currency=issuer.reported_currency,
            sector=sector,
            industry=issuer.industry,
            country=COUNTRIES[issuer.exchange],
            ceo=issuer.ceo,
            employees=issuer.employees,
            ipo_date=issuer.ipo_date.isoformat(),
            fiscal_year_end=issuer.fiscal_year_end,
            shares_outstanding=shares,
            description=f"{issuer.short_name} sells {goods}.{kind}",
            website=f"https://www.{''.join(filter(str.isalpha, issuer.stem + issuer.noun)).lower()}.example",
            is_actively_trading=issuer.delisted_on is None,
            delisted_on=issuer.delisted_on.isoformat() if issuer.delisted_on else None,
            acquired_by=None if issuer.acquirer is None else self._issuers[issuer.acquirer].key,
        )

    def _price(self, symbol: str) -> None:
        company = self.company(symbol)
        if symbol in self._priced:
            return
        self._priced.add(symbol)
        issuer = self._by_symbol[symbol]
        draw = Stream(self.seed, "listing", symbol)
        first = issuer.first_price if company.share_class != "B" else issuer.first_price * draw.between(88, 97) // 100
        volume = max(2_000, company.shares_outstanding // draw.between(150, 700))
        rows = make_prices(self.seed, issuer, symbol, first, volume)
        self._database.execute("BEGIN")
        self._database.executemany(f"INSERT INTO price VALUES ({', '.join('?' * 12)})", rows)
        self._database.execute("COMMIT")

    def _insert(self, table: str, values: Sequence[Any]) -> None:
        if values:
            names = [one.name for one in fields(values[0])]
            marks = ", ".join("?" * len(names))
            self._database.executemany(f"INSERT INTO {table} VALUES ({marks})", map(attrgetter(*names), values))

    def _select(self, kind: type[Any], rest: str, *values: object) -> list[Any]:
        names = [one.name for one in fields(kind)]
        rows = self._database.execute(f"SELECT {', '.join(names)} FROM {rest}", values)
        return [kind(**dict(zip(names, row, strict=True))) for row in rows]

    def _versions(self, symbol: str, period: Period) -> list[IncomeStatement]:
        self.company(symbol)
        periods = QUARTERS if period == "quarter" else ("FY",) if period == "annual" else (period,)
        marks = ", ".join("?" * len(periods))
        rest = f"income_statement WHERE symbol = ? AND period IN ({marks}) ORDER BY date, version"
        return self._select(IncomeStatement, rest, symbol, *periods)

    def _metrics(self, company: Company, statement: IncomeStatement) -> KeyMetrics:
        last = self.close_on_or_before(company.symbol, statement.date)
        shares = statement.shares
        capital = to_sales = to_earnings = None
        if last and company.currency == statement.reported_currency:
            percent = next(
                part for symbol, _, part in self._by_symbol[company.symbol].listings if symbol == company.symbol
            )
            capital = _rounded(last.close * (shares * percent // 100), 100)
            if statement.period == "FY":
                to_sales = _rounded(last.close * shares * 100, statement.revenue)
                if statement.net_income > 0:
                    to_earnings = _rounded(last.close * shares * 100, statement.net_income)
        return KeyMetrics(
            symbol=company.symbol,
            fiscal_year=statement.fiscal_year,
            period=statement.period,
            date=statement.date,
            reported_currency=statement.reported_currency,
            market_cap=capital,
            price_to_sales_ratio=to_sales,
            price_to_earnings_ratio=to_earnings,
            revenue_per_share=_rounded(100 * statement.revenue, shares),
            net_income_per_share=_rounded(100 * statement.net_income, shares),
            gross_profit_margin=_rounded(10_000 * statement.gross_profit, statement.revenue),
            operating_profit_margin=_rounded(10_000 * statement.operating_income, statement.revenue),
            net_profit_margin=_rounded(10_000 * statement.net_income, statement.revenue),
        )


def _statement(symbol: str, issuer: Issuer, figures: Figures) -> IncomeStatement:
    return IncomeStatement(
        symbol=symbol,
        fiscal_year=figures.fiscal_year,
        period=figures.period,
        date=figures.end.isoformat(),
        filing_date=figures.filing_date.isoformat(),
        reported_currency=issuer.reported_currency,
        revenue=figures.revenue,
        cost_of_revenue=figures.cost_of_revenue,
        gross_profit=figures.gross_profit,
        operating_expenses=figures.operating_expenses,
        operating_income=figures.operating_income,
        net_income=figures.net_income,
        eps=_rounded(100 * figures.net_income, figures.shares),
        eps_diluted=_rounded(100 * figures.net_income, figures.shares_diluted),
        shares=figures.shares,
        shares_diluted=figures.shares_diluted,
        version=figures.version,
    )


def _is_on(company: Company, exchange: str | None) -> bool:
    return not exchange or company.exchange == exchange.strip().upper()


def _rounded(dividend: int, divisor: int) -> int:
    """A quotient, rounded to the nearest integer, halves away from zero."""
    half = (2 * abs(dividend) + divisor) // (2 * divisor)
    return half if dividend >= 0 else -half
