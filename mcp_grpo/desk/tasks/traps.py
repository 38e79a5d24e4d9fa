"""Families in which the first idea is wrong: missing data, similar names, failing calls."""

import hashlib
from datetime import date, timedelta

from mcp_grpo.desk.servers.finance.backend import MAX_DAYS
from mcp_grpo.desk.tasks.drafts import (
    FINANCE,
    REFUSAL,
    SEARCH,
    Draft,
    Pick,
    Step,
    Unsuitable,
    exact,
    find,
    shown,
    step,
)
from mcp_grpo.desk.tasks.figures import FIGURES, any_figure, price_question, statement_question
from mcp_grpo.desk.world.days import FIRST_DAY
from mcp_grpo.desk.world.names import CLASS_STEMS, PAIR_STEMS, STEMS, TWIN_STEMS
from mcp_grpo.desk.world.records import Company


NO_NOUNS = (
    "Airlines", "Apparel", "Aviation", "Batteries", "Biotech", "Brewing", "Cement", "Gaming", "Glass", "Motors",
    "Railways", "Satellites", "Shipyards", "Timber", "Toys", "Vineyards",
)  # fmt: skip
"""Second words that no company has."""

ENDINGS = (" Inc.", " Corp.", " Company", " Holdings", " plc", " AG")
NO_DATA = "The tools have no data for this.\nAnswer: no data available"


def refusal(pick: Pick) -> Draft:
    """Draft a question without an answer: no such company, day or report."""
    return pick.one([_no_company, _no_trading, _not_yet_listed, _no_report])(pick)


def _no_company(pick: Pick) -> Draft:
    name, key = pick.one(_invented(pick)), pick.one(list(FIGURES))
    found = pick.world.market.search_name(name)
    alike = [shown(one.symbol) for one in found] if found else ["[]"]
    year = 2020 + pick.random.randrange(5)
    return Draft(
        question=statement_question(pick, FIGURES[key][0], name + pick.one(("", pick.one(ENDINGS))), year),
        answer=REFUSAL,
        steps=[step(("searchName", {"query": name}), ("searchSymbol", {"query": name.split()[0]}), evidence=alike)],
        final=f"There is no company called {name}.\nAnswer: no data available",
    )


def _invented(pick: Pick) -> list[str]:
    """
    Invent names that no company has.

    Some begin like a company of this split; the others are dealt out among the companies, so that no other split has them.
    """
    companies = pick.world.market.companies()
    stems = [*STEMS, *PAIR_STEMS, *(stem for pair in (*CLASS_STEMS, *TWIN_STEMS) for stem in pair)]
    former = {change.old_name.split()[0] for change in pick.world.market.symbol_changes()}
    names: list[str] = []
    for stem in stems:
        number = int.from_bytes(hashlib.sha256(stem.encode()).digest()[:4], "big")
        alike = [one for one in companies if one.short_name.split()[0] == stem.split()[0]]
        alike = alike or [companies[number % len(companies)]]
        if all(one.symbol in pick.symbols for one in alike) and stem.split()[0] not in former:
            names += [f"{stem} {NO_NOUNS[(number + index) % len(NO_NOUNS)]}" for index in range(3)]
    return names


def _no_trading(pick: Pick) -> Draft:
    company = pick.company(lambda one: bool(pick.world.market.halts(one.symbol)))
    day = str(pick.one(list(pick.world.market.halts(company.symbol))))
    return _no_price(
        pick, company, day, step(("getFullChart", _day(company, day)), evidence=["Not traded"]), "It did not trade."
    )


def _not_yet_listed(pick: Pick) -> Draft:
    company = pick.company(lambda one: pick.world.market.first_day(one.symbol) == one.ipo_date)
    first = date.fromisoformat(company.ipo_date)
    before = first - timedelta(days=1 + pick.random.randrange(200))
    if before < FIRST_DAY:
        raise Unsuitable
    day = before.isoformat()
    calls = step(("getFullChart", _day(company, day)), evidence=[company.ipo_date], fails=True)
    return _no_price(pick, company, day, calls, "It was not listed yet.")


def _no_price(pick: Pick, company: Company, day: str, calls: Step, why: str) -> Draft:
    return Draft(
        question=price_question(pick, company.name, day),
        answer=REFUSAL,
        steps=[find(company), calls],
        final=f"{why}\nAnswer: there is no price",
        symbols=(company.symbol,),
    )


def _no_report(pick: Pick) -> Draft:
    company = pick.company()
    years = [one.fiscal_year for one in pick.world.market.income_statements(company.symbol, "FY")]
    if not years:
        raise Unsuitable
    # The next, or one before the first, where that is not long ago.
    year = pick.one([years[0] + 1, *(year - 1 for year in years[-1:] if year > FIRST_DAY.year)])
    key = pick.one(list(FIGURES))
    return Draft(
        question=statement_question(pick, FIGURES[key][0], company.name, year),
        answer=REFUSAL,
        steps=[
            find(company),
            step(
                ("getIncomeStatement", {"symbol": company.symbol, "limit": len(years) + 1}),
                evidence=[f'"fiscalYear":"{one}"' for one in (years[0], years[-1])],
            ),
        ],
        final=NO_DATA,
        symbols=(company.symbol,),
    )


def _day(company: Company, day: str) -> dict[str, str]:
    return {"symbol": company.symbol, "from": day, "to": day}


def recovery(pick: Pick) -> Draft:
    """Draft a question whose first call fails, with an error that says how to go on."""
    if pick.random.randrange(3) == 0:
        return _renamed(pick)
    company = pick.company()
    market = pick.world.market
    year = 2021 + pick.random.randrange(3)
    start, end = f"{year}-01-01", f"{year + 1}-12-31"
    weeks = [(start, f"{year}-01-10"), (f"{year + 1}-12-22", end)]
    bars = [market.prices(company.symbol, *week) for week in weeks]
    if company.ipo_date > start or not all(bars):
        raise Unsuitable
    first, last = (bar.close / 100 for bar in (bars[0][0], bars[1][-1]))
    change = round(100 * (last - first) / first, 2)
    name = {"symbol": company.symbol}
    return Draft(
        question=f"By how many percent did the split-adjusted close of {company.name} change from the first trading day of {year} "
        f"to the last trading day of {year + 1}? Two decimals.",
        answer=exact(change, "%", within=0.02),
        steps=[
            find(company),
            step(("getFullChart", {**name, "from": start, "to": end}), evidence=[str(MAX_DAYS)], fails=True),
            step(
                *(("getFullChart", {**name, "from": week_start, "to": week_end}) for week_start, week_end in weeks),
                evidence=[f'["{bar.date}",{shown(bar.open / 100)}' for bar in (bars[0][0], bars[1][-1])],
            ),
            step(("run_python", {"code": f"round(100 * ({last} - {first}) / {first}, 2)"}), evidence=[str(change)]),
        ],
        final=f"Answer: {change:.2f}%",
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
        symbols=(company.symbol,),
    )


def namesakes(pick: Pick) -> Draft:
    """Draft a question about a listing with a namesake: nearly the same name or symbol."""
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
        symbols=(company.symbol,),
    )


def _is_alike(one: Company, other: Company) -> bool:
    if one.symbol == other.symbol:
        return False
    if one.issuer == other.issuer:
        return True
    first, second = one.symbol.split(".")[0], other.symbol.split(".")[0]
    return first == second or one.short_name.split()[0] == other.short_name.split()[0]
