"""Figures that issuers report, as first filed and as restated."""

from dataclasses import dataclass, replace
from datetime import date, timedelta

from mcp_grpo.desk.world.companies import Issuer
from mcp_grpo.desk.world.days import TODAY, month_end
from mcp_grpo.desk.world.names import INDUSTRIES
from mcp_grpo.desk.world.records import Period
from mcp_grpo.desk.world.stream import Stream


FIRST_YEAR = 2019
QUARTERS: tuple[Period, ...] = ("Q1", "Q2", "Q3", "Q4")
MARGINS = {
    "Technology": (52, 78),
    "Healthcare": (48, 72),
    "Communication Services": (40, 62),
    "Financial Services": (55, 75),
    "Real Estate": (45, 68),
    "Utilities": (32, 48),
    "Energy": (26, 46),
}
"""Gross margin in percent, by sector; others have 24 to 42."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """One period of one issuer, in one version. Amounts are whole units of the currency, per-share amounts cents."""

    fiscal_year: int
    period: Period
    version: int
    end: date
    filing_date: date
    revenue: int
    cost_of_revenue: int
    operating_expenses: int
    net_income: int
    shares: int
    shares_diluted: int

    @property
    def gross_profit(self) -> int:
        """Return revenue less its cost."""
        return self.revenue - self.cost_of_revenue

    @property
    def operating_income(self) -> int:
        """Return gross profit less operating expenses."""
        return self.gross_profit - self.operating_expenses


def make_figures(seed: int, issuer: Issuer) -> list[Figures]:
    """Make everything that an issuer has filed until today, oldest first."""
    draw = Stream(seed, "figures", issuer.key)
    sector = INDUSTRIES[issuer.industry][0]
    revenue = draw.pick((40, 90, 200, 450, 900, 2_000, 4_500)) * draw.between(700, 1_600)  # thousands a quarter
    margin = draw.between(*MARGINS.get(sector, (24, 42))) * 10
    spent = margin * draw.between(35, 104) // 100
    shares = revenue * 40_000 * draw.between(7, 60) // issuer.first_price  # at 0.7 to 6 times a year's revenue
    growth = draw.between(-18, 55)
    seasons = [1_000 + draw.between(-90, 90) for _ in QUARTERS]
    delay = draw.between(24, 45)
    filed: list[Figures] = []
    for year in range(FIRST_YEAR, TODAY.year + 2):
        quarters: list[Figures] = []
        for place, period in enumerate(QUARTERS):
            revenue = max(2_000, revenue * (1_000 + growth // 2 + draw.between(-25, 25)) // 1_000)
            shares = shares * (1_000 + draw.between(-6, 5)) // 1_000 // 1_000 * 1_000
            sales = revenue * seasons[place] // 1_000
            cost = sales * (1_000 - margin + draw.between(-22, 22)) // 1_000
            expenses = sales * (spent + draw.between(-18, 18)) // 1_000
            earned = sales - cost - expenses
            taxed = earned * draw.between(74, 82) // 100 if earned > 0 else earned
            end = _quarter_end(year, place, issuer.fiscal_year_end)
            quarters.append(
                Figures(
                    fiscal_year=year,
                    period=period,
                    version=0,
                    end=end,
                    filing_date=_weekday(end + timedelta(days=delay + (21 if place == 3 else 0))),
                    revenue=sales * 1_000,
                    cost_of_revenue=cost * 1_000,
                    operating_expenses=expenses * 1_000,
                    net_income=(taxed - sales * draw.between(2, 16) // 1_000) * 1_000,
                    shares=shares,
                    shares_diluted=shares * draw.between(1_004, 1_030) // 1_000,
                )
            )
        growth += draw.between(-14, 14)
        filed += [*quarters, _whole_year(quarters, 0)]
    last = issuer.delisted_on or TODAY
    first = issuer.ipo_date if issuer.ipo_date.year > FIRST_YEAR else date.min
    years = {one.fiscal_year for one in filed if one.period == "Q1" and one.filing_date > first}
    filed = [one for one in filed if one.fiscal_year in years and one.filing_date <= last]
    return _restated(filed, draw, last) if draw.chance(36) else filed


def _quarter_end(year: int, place: int, last_month: int) -> date:
    """Return the last day of a quarter. A fiscal year is named after the calendar year in which it ends."""
    months = year * 12 + last_month - 1 - 3 * (3 - place)
    return month_end(months // 12, months % 12 + 1)


def _weekday(day: date) -> date:
    return day + timedelta(days=7 - day.weekday()) if day.weekday() > 4 else day


def _whole_year(quarters: list[Figures], version: int) -> Figures:
    last = quarters[-1]
    return replace(
        last,
        period="FY",
        version=version,
        filing_date=max(one.filing_date for one in quarters),
        revenue=sum(one.revenue for one in quarters),
        cost_of_revenue=sum(one.cost_of_revenue for one in quarters),
        operating_expenses=sum(one.operating_expenses for one in quarters),
        net_income=sum(one.net_income for one in quarters),
        shares=sum(one.shares for one in quarters) // 4,
        shares_diluted=sum(one.shares_diluted for one in quarters) // 4,
    )


def _restated(filed: list[Figures], draw: Stream, last: date) -> list[Figures]:
    """Correct one fiscal year by a later filing: a quarter or two, and with them the year."""
    years = [one for one in filed if one.period == "FY" and one.fiscal_year >= 2021]
    years = [one for one in years if one.filing_date + timedelta(days=80) < last]
    if not years:
        return filed
    whole = draw.pick(years)
    day = _weekday(
        whole.filing_date + timedelta(days=draw.between(45, min(200, (last - whole.filing_date).days - 20)))
    )
    chosen = draw.some(QUARTERS, draw.between(1, 2))
    percent = draw.pick((-11, -9, -8, -7, -6, -5, -4, -3, 3, 4))
    quarters: list[Figures] = []
    for one in (one for one in filed if one.fiscal_year == whole.fiscal_year and one.period in QUARTERS):
        if one.period in chosen:
            moved = one.revenue * percent // 100_000 * 1_000
            income = one.net_income + moved * draw.between(55, 80) // 100_000 * 1_000
            one = replace(one, version=1, filing_date=day, revenue=one.revenue + moved, net_income=income)
        quarters.append(one)
    corrected = [one for one in quarters if one.version] + [_whole_year(quarters, 1)]
    return sorted([*filed, *corrected], key=lambda one: (one.end, one.period == "FY", one.version))
