"""Families that need a web search, whose results are not always right."""

from mcp_grpo.desk.servers.search.recorded import NUM_SENTENCES
from mcp_grpo.desk.tasks.drafts import (
    Draft,
    Pick,
    Step,
    Unsuitable,
    amount,
    find,
    person,
    shown,
    step,
)
from mcp_grpo.desk.tasks.figures import FIGURES, MAX_YEARS, any_figure, figure_of
from mcp_grpo.desk.world.corpus import best_sentences
from mcp_grpo.desk.world.market import Market
from mcp_grpo.desk.world.pages import Fact
from mcp_grpo.desk.world.records import Company


NUM_RESULTS = 5
STATED = {"revenue": "revenue", "net_income": "netIncome"}


def search_verify(pick: Pick) -> Draft:
    """Draft a question about a company that only the news identifies and a figure that only the data has."""
    kind = pick.one(["contract", "plant_capacity", "product_price"])
    fact = pick.one([one for one in _facts(pick, kind) if not one.is_stale])
    if any(one.symbol != fact.symbol and _clue(one) == _clue(fact) for one in pick.world.corpus.facts(kind)):
        raise Unsuitable  # it fits two companies
    company = pick.world.market.company(fact.symbol)
    clue, query = {
        "contract": (
            f"One listed company signed a contract with {fact.subject} worth {fact.value}",
            f"contract with {fact.subject} worth {fact.value}",
        ),
        "plant_capacity": (
            f"One listed company opened a site in {fact.subject} that handles {fact.value} units a year",
            f"opens in {fact.subject} handles {fact.value} units a year",
        ),
        "product_price": (
            f"One listed company sells the {fact.subject}",
            f"{fact.subject} price launch",
        ),
    }[kind]
    figure = any_figure(pick, company)
    return Draft(
        question=f"{clue}. Find out which, and look up its {figure.name}.",
        answer=figure.answer,
        steps=[*_read(pick, query, fact, f": {_symbol_at(pick, fact)})"), *_renamed(pick, fact), figure.step],
        final=f"It is {company.name}.\nAnswer: {figure.text}",
        symbols=(company.symbol,),
    )


def contradiction(pick: Pick) -> Draft:
    """Draft a question on which sources disagree, because one is out of date."""
    if pick.random.randrange(3) == 0:
        return _contradicting_heads(pick)
    stale = pick.one(
        [one for kind in STATED for one in _facts(pick, kind) if one.is_stale and one.subject[:2] == "FY"]
    )
    company, key = pick.world.market.company(stale.symbol), STATED[stale.kind]
    year = int(stale.subject[2:])
    statement = next(
        (
            one
            for one in pick.world.market.income_statements(company.symbol, "FY", MAX_YEARS)
            if one.fiscal_year == year
        ),
        None,
    )
    if statement is None or stale.amount is None:
        raise Unsuitable
    value = figure_of(statement, key)
    if abs(value - stale.amount) * 100 < abs(value):
        raise Unsuitable
    return Draft(
        question=f"Reports do not agree on the {FIGURES[key][0]} of {company.name} in fiscal {year}; some say "
        f"{stale.value}. Which figure stands today? Give it to the thousand, as filed.",
        answer=amount(value, statement.reported_currency),
        steps=[
            *_read(pick, f"{company.short_name} fiscal {year} {FIGURES[key][0]}", stale),
            find(company),
            step(
                ("getIncomeStatement", {"symbol": company.symbol, "limit": MAX_YEARS}), evidence=[f'"{key}":{value}']
            ),
        ],
        final=f"The figures were restated.\nAnswer: {value} {statement.reported_currency}",
        symbols=(company.symbol,),
    )


def _contradicting_heads(pick: Pick) -> Draft:
    stale = pick.one([one for one in _facts(pick, "ceo") if one.is_stale])
    company = pick.world.market.company(stale.symbol)
    if stale.value == company.ceo:
        raise Unsuitable
    return Draft(
        question=f"Some pages name {stale.value} as chief executive of {company.name}, others do not. Who is it today?",
        answer=person(company.ceo),
        steps=[
            *_read(pick, f"{company.short_name} chief executive CEO {stale.value}", stale),
            find(company),
            step(("getCompanyProfile", {"symbol": company.symbol}), evidence=[f'"ceo":{shown(company.ceo)}']),
        ],
        final=f"Answer: {company.ceo}",
        symbols=(company.symbol,),
    )


def restatement(pick: Pick) -> Draft:
    """Draft a question about the size of a restatement: the first figure is in the news, the second in the data."""
    stale = pick.one(
        [one for kind in STATED for one in _facts(pick, kind) if one.is_stale and one.subject[:2] == "FY"]
    )
    company, key = pick.world.market.company(stale.symbol), STATED[stale.kind]
    year = int(stale.subject[2:])
    first = pick.world.market.first_reported(company.symbol, year, "FY")
    restated = [
        one for one in pick.world.market.income_statements(company.symbol, "FY", MAX_YEARS) if one.fiscal_year == year
    ]
    if not restated:
        raise Unsuitable
    old, new = figure_of(first, key), figure_of(restated[0], key)
    # The news rounds to a tenth of a million, or to ten million.
    rounding = 5_000_000 if abs(old) >= 999_950_000 else 50_000
    if old == new or rounding * 50 > abs(new - old):
        raise Unsuitable
    currency = restated[0].reported_currency
    millions = (new - old) / 1_000_000
    return Draft(
        question=f"{company.name} restated its {FIGURES[key][0]} of fiscal {year}. By how many million {currency} did it "
        "change from what was first reported? Negative if it fell.",
        answer={"type": "number", "value": millions, "unit": f"million {currency}", "tolerance": 0.03},
        steps=[
            *_read(pick, f"{company.short_name} fiscal {year} {FIGURES[key][0]}", stale),
            find(company),
            step(("getIncomeStatement", {"symbol": company.symbol, "limit": MAX_YEARS}), evidence=[f'"{key}":{new}']),
        ],
        final=f"First {stale.value}, now {new} {currency}.\nAnswer: {millions:.2f} million {currency}",
        symbols=(company.symbol,),
    )


def _facts(pick: Pick, kind: str) -> list[Fact]:
    return [
        fact
        for fact in pick.world.corpus.facts(kind)
        if fact.symbol in pick.symbols and _is_plain(pick.world.market, fact.symbol)
    ]


def _is_plain(market: Market, symbol: str) -> bool:
    """Tell whether a company is traded today in one class, so that a name in the news is one listing."""
    company: Company = market.company(symbol)
    return company.is_actively_trading and not company.share_class


def _clue(fact: Fact) -> tuple[str, ...]:
    """Return what a question says about the company to be found."""
    return (fact.subject,) if fact.kind == "product_price" else (fact.subject, fact.value)


def _read(pick: Pick, query: str, fact: Fact, *others: str) -> list[Step]:
    """Search for the page of a fact, and read it where its excerpt does not hold the fact and the other words."""
    hit = next((hit for hit in pick.world.corpus.search(query, NUM_RESULTS) if hit.page.url == fact.url), None)
    wanted = (fact.value, *others)
    if hit is None or not _says(f"{hit.page.title} {hit.page.text}", wanted):  # a filing has thousands, not words
        raise Unsuitable
    search = ("tavily_search", {"query": query, "max_results": NUM_RESULTS})
    if _says(f"{hit.page.title} {best_sentences(hit.page, query, NUM_SENTENCES['basic'])}", wanted):
        return [step(search, evidence=[shown(fact.url), *wanted])]
    return [
        step(search, evidence=[shown(fact.url)]),
        step(("tavily_extract", {"urls": [fact.url]}), evidence=wanted),
    ]


def _says(text: str, wanted: tuple[str, ...]) -> bool:
    return all(one in text for one in wanted)


def _symbol_at(pick: Pick, fact: Fact) -> str:
    """Return a company's symbol at the time of a page about it."""
    for change in pick.world.market.symbol_changes():
        if change.new_symbol == fact.symbol and fact.date < change.date:
            return change.old_symbol
    return fact.symbol


def _renamed(pick: Pick, fact: Fact) -> list[Step]:
    """Return the step that learns today's symbol, where a page has the former one."""
    symbol = _symbol_at(pick, fact)
    if symbol == fact.symbol:
        return []
    return [step(("getQuote", {"symbol": symbol}), evidence=[f"is now {fact.symbol}"], fails=True)]
