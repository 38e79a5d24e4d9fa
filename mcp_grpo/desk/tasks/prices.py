"""Families about prices over time, some of which call for a program."""

import statistics
from datetime import date, timedelta
from itertools import pairwise

from mcp_grpo.desk.tasks.drafts import Draft, Pick, Step, Unsuitable, exact, find, shown, step
from mcp_grpo.desk.tasks.figures import IF_NO_DATA, IF_NO_PRICE, perhaps
from mcp_grpo.desk.world.days import US_EXCHANGES
from mcp_grpo.desk.world.market import MONTHS
from mcp_grpo.desk.world.records import Bar, Company


FIRST_YEAR, LAST_YEAR = 2021, 2024


def time_series(pick: Pick) -> Draft:
    """Draft a question about the daily prices of one month."""
    company = pick.company()
    year, month = _year(pick), 1 + pick.random.randrange(12)
    start, end = _month(year, month)
    bars = _bars(pick, company, start, end, least=15)
    when = f"{MONTHS[month - 1]} {year}"
    high = max(bar.close for bar in bars)
    newest_first = bars[::-1]  # as the tool shows them, which is how a program copies them
    closes = [bar.close / 100 for bar in newest_first]
    kind = pick.random.randrange(4)
    if kind == 0:
        question = f"What was the highest daily close of {company.name} in {when}, adjusted for splits?"
        program, value = f"max({closes})", high / 100
        answer, text = exact(value, company.currency), f"{value:.2f} {company.currency}"
    elif kind == 1:
        days = [bar.date for bar in bars if bar.close == high]
        if len(days) > 1:
            raise Unsuitable
        question = f"On which day of {when} did {company.name} have its highest close, adjusted for splits?"
        by_day = {_day(bar): close for bar, close in zip(newest_first, closes, strict=True)}
        program, value = f"closes = {by_day}\nmax(closes, key=closes.get)", int(days[0][-2:])
        answer, text = {"type": "date", "value": days[0]}, days[0]
    elif kind == 2:
        is_usual = company.exchange in US_EXCHANGES and not any(
            start <= day <= end for day in pick.world.market.halts(company.symbol)
        )
        if is_usual:  # a calendar would do
            raise Unsuitable
        question = f"On how many days of {when} did {company.name} trade?"
        program, value = f"len({[_day(bar) for bar in newest_first]})", len(bars)
        answer, text = exact(value, within=0), str(value)
    else:
        question = (
            f"By how many percent did the split-adjusted close of {company.name} change from the first to the last trading "
            f"day of {when}? Two decimals."
        )
        first, last = closes[-1], closes[0]
        program, value = f"round(100 * ({last} - {first}) / {first}, 2)", round(100 * (last - first) / first, 2)
        answer, text = exact(value, "%", within=0.02), f"{value:.2f}%"
    return Draft(
        question=question + perhaps(pick, IF_NO_DATA),
        answer=answer,
        steps=[
            find(company),
            _chart(company, start, end, bars),
            step(("run_python", {"code": program}), evidence=[str(value)]),
        ],
        final=f"Answer: {text}",
        symbols=(company.symbol,),
    )


def code(pick: Pick) -> Draft:
    """Draft a computation over a quarter of daily prices, which calls for a program."""
    company = pick.company()
    year, quarter = _year(pick), pick.random.randrange(4)
    start, end = _month(year, 3 * quarter + 1)[0], _month(year, 3 * quarter + 3)[1]
    bars = _bars(pick, company, start, end, least=40)
    closes = [bar.close / 100 for bar in bars[::-1]]  # newest first, as the tool shows them
    kind = pick.random.randrange(3)
    if kind == 0:
        what = "population standard deviation of the daily closes"
        program = "import statistics\nround(statistics.pstdev(closes), 4)"
        value = statistics.pstdev(closes)
    elif kind == 1:
        what = "largest fall of the close from an earlier high to a later low (the maximum drawdown, in percent)"
        program = "high = fall = 0\nfor close in reversed(closes):\n    high = max(high, close)\n    fall = max(fall, 100 * (high - close) / high)\nround(fall, 4)"
        high = value = 0.0
        for close in reversed(closes):
            high = max(high, close)
            value = max(value, 100 * (high - close) / high)
    else:
        what = "mean absolute change from one close to the next"
        program = "round(sum(abs(b - a) for a, b in zip(closes, closes[1:])) / (len(closes) - 1), 4)"
        value = statistics.fmean(abs(b - a) for a, b in pairwise(closes))
    if value < 0.05:
        raise Unsuitable
    unit = "%" if kind == 1 else company.currency
    return Draft(
        question=f"What was the {what} of {company.name} from {start} to {end}, adjusted for splits? Three decimals.",
        answer={"type": "number", "value": round(value, 4), "unit": unit, "tolerance": 0.001, "absolute": 0.001},
        steps=[
            find(company),
            _chart(company, start, end, bars),
            step(("run_python", {"code": f"closes = {closes}\n{program}"}), evidence=[str(round(value, 4))]),
        ],
        final=f"Answer: {value:.3f}{'%' if kind == 1 else f' {unit}'}",
        symbols=(company.symbol,),
    )


def adjusted(pick: Pick) -> Draft:
    """Draft a question about a price before a split, as traded or adjusted: two tools that look alike."""
    company = pick.company(lambda one: bool(pick.world.market.splits(one.symbol)))
    split = pick.one(pick.world.market.splits(company.symbol))
    before = date.fromisoformat(split.date) - timedelta(days=1 + pick.random.randrange(90))
    day = before.isoformat()
    is_adjusted = pick.random.randrange(2) == 0
    charts = [pick.world.market.prices(company.symbol, day, day, one) for one in (True, False)]
    if not all(charts):
        raise Unsuitable
    closes = [chart[0].close for chart in charts]
    if abs(closes[0] - closes[1]) * 20 < closes[1]:
        raise Unsuitable
    close = closes[0] if is_adjusted else closes[1]
    how = (
        "adjusted for the splits since then"
        if is_adjusted
        else "as it was paid on that day, before any adjustment for later splits"
    )
    tool = "getFullChart" if is_adjusted else "getUnadjustedChart"
    return Draft(
        question=f"What was the closing price of {company.name} on {day}, {how}?{perhaps(pick, IF_NO_DATA, IF_NO_PRICE)}",
        answer=exact(close / 100, company.currency),
        steps=[
            find(company),
            step((tool, {"symbol": company.symbol, "from": day, "to": day}), evidence=[f",{shown(close / 100)},"]),
        ],
        final=f"Answer: {close / 100:.2f} {company.currency}",
        symbols=(company.symbol,),
    )


def _day(bar: Bar) -> int:
    return int(bar.date[-2:])


def _year(pick: Pick) -> int:
    return FIRST_YEAR + pick.random.randrange(LAST_YEAR - FIRST_YEAR + 1)


def _month(year: int, month: int) -> tuple[str, str]:
    start = date(year, month, 1)
    end = date(year + month // 12, month % 12 + 1, 1) - timedelta(days=1)
    return start.isoformat(), end.isoformat()


def _bars(pick: Pick, company: Company, start: str, end: str, least: int) -> list[Bar]:
    if pick.world.market.first_day(company.symbol) > start:
        raise Unsuitable
    bars = pick.world.market.prices(company.symbol, start, end)
    if len(bars) < least:
        raise Unsuitable
    return bars


def _chart(company: Company, start: str, end: str, bars: list[Bar]) -> Step:
    highest = max(bars, key=lambda bar: bar.close)
    evidence = [f'["{bar.date}",{shown(bar.open / 100)}' for bar in (bars[0], highest, bars[-1])]
    return step(("getFullChart", {"symbol": company.symbol, "from": start, "to": end}), evidence=evidence)
