"""Families in which the first idea is wrong: data that does not exist, names that look alike, calls that fail."""

from datetime import date, timedelta

from mcp_grpo.servers.finance.backend import MAX_DAYS
from mcp_grpo.servers.world.records import Company
from mcp_grpo.tasks.desk.drafts import (
    FINANCE,
    REFUSAL,
    SEARCH,
    Draft,
    Pick,
    Unsuitable,
    exact,
    find,
    shown,
    step,
)
from mcp_grpo.tasks.desk.figures import FIGURES, any_figure


NO_COMPANIES = (
    "Ostermark Aviation",
    "Penhallow Biotech",
    "Quarrington Motors",
    "Rosslare Batteries",
    "Silverhythe Apparel",
    "Tamarind Aerospace",
    "Ullverton Brewing",
    "Vantongeren Cement",
    "Wychelm Satellites",
    "Yarrowby Toys",
)
NO_DATA = "The tools have no data for this.\nAnswer: no data available"


def refusal(pick: Pick) -> Draft:
    """Something that nobody knows: no such company, no such day, no such report."""
    kind = pick.random.randrange(4)
    if kind == 0:
        return _no_company(pick)
    if kind == 1:
        return _no_trading(pick)
    company = pick.company()
    market = pick.world.market
    if kind == 2:
        first = market.first_day(company.symbol)
        if first != company.ipo_date:
            raise Unsuitable
        day = (date.fromisoformat(first) - timedelta(days=1 + pick.random.randrange(200))).isoformat()
        question = f"What was the closing price of {company.name} on {day}?"
        calls = step(
            ("getFullChart", {"symbol": company.symbol, "from": day, "to": day}), evidence=[first], fails=True
        )
    else:
        statements = market.income_statements(company.symbol, "FY", 1)
        year = (statements[0].fiscal_year if statements else 2024) + 1 + pick.random.randrange(2)
        key = pick.one(list(FIGURES))
        question = f"What {FIGURES[key][0]} did {company.name} report for fiscal {year}?"
        latest = f'"fiscalYear":"{statements[0].fiscal_year}"' if statements else "[]"
        calls = step(("getIncomeStatement", {"symbol": company.symbol, "limit": 3}), evidence=[latest])
    return Draft(
        question=question + " If there is no such data, say so.",
        answer=REFUSAL,
        steps=[find(company), calls],
        final=NO_DATA,
        servers=(FINANCE,),
        difficulty="medium",
        symbols=(company.symbol,),
    )


def _no_company(pick: Pick) -> Draft:
    name, key = pick.one(NO_COMPANIES), pick.one(list(FIGURES))
    year = 2020 + pick.random.randrange(5)
    return Draft(
        question=f"What was the {FIGURES[key][0]} of {name} in fiscal {year}? If there is no such data, say so.",
        answer=REFUSAL,
        steps=[step(("searchName", {"query": name}), ("searchSymbol", {"query": name.split()[0]}), evidence=["[]"])],
        final=NO_DATA,
        servers=(FINANCE,),
        difficulty="medium",
    )


def _no_trading(pick: Pick) -> Draft:
    company = pick.company(lambda one: bool(pick.world.market.halts(one.symbol)))
    day = str(pick.one(list(pick.world.market.halts(company.symbol))))
    return Draft(
        question=f"At what price did {company.name} close on {day}? If it did not trade, say that there is no price.",
        answer=REFUSAL,
        steps=[
            find(company),
            step(("getFullChart", {"symbol": company.symbol, "from": day, "to": day}), evidence=["Not traded"]),
        ],
        final="It did not trade that day.\nAnswer: there is no price",
        servers=(FINANCE,),
        difficulty="medium",
        symbols=(company.symbol,),
    )


def recovery(pick: Pick) -> Draft:
    """A first call that fails, with an error that says how to go on."""
    if pick.random.randrange(3) == 0:
        return _renamed(pick)
    company = pick.company()
    market = pick.world.market
    year = 2021 + pick.random.randrange(3)
    start, end = f"{year}-01-01", f"{year + 1}-12-31"
    if market.first_day(company.symbol) > f"{year}-02-01":
        raise Unsuitable
    halves = [(f"{one}-01-01", f"{one}-12-31") for one in (year, year + 1)]
    closes = [[bar.close for bar in market.prices(company.symbol, *half)] for half in halves]
    is_high = pick.random.randrange(2) == 0
    best = [max(one) if is_high else min(one) for one in closes]
    value = max(best) if is_high else min(best)
    name = {"symbol": company.symbol}
    return Draft(
        question=f"What was the {'highest' if is_high else 'lowest'} daily close of {company.name} from {start} to {end}, "
        "adjusted for splits?",
        answer=exact(value / 100, company.currency),
        steps=[
            find(company),
            step(("getFullChart", {**name, "from": start, "to": end}), evidence=[str(MAX_DAYS)], fails=True),
            step(
                *(("getFullChart", {**name, "from": first, "to": last}) for first, last in halves),
                evidence=[f",{shown(one / 100)}," for one in best],
            ),
        ],
        final=f"Answer: {value / 100:.2f} {company.currency}",
        servers=(FINANCE,),
        difficulty="medium",
        symbols=(company.symbol,),
    )


def _renamed(pick: Pick) -> Draft:
    changes = [one for one in pick.world.market.symbol_changes() if one.new_symbol in pick.symbols]
    change = pick.one(changes)
    company = pick.world.market.company(change.new_symbol)
    if not company.is_actively_trading:
        raise Unsuitable
    figure = any_figure(pick, company)
    return Draft(
        question=f"Look up the {figure.name} of the company listed as {change.old_symbol}.",
        answer=figure.answer,
        steps=[
            step(("getQuote", {"symbol": change.old_symbol}), evidence=[change.new_symbol], fails=True),
            figure.step,
        ],
        final=f"It is now {company.name} ({company.symbol}).\nAnswer: {figure.text}",
        servers=(FINANCE, SEARCH),
        difficulty="medium",
        symbols=(company.symbol,),
    )


def namesakes(pick: Pick) -> Draft:
    """A figure of a listing beside which there is another of nearly the same name or symbol."""
    market = pick.world.market
    everyone = market.companies()
    company = pick.company(lambda one: any(_is_alike(one, other) for other in everyone))
    other = pick.one([one for one in everyone if _is_alike(company, one)])
    figure = any_figure(pick, company)
    if other.issuer == company.issuer:
        hint = f"not the class {other.share_class} shares"
    elif other.symbol.split(".")[0] == company.symbol.split(".")[0]:
        hint = f"not of {other.symbol}"
    else:
        hint = f"not {other.short_name}"
    return Draft(
        question=f"Look up the {figure.name} of {company.name}, listed on {company.exchange} ({hint}).",
        answer=figure.answer,
        steps=[
            step(("searchName", {"query": company.short_name.split()[0]}), evidence=[shown(company.symbol)]),
            figure.step,
        ],
        final=f"Answer: {figure.text}",
        servers=(FINANCE,),
        difficulty="medium",
        symbols=(company.symbol,),
    )


def _is_alike(one: Company, other: Company) -> bool:
    if one.symbol == other.symbol:
        return False
    if one.issuer == other.issuer:
        return True
    first, second = one.symbol.split(".")[0], other.symbol.split(".")[0]
    return first == second or one.short_name.split()[0] == other.short_name.split()[0]
