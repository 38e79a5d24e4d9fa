"""Families about figures of companies: one or two look-ups, or arithmetic on them."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from mcp_grpo.desk.tasks.drafts import (
    Draft,
    Pick,
    Step,
    Unsuitable,
    amount,
    exact,
    find,
    named,
    person,
    shown,
    step,
)
from mcp_grpo.desk.world.records import Company, IncomeStatement, Period


FIGURES = {
    "revenue": ("revenue", "revenue"),
    "grossProfit": ("gross profit", "gross_profit"),
    "operatingIncome": ("operating income", "operating_income"),
    "netIncome": ("net income", "net_income"),
}
QUARTERS: Mapping[Period, str] = {"Q1": "first", "Q2": "second", "Q3": "third", "Q4": "fourth"}
MAX_YEARS = 5
IF_NO_DATA = " If there is no such data, say so."
IF_NO_PRICE = " If it did not trade, say that there is no price."


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of one company."""

    name: str
    answer: Any
    text: str
    step: Step


def statement_figure(pick: Pick, company: Company, *, key: str | None = None, period: Period = "FY") -> Figure:
    """Pick a figure of an income statement."""
    key = key or pick.one(list(FIGURES))
    found = pick.world.market.income_statements(company.symbol, period, MAX_YEARS)
    statement = pick.one(found)
    value = figure_of(statement, key)
    when = f"fiscal {statement.fiscal_year}"
    if period != "FY":
        when = f"the {QUARTERS[period]} quarter of {when}"
    arguments: dict[str, Any] = {"symbol": company.symbol, "limit": len(found)}
    if period != "FY":
        arguments["period"] = period
    return Figure(
        name=f"{FIGURES[key][0]} in {when}",
        answer=amount(value, statement.reported_currency),
        text=f"{value} {statement.reported_currency}",
        step=step(("getIncomeStatement", arguments), evidence=[f'"{key}":{value}']),
    )


def figure_of(statement: IncomeStatement, key: str) -> int:
    """Return a figure of a statement."""
    return getattr(statement, FIGURES[key][1])


def quote_figure(pick: Pick, company: Company) -> Figure:
    """Pick a figure of a quote."""
    quote = pick.world.market.quote(company.symbol)
    names = {
        "price": ("latest share price", quote.price),
        "previousClose": ("closing price before the latest", quote.previous_close),
        "yearHigh": ("highest share price of the past year", quote.year_high),
        "yearLow": ("lowest share price of the past year", quote.year_low),
    }
    key = pick.one(list(names))
    name, cents = names[key]
    return Figure(
        name=name,
        answer=exact(cents / 100, company.currency),
        text=f"{cents / 100:.2f} {company.currency}",
        step=step(("getQuote", {"symbol": company.symbol}), evidence=[f'"{key}":{shown(cents / 100)}']),
    )


def profile_figure(pick: Pick, company: Company) -> Figure:
    """Pick a figure of a profile."""
    names: Mapping[str, tuple[str, Any, Any]] = {
        "ceo": ("chief executive", company.ceo, person(company.ceo)),
        "fullTimeEmployees": ("number of employees", company.employees, exact(company.employees, within=0)),
        "ipoDate": ("date of listing", company.ipo_date, {"type": "date", "value": company.ipo_date}),
    }
    key = pick.one(list(names))
    name, value, answer = names[key]
    return Figure(
        name=name,
        answer=answer,
        text=str(value),
        step=step(("getCompanyProfile", {"symbol": company.symbol}), evidence=[f'"{key}":{shown(value)}']),
    )


def close_figure(pick: Pick, company: Company) -> tuple[str, Figure]:
    """Pick the close of a day after the last split."""
    market = pick.world.market
    since = max([market.first_day(company.symbol), *(split.date for split in market.splits(company.symbol))])
    bar = pick.one(market.prices(company.symbol, since, market.today))
    day, close = bar.date, bar.close / 100
    arguments = {"symbol": company.symbol, "from": day, "to": day}
    return day, Figure(
        name=f"closing price on {day}",
        answer=exact(close, company.currency),
        text=f"{close:.2f} {company.currency}",
        step=step(("getFullChart", arguments), evidence=[f",{shown(close)},"]),
    )


def any_figure(pick: Pick, company: Company) -> Figure:
    """Pick a figure that one look-up gives."""
    return pick.one([statement_figure, quote_figure, profile_figure])(pick, company)


def statement_question(pick: Pick, what: str, name: str, year: int) -> str:
    """Ask about a year's figure, in the same words whether or not there is an answer."""
    ways = (
        f"What {what} did {name} report for fiscal {year}?",
        f"What was the {what} of {name} in fiscal {year}?",
        f"Look up the {what} in fiscal {year} of {name}.",
    )
    return pick.one(ways) + IF_NO_DATA


def price_question(pick: Pick, name: str, day: str) -> str:
    """Ask about the close of a day, in the same words whether or not there is an answer."""
    ways = (
        f"What was the closing price of {name} on {day}?",
        f"At what price did {name} close on {day}?",
        f"Look up the closing price of {name} on {day}.",
    )
    return pick.one(ways) + pick.one((IF_NO_DATA, IF_NO_PRICE))


def perhaps(pick: Pick, *clauses: str) -> str:
    """Pick a clause for half of the questions that have an answer: that there may be none."""
    return pick.one((*clauses, *("" for _ in clauses)))


def lookup(pick: Pick) -> Draft:
    """Draft a question about one figure of one company."""
    company = pick.company()
    kind = pick.random.randrange(5)
    if kind == 0:
        figure = any_figure(pick, company)
        question = f"Look up the {figure.name} of {company.name}.{perhaps(pick, IF_NO_DATA)}"
    elif kind <= 2:
        figure = statement_figure(pick, company)
        what, year = figure.name.split(" in fiscal ")
        name = company.name if company.share_class else pick.one((company.name, company.short_name))
        question = statement_question(pick, what, name, int(year))
    else:
        day, figure = close_figure(pick, company)
        question = price_question(pick, company.name, day)
    return Draft(
        question=question,
        answer=figure.answer,
        steps=[find(company), figure.step],
        final=f"Answer: {figure.text}",
        symbols=(company.symbol,),
    )


def quarter(pick: Pick) -> Draft:
    """Draft a question about a quarter, which the tool returns only when asked for that quarter."""
    company = pick.company()
    period = pick.one(list(QUARTERS))
    figure = statement_figure(pick, company, period=period)
    return Draft(
        question=f"Look up the {figure.name} of {company.name}.{perhaps(pick, IF_NO_DATA)}",
        answer=figure.answer,
        steps=[find(company), figure.step],
        final=f"Answer: {figure.text}",
        symbols=(company.symbol,),
    )


def arithmetic(pick: Pick) -> Draft:
    """Draft a question about a sum or difference of figures of several companies."""
    key, year, first, others = _comparable(pick)
    is_sum = pick.random.randrange(2) == 0
    companies = [first, *pick.some(others, 1 + pick.random.randrange(2) if is_sum else 1)]
    values = [figure_of(_years(pick, company)[year], key) for company in companies]
    result = sum(values) if is_sum else values[0] - values[1]
    if abs(result) * 20 < max(map(abs, values)):
        raise Unsuitable
    names, what = [company.name for company in companies], f"{FIGURES[key][0]} in fiscal {year}"
    currency = first.reported_currency
    question = (
        f"What is the sum of the {what} of {', '.join(names[:-1])} and {names[-1]}, in {currency}?"
        if is_sum
        else f"By how much did the {what} of {names[0]} exceed that of {names[1]}, in {currency}? Negative if it was less."
    )
    program = (" + " if is_sum else " - ").join(map(_operand, values))
    return Draft(
        question=question,
        answer=amount(result, currency),
        steps=[
            find(*companies),
            _statements(companies, key, values),
            step(("run_python", {"code": program}), evidence=[str(result)]),
        ],
        final=f"Answer: {result} {currency}",
        symbols=tuple(company.symbol for company in companies),
    )


def comparison(pick: Pick) -> Draft:
    """Draft a question about which of four companies has the highest figure."""
    key, year, companies, values = _ranked(pick, 4)
    best = companies[values.index(max(values))]
    names = [company.name for company in companies]
    return Draft(
        question=f"Which had the highest {FIGURES[key][0]} in fiscal {year}: {', '.join(names[:-1])} or {names[-1]}?",
        answer=named(best),
        steps=[find(*companies), _statements(companies, key, values)],
        final=f"{_listed(names, values)}\nAnswer: {best.name}",
        symbols=tuple(company.symbol for company in companies),
    )


def ranking(pick: Pick) -> Draft:
    """Draft a question about the order of four companies by a figure."""
    key, year, companies, values = _ranked(pick, 4)
    order = sorted(range(4), key=lambda index: -values[index])
    names = [company.name for company in companies]
    return Draft(
        question=f"Order these companies by {FIGURES[key][0]} in fiscal {year}, highest first: {', '.join(names)}. "
        "Give their symbols, separated by commas.",
        answer={"type": "list", "values": [{"type": "name", "value": companies[index].symbol} for index in order]},
        steps=[find(*companies), _statements(companies, key, values)],
        final=f"{_listed(names, values)}\nAnswer: {', '.join(companies[index].symbol for index in order)}",
        symbols=tuple(company.symbol for company in companies),
    )


def _ranked(pick: Pick, number: int) -> tuple[str, int, list[Company], list[int]]:
    """Pick companies whose figures, in one currency, clearly differ."""
    key, year, first, others = _comparable(pick)
    companies = pick.some([first, *pick.some(others, number - 1)], number)
    values = [figure_of(_years(pick, company)[year], key) for company in companies]
    ordered = sorted(values)
    if any((high - low) * 50 < abs(high) for low, high in pairwise(ordered)):
        raise Unsuitable
    return key, year, companies, values


def _comparable(pick: Pick) -> tuple[str, int, Company, list[Company]]:
    """Pick a figure, a year, a company, and find others that reported it in the same currency: one listing of each."""
    key, first = pick.one(list(FIGURES)), pick.company()
    year = pick.one(list(_years(pick, first)))
    others = {
        company.issuer: company
        for company in pick.companies(lambda one: one.issuer != first.issuer)
        if company.reported_currency == first.reported_currency and year in _years(pick, company)
    }
    return key, year, first, list(others.values())


def _years(pick: Pick, company: Company) -> dict[int, IncomeStatement]:
    found = pick.world.market.income_statements(company.symbol, "FY", MAX_YEARS)
    return {statement.fiscal_year: statement for statement in found}


def _operand(value: int) -> str:
    return str(value) if value >= 0 else f"({value})"


def _listed(names: list[str], values: list[int]) -> str:
    """List the figures that a solution has found, so that it compares what it has written down."""
    return "\n".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))


def _statements(companies: list[Company], key: str, values: list[int]) -> Step:
    calls = [("getIncomeStatement", {"symbol": company.symbol, "limit": MAX_YEARS}) for company in companies]
    return step(*calls, evidence=[f'"{key}":{value}' for value in values])
