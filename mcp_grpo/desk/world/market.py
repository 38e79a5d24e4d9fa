"""The invented market: listings, prices and figures that are the same on every machine."""

import hashlib
from bisect import bisect_left, bisect_right
from dataclasses import astuple
from datetime import date, timedelta
from operator import attrgetter

from mcp_grpo.desk.world.companies import COUNTRIES, CURRENCIES, Issuer, make_issuers
from mcp_grpo.desk.world.days import FIRST_DAY, TODAY
from mcp_grpo.desk.world.names import INDUSTRIES
from mcp_grpo.desk.world.prices import PriceRow, make_prices
from mcp_grpo.desk.world.records import (
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
from mcp_grpo.desk.world.statements import QUARTERS, Figures, make_figures
from mcp_grpo.desk.world.stream import Stream


MONTHS = (
    *("January", "February", "March", "April", "May", "June"),
    *("July", "August", "September", "October", "November", "December"),
)


class Market:
    """
    The invented market.

    It is made in memory, from integers and SHAKE-256 only. Prices of a listing are made when they are first asked for.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.today = TODAY.isoformat()
        self._issuers = make_issuers(seed)
        self._by_symbol = {symbol: issuer for issuer in self._issuers for symbol, _, _ in issuer.listings}
        self._companies: dict[str, Company] = {}
        self._statements: dict[str, list[IncomeStatement]] = {}
        self._prices: dict[str, list[PriceRow]] = {}
        for issuer in self._issuers:
            figures = make_figures(seed, issuer)
            for symbol, share_class, percent in issuer.listings:
                shares = figures[-1].shares * percent // 100
                self._companies[symbol] = self._listing(issuer, symbol, share_class, shares)
                self._statements[symbol] = [_statement(symbol, issuer, one) for one in figures]
        self._ceo_changes = [
            CeoChange(symbol=issuer.key, date=day.isoformat(), old=old, new=new)
            for issuer in self._issuers
            for day, old, new in issuer.ceo_changes
        ]
        self._symbol_changes = [
            SymbolChange(
                date=issuer.renamed_on.isoformat(),
                old_symbol=issuer.former_symbol,
                new_symbol=issuer.key,
                old_name=issuer.former_name,
                new_name=issuer.short_name,
            )
            for issuer in self._issuers
            if issuer.renamed_on and issuer.former_symbol and issuer.former_name
        ]

    def companies(self) -> list[Company]:
        """Return all listings by symbol, delisted ones included."""
        return [self._companies[symbol] for symbol in sorted(self._companies)]

    def company(self, symbol: str) -> Company:
        """Return a listing; raise [`MarketError`] if there is none, with the new symbol of a renamed one."""
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
        """Find listings whose symbol contains a text: exact matches first, then prefixes, then others."""
        part = query.strip().upper()
        found = [one for one in self.companies() if part and part in one.symbol and _is_on(one, exchange)]
        return sorted(found, key=lambda one: (one.symbol != part, not one.symbol.startswith(part), one.symbol))

    def search_name(self, query: str, exchange: str | None = None) -> list[Company]:
        """Find listings whose name contains every word of a text or, failing that, any of them."""
        words = query.lower().replace(",", " ").split()
        counts = {
            one.symbol: sum(word in one.name.lower() for word in words)
            for one in self.companies()
            if _is_on(one, exchange)
        }
        best = len(words) if len(words) in counts.values() else 1
        found = [symbol for symbol, count in counts.items() if words and count >= best]
        return [self._companies[symbol] for symbol in sorted(found, key=lambda symbol: (-counts[symbol], symbol))]

    def prices(self, symbol: str, start: str, end: str, adjusted: bool = True) -> list[Bar]:
        """Return the trading days between two dates, both included, oldest first."""
        rows = self._price_rows(symbol)
        found = rows[bisect_left(rows, start, key=_date) : bisect_right(rows, end, key=_date)]
        return [adjusted_bar if adjusted else traded_bar for adjusted_bar, traded_bar in found]

    def first_day(self, symbol: str) -> str:
        """Return the first day with prices of a listing."""
        return max(self.company(symbol).ipo_date, FIRST_DAY.isoformat())

    def close_on_or_before(self, symbol: str, day: str, adjusted: bool = True) -> Bar | None:
        """Return the last trading day up to a date, or `None`."""
        rows = self._price_rows(symbol)
        place = bisect_right(rows, day, key=_date)
        return rows[place - 1][0 if adjusted else 1] if place else None

    def quote(self, symbol: str) -> Quote:
        """Return the latest trading day of a listing; raise [`MarketError`] if it is no longer traded."""
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
        """Return the splits of a listing, newest first."""
        self.company(symbol)
        return sorted(self._splits(symbol), key=attrgetter("date"), reverse=True)

    def symbol_changes(self) -> list[SymbolChange]:
        """Return changes of name and symbol, oldest first."""
        return sorted(self._symbol_changes, key=attrgetter("date", "old_symbol"))

    def ceo_changes(self) -> list[CeoChange]:
        """Return changes of chief executive, oldest first."""
        return sorted(self._ceo_changes, key=attrgetter("date", "symbol"))

    def halts(self, symbol: str) -> list[str]:
        """Return the dates on which trading in a listing was halted, oldest first."""
        self.company(symbol)
        return [day.isoformat() for day in sorted(self._by_symbol[symbol].halted)]

    def income_statements(self, symbol: str, period: Period = "FY", limit: int = 100) -> list[IncomeStatement]:
        """Return statements as they stand today (restated if so), newest first; `"quarter"` means all quarters."""
        latest = {(one.fiscal_year, one.period): one for one in self._versions(symbol, period)}
        return sorted(latest.values(), key=lambda one: one.date, reverse=True)[:limit]

    def first_reported(self, symbol: str, fiscal_year: int, period: Period) -> IncomeStatement:
        """Return a statement as it was first filed."""
        return next(one for one in self._versions(symbol, period) if one.fiscal_year == fiscal_year)

    def restatements(self) -> list[tuple[IncomeStatement, IncomeStatement]]:
        """Return every replaced statement with its replacement, by symbol and date."""
        restated = [one for statements in self._statements.values() for one in statements if one.version == 1]
        restated.sort(key=attrgetter("symbol", "date", "period"))
        return [(self.first_reported(one.symbol, one.fiscal_year, one.period), one) for one in restated]

    def key_metrics(self, symbol: str, period: Period = "FY", limit: int = 100) -> list[KeyMetrics]:
        """Return metrics computed from the statements as they stand today."""
        company = self.company(symbol)
        return [self._metrics(company, one) for one in self.income_statements(symbol, period, limit)]

    def digest(self) -> str:
        """Return the SHA-256 of everything in the market."""
        symbols = list(self._companies)
        tables: tuple[list[tuple[object, ...]], ...] = (
            [
                tuple(int(one) if isinstance(one, bool) else one for one in astuple(self._companies[name]))
                for name in symbols
            ],
            [astuple(one) for symbol in symbols for one in self._splits(symbol)],
            [astuple(one) for one in self._symbol_changes],
            [astuple(one) for one in self._ceo_changes],
            [(symbol, day) for symbol in symbols for day in self.halts(symbol)],
            [
                (symbol, *astuple(adjusted), *astuple(traded)[1:])
                for symbol in sorted(symbols)
                for adjusted, traded in self._price_rows(symbol)
            ],
            [astuple(one) for symbol in symbols for one in self._statements[symbol]],
        )
        return hashlib.sha256("".join(map(repr, tables)).encode()).hexdigest()

    def _splits(self, symbol: str) -> list[Split]:
        return [
            Split(symbol=symbol, date=day.isoformat(), numerator=numerator, denominator=denominator)
            for day, numerator, denominator in self._by_symbol[symbol].splits
        ]

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

    def _price_rows(self, symbol: str) -> list[PriceRow]:
        company = self.company(symbol)
        if symbol not in self._prices:
            issuer = self._by_symbol[symbol]
            draw = Stream(self.seed, "listing", symbol)
            first = issuer.first_price
            if company.share_class == "B":
                first = first * draw.between(88, 97) // 100
            volume = max(2_000, company.shares_outstanding // draw.between(150, 700))
            self._prices[symbol] = make_prices(self.seed, issuer, first, volume)
        return self._prices[symbol]

    def _versions(self, symbol: str, period: Period) -> list[IncomeStatement]:
        self.company(symbol)
        periods = QUARTERS if period == "quarter" else ("FY",) if period == "annual" else (period,)
        found = [one for one in self._statements[symbol] if one.period in periods]
        return sorted(found, key=attrgetter("date", "version"))

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


def _date(row: PriceRow) -> str:
    return row[0].date


def _is_on(company: Company, exchange: str | None) -> bool:
    return not exchange or company.exchange == exchange.strip().upper()


def _rounded(dividend: int, divisor: int) -> int:
    """Divide and round to the nearest integer, halves away from zero."""
    half = (2 * abs(dividend) + divisor) // (2 * divisor)
    return half if dividend >= 0 else -half
