from datetime import date
from fractions import Fraction

import pytest

from mcp_grpo.desk.world.days import trading_days
from mcp_grpo.desk.world.market import Market
from mcp_grpo.desk.world.records import IncomeStatement, MarketError


DIGEST = "c8e1c4d3d327275ffd8ab42f9b5337ce833455fc0057347f3915a6d6c6f677b2"
"""Of the whole database with seed 0. It changes only when the world is meant to change."""


@pytest.fixture(scope="module")
def market() -> Market:
    return Market()


def rounded(value: Fraction) -> int:
    """Halves away from zero."""
    return int(abs(value) + Fraction(1, 2)) * (1 if value >= 0 else -1)


def statements(market: Market) -> list[IncomeStatement]:
    periods = ("FY", "quarter")
    return [
        one
        for company in market.companies()
        for period in periods
        for one in market.income_statements(company.symbol, period)
    ]


@pytest.mark.full
def test_the_market_of_a_seed_is_the_same_to_the_last_byte(market: Market) -> None:
    assert market.digest() == DIGEST


def test_another_seed_is_another_market(market: Market) -> None:
    other = Market(seed=1)
    assert other.company("VLTA") != market.company("VLTA")
    assert {one.symbol for one in other.companies()} != {one.symbol for one in market.companies()}


@pytest.mark.parametrize("seed", [0, 1, 2, 7])
def test_every_trap_is_there_often_enough_to_ask_about_it(seed: int) -> None:
    market = Market(seed)
    companies = market.companies()
    symbols = [one.symbol for one in companies]
    assert len(symbols) == len(set(symbols)) >= 150
    assert sum(bool(market.splits(one)) for one in symbols) >= 30
    assert sum(bool(market.halts(one)) for one in symbols) >= 30
    assert len({restated.symbol for _, restated in market.restatements()}) >= 25
    assert len(market.symbol_changes()) >= 10
    assert sum(not one.is_actively_trading for one in companies) >= 8
    assert sum(one.fiscal_year_end != 12 for one in companies) >= 40
    assert sum(one.currency != "USD" for one in companies) >= 12
    assert sum(one.currency != one.reported_currency for one in companies) >= 3
    assert sum(one.share_class == "B" for one in companies) >= 5
    assert sum(one.ipo_date > "2021-01-04" for one in companies) >= 8
    assert sum(symbol.split(".")[0] in symbols for symbol in symbols if "." in symbol) >= 4
    assert market.halts(next(one.symbol for one in companies if market.today in market.halts(one.symbol)))


def test_quarters_add_up_to_the_year(market: Market) -> None:
    num_years = 0
    for company in market.companies():
        quarters = market.income_statements(company.symbol, "quarter")
        for year in market.income_statements(company.symbol, "FY"):
            parts = [one for one in quarters if one.fiscal_year == year.fiscal_year]
            first = [market.first_reported(one.symbol, one.fiscal_year, one.period) for one in [*parts, year]]
            assert len(parts) == 4
            for amount in ("revenue", "cost_of_revenue", "gross_profit", "operating_expenses", "net_income"):
                assert sum(getattr(one, amount) for one in parts) == getattr(year, amount)
                assert sum(getattr(one, amount) for one in first[:4]) == getattr(first[4], amount)
            num_years += 1
    assert num_years > 500


def test_a_statement_agrees_with_itself(market: Market) -> None:
    for one in statements(market):
        assert one.gross_profit == one.revenue - one.cost_of_revenue
        assert one.operating_income == one.gross_profit - one.operating_expenses
        assert one.eps == rounded(Fraction(100 * one.net_income, one.shares))
        assert one.eps_diluted == rounded(Fraction(100 * one.net_income, one.shares_diluted))
        assert one.date < one.filing_date <= market.today


def test_a_fiscal_year_is_named_after_the_year_in_which_it_ends(market: Market) -> None:
    for company in market.companies():
        for one in market.income_statements(company.symbol, "FY"):
            end = date.fromisoformat(one.date)
            assert (end.year, end.month) == (one.fiscal_year, company.fiscal_year_end)


def test_a_restated_statement_replaces_one_that_was_filed_earlier(market: Market) -> None:
    for first, restated in market.restatements():
        assert first.revenue != restated.revenue
        assert first.filing_date < restated.filing_date
        shown = market.income_statements(restated.symbol, restated.period)
        assert restated in shown
        assert first not in shown
        assert restated.restated


@pytest.mark.full
def test_prices_as_traded_and_adjusted_tell_exactly_the_same(market: Market) -> None:
    for symbol in [one.symbol for one in market.companies() if market.splits(one.symbol)]:
        adjusted = market.prices(symbol, "2021-01-01", market.today)
        traded = market.prices(symbol, "2021-01-01", market.today, adjusted=False)
        for one, other in zip(adjusted, traded, strict=True):
            ratio = Fraction(1)
            for split in market.splits(symbol):
                if one.date < split.date:
                    ratio *= Fraction(split.numerator, split.denominator)
            assert (other.open, other.close) == (one.open * ratio, one.close * ratio)
            assert (other.high, other.low, other.volume) == (one.high * ratio, one.low * ratio, one.volume / ratio)


def test_a_split_is_a_jump_of_the_price_as_traded(market: Market) -> None:
    symbol, split = next(
        (one.symbol, split)
        for one in market.companies()
        for split in market.splits(one.symbol)
        if split.numerator >= 4 * split.denominator and len(market.splits(one.symbol)) == 1
    )
    after = market.prices(symbol, split.date, split.date, adjusted=False)[0]
    before = [bar for bar in market.prices(symbol, "2021-01-01", split.date, adjusted=False) if bar.date < split.date]
    assert before[-1].close > 2 * after.close


def test_a_day_lies_between_its_low_and_its_high(market: Market) -> None:
    for company in market.companies()[::5]:
        for bar in market.prices(company.symbol, "2021-01-01", market.today):
            assert 0 < bar.low <= min(bar.open, bar.close) <= max(bar.open, bar.close) <= bar.high
            assert bar.volume > 0


def test_there_are_prices_on_the_days_of_the_exchange_but_for_halts(market: Market) -> None:
    for company in market.companies()[::3]:
        halts = market.halts(company.symbol)
        last = company.delisted_on or market.today
        days = [day.isoformat() for day in trading_days(company.exchange)]
        open_days = [day for day in days if market.first_day(company.symbol) <= day <= last]
        assert set(halts) <= set(days)
        bars = market.prices(company.symbol, "2021-01-01", market.today)
        assert [bar.date for bar in bars] == [day for day in open_days if day not in halts]


@pytest.mark.parametrize(
    ("exchange", "closed"),
    [
        ("NYSE", ["2021-04-02", "2022-06-20", "2023-11-23", "2024-07-04", "2025-05-26"]),
        ("LSE", ["2022-04-18", "2023-05-01", "2024-08-26"]),
        ("XETRA", ["2023-05-01", "2024-12-24"]),
    ],
)
def test_exchanges_keep_their_own_holidays(exchange: str, closed: list[str]) -> None:
    days = {day.isoformat() for day in trading_days(exchange)}
    assert not days & set(closed)
    assert min(days) == "2021-01-04"
    assert max(days) == "2025-06-30"


def test_a_quote_is_the_last_trading_day(market: Market) -> None:
    for company in [one for one in market.companies() if one.is_actively_trading][::4]:
        quote = market.quote(company.symbol)
        bars = market.prices(company.symbol, "2024-06-30", market.today)
        assert (quote.price, quote.previous_close, quote.date) == (bars[-1].close, bars[-2].close, bars[-1].date)
        assert quote.change == quote.price - quote.previous_close
        assert quote.year_high == max(bar.high for bar in bars)
        assert quote.market_cap == rounded(Fraction(quote.price * company.shares_outstanding, 100))


def test_a_halted_listing_is_quoted_as_of_its_last_day(market: Market) -> None:
    halted = [one for one in market.companies() if market.today in market.halts(one.symbol)]
    assert halted
    for company in halted:
        assert market.quote(company.symbol).date < market.today


def test_key_metrics_follow_from_the_statement_and_the_price(market: Market) -> None:
    num_ratios = 0
    for company in market.companies()[::4]:
        for one in market.key_metrics(company.symbol):
            statement = next(
                two for two in market.income_statements(company.symbol) if two.fiscal_year == one.fiscal_year
            )
            assert one.gross_profit_margin == rounded(Fraction(10_000 * statement.gross_profit, statement.revenue))
            assert one.revenue_per_share == rounded(Fraction(100 * statement.revenue, statement.shares))
            bar = market.close_on_or_before(company.symbol, one.date)
            if company.currency != company.reported_currency or bar is None:
                assert one.market_cap is None
                assert one.price_to_sales_ratio is None
            else:
                value = Fraction(bar.close * statement.shares, 100)
                assert one.price_to_sales_ratio == rounded(10_000 * value / statement.revenue)
                num_ratios += 1
    assert num_ratios > 50


def test_classes_of_shares_share_their_figures_but_not_their_price(market: Market) -> None:
    a, b, lookalike = (market.company(symbol) for symbol in ("VLTA", "VLTB", "VLTAA"))
    assert a.issuer == b.issuer != lookalike.issuer
    assert market.income_statements("VLTA")[0].revenue == market.income_statements("VLTB")[0].revenue
    assert market.quote("VLTA").price != market.quote("VLTB").price


def test_symbols_that_do_not_answer_say_why(market: Market) -> None:
    change = market.symbol_changes()[0]
    with pytest.raises(MarketError) as renamed:
        market.quote(change.old_symbol)
    assert change.new_symbol in str(renamed.value)
    gone = next(one for one in market.companies() if one.delisted_on)
    with pytest.raises(MarketError) as delisted:
        market.quote(gone.symbol)
    assert str(gone.delisted_on) in str(delisted.value)
    with pytest.raises(MarketError) as unknown:
        market.company("NOPE")
    assert "searchSymbol" in str(unknown.value)


def test_search_finds_lookalikes_too(market: Market) -> None:
    assert [one.symbol for one in market.search_symbol("vlta")] == ["VLTA", "VLTAA"]
    names = {one.short_name for one in market.search_name("northwind")}
    assert names == {"Northwind Logistics", "Northwind Logic"}
    assert [one.short_name for one in market.search_name("Northwind logistics")] == ["Northwind Logistics"]
    assert all(one.exchange == "LSE" for one in market.search_symbol("A", "LSE"))
    assert market.search_name("") == []
