"""Write the pages about the invented market, and record what each of them states."""

import re
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import date, timedelta
from itertools import groupby

from mcp_grpo.desk.world.days import FIRST_DAY, TODAY
from mcp_grpo.desk.world.market import MONTHS, Market
from mcp_grpo.desk.world.names import FAMILY_NAMES, GIVEN_NAMES, TOWNS
from mcp_grpo.desk.world.pages import SIGNS, Fact, Page, compared, long_date, money, runs, thousands
from mcp_grpo.desk.world.records import Company, IncomeStatement, Period
from mcp_grpo.desk.world.stream import Stream


WIRE = "meridianwire.example"
POST = "tickerpost.example"
FILINGS = "filings.example"
PEOPLE = "boardroombrief.example"
INDUSTRY = "plantandport.example"
NOTES = "streetnotes.example"
RUMOURS = "marketwhispers.example"
MIRROR = "companymirror.example"
BROKERS = (
    "Halverson Stroud", "Pike & Lanyon", "Corvus Research", "Tidemark Securities", "Abbot Lane", "Greywell Partners",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Claim:
    fact: Fact
    weight: int  # the claim with the larger weight is right; of equals, the later page
    published: str


class Newsroom:
    """Writer of all pages."""

    def __init__(self, market: Market) -> None:
        self._market = market
        self._claims: dict[str, list[_Claim]] = defaultdict(list)  # by symbol
        self._renames = {change.new_symbol: change for change in market.symbol_changes()}
        self._changes = {change.symbol: change for change in market.ceo_changes()}
        self._companies = [one for one in market.companies() if one.share_class != "B"]
        self._active = [one for one in self._companies if one.is_actively_trading]
        self.pages: list[Page] = []
        self._published: dict[str, str] = {}  # by address
        self._corrections: dict[str, list[tuple[IncomeStatement, IncomeStatement]]] = defaultdict(list)
        for first, restated in market.restatements():
            self._corrections[restated.symbol].append((first, restated))

    def write(self) -> tuple[list[Page], list[Fact]]:
        """Write all pages, and return them with the facts they state."""
        for company in self._companies:
            draw = Stream(self._market.seed, "news", company.symbol)
            self._earnings(company, draw)
            if self._corrections[company.symbol]:
                self._restatement(company)
            self._leaders(company, draw)
            self._headquarters(company, draw)
            self._plant(company, draw)
            self._contract(company, draw)
            self._product(company, draw)
            self._targets(company, draw)
            self._takeover(company, draw)
            self._listing(company, draw)
            self._sheet(company, draw)
        self._wraps()
        self._elsewhere()
        return self.pages, self._facts()

    def _facts(self) -> list[Fact]:
        def same(claim: _Claim) -> tuple[str, str, str]:
            return claim.fact.kind, claim.fact.symbol, claim.fact.subject

        facts: list[Fact] = []
        every = [claim for claims in self._claims.values() for claim in claims]
        for _, group in groupby(sorted(every, key=lambda one: (*same(one), one.weight, one.published)), same):
            claims = [claim.fact for claim in group]
            right = claims[-1]
            for fact in claims:
                is_stale = (fact.value, fact.amount) != (right.value, right.amount)
                facts.append(replace(fact, is_stale=is_stale, superseded_by=right.url if is_stale else None))
        return facts

    def _page(self, domain: str, day: date, kind: str, title: str, *sentences: str) -> str:
        slug = "-".join(re.findall("[a-z0-9]+", title.lower()))
        url = f"https://{domain}/{day:%Y/%m}/{slug}"
        number = 2
        while url in self._published:
            url = f"https://{domain}/{day:%Y/%m}/{slug}-{number}"
            number += 1
        self._published[url] = day.isoformat()
        text = " ".join(sentences)
        self.pages.append(Page(url=url, domain=domain, title=title, published=day.isoformat(), text=text, kind=kind))
        return url

    def _state(
        self,
        kind: str,
        company: Company,
        subject: str,
        value: str,
        url: str,
        day: date | str,
        amount: int | None = None,
        weight: int = 1,
    ) -> None:
        fact = Fact(
            kind=kind, symbol=company.symbol, subject=subject, value=value, amount=amount, date=str(day), url=url
        )
        self._claims[company.symbol].append(_Claim(fact=fact, weight=weight, published=self._published[url]))

    def _known(self, company: Company, day: date) -> tuple[str, str]:
        """Return the name and symbol of a company on a day."""
        change = self._renames.get(company.symbol)
        if change and day.isoformat() < change.date:
            return change.old_name, change.old_symbol
        return company.short_name, company.symbol

    def _tag(self, company: Company, day: date) -> str:
        name, symbol = self._known(company, day)
        return f"{name} ({company.exchange}: {symbol})"

    def _span(self, company: Company, margin: int = 30) -> tuple[date, date]:
        """Return the first and last day on which something may happen to a company."""
        first = max(date.fromisoformat(company.ipo_date), FIRST_DAY) + timedelta(days=margin)
        last = date.fromisoformat(company.delisted_on) if company.delisted_on else TODAY
        return first, last - timedelta(days=margin)

    def _some_day(self, company: Company, draw: Stream, margin: int = 30) -> date:
        first, last = self._span(company, margin)
        day = first + timedelta(days=draw.below(max(1, (last - first).days)))
        return day - timedelta(days=max(0, day.weekday() - 4))

    def _earnings(self, company: Company, draw: Stream) -> None:
        restated = {
            (after.fiscal_year, after.period): (first, after) for first, after in self._corrections[company.symbol]
        }

        def first_versions(period: Period) -> list[IncomeStatement]:
            current = reversed(self._market.income_statements(company.symbol, period))
            return [restated.get((one.fiscal_year, one.period), (one,))[0] for one in current]

        years = first_versions("FY")
        for place, one in enumerate(years):
            before = years[place - 1] if place else None
            if before and (before.fiscal_year, "FY") in restated:
                after = restated[before.fiscal_year, "FY"][1]
                before = after if after.filing_date <= one.filing_date else before
            if one.filing_date >= "2021-06":
                self._year_news(company, one, before, draw)
            if one.filing_date >= "2022":
                self._annual_report(company, one, before)
        for one in [one for one in first_versions("quarter") if one.filing_date >= "2023-06"][-5:]:
            self._quarter_news(company, one, draw)

    def _year_news(self, company: Company, one: IncomeStatement, before: IncomeStatement | None, draw: Stream) -> None:
        day = date.fromisoformat(one.filing_date)
        name, _ = self._known(company, day)
        sign = one.reported_currency
        revenue, income = money(one.revenue, sign), money(abs(one.net_income), sign)
        verb = "a net profit" if one.net_income >= 0 else "a net loss"
        ending = f"the fiscal year that ended on {long_date(one.date)}"
        growth = f"Revenue was {compared(one.revenue, before.revenue)} the year before." if before else ""
        low = one.revenue * draw.between(97, 104) // 100
        url = self._page(
            draw.pick((WIRE, POST)), day, "earnings",
            draw.pick(
                (
                    f"{name} reports revenue of {revenue} for fiscal {one.fiscal_year}",
                    f"{name} fiscal {one.fiscal_year} results: revenue {revenue}",
                )
            ),
            f"{self._tag(company, day)} said on {long_date(day)} that revenue was {revenue} in {ending}.",
            f"It made {verb} of {income} in fiscal {one.fiscal_year}.",
            growth,
            draw.pick(
                (
                    f"For the coming year it expects revenue between {money(low, sign)} and {money(low * 107 // 100, sign)}.",
                    f"Operating expenses were {money(one.operating_expenses, sign)}, gross profit {money(one.gross_profit, sign)}.",
                    f"Management named {draw.pick(('freight costs', 'wages', 'exchange rates', 'a mild winter', 'late deliveries'))} as the largest burden.",
                )
            ),
        )  # fmt: skip
        subject = f"FY{one.fiscal_year}"
        self._state("revenue", company, subject, revenue, url, one.date, one.revenue)
        self._state("net_income", company, subject, money(one.net_income, sign), url, one.date, one.net_income)

    def _annual_report(self, company: Company, one: IncomeStatement, before: IncomeStatement | None) -> None:
        day = date.fromisoformat(one.filing_date)
        name, symbol = self._known(company, day)
        earlier = f" against {thousands(before.revenue)} in fiscal {before.fiscal_year}" if before else ""
        url = self._page(
            FILINGS, day, "filing",
            f"{name} annual report for fiscal {one.fiscal_year} (10-K)",
            f"Annual report of {name}, symbol {symbol}, for the fiscal year ended {long_date(one.date)}.",
            f"All amounts are in thousands of {one.reported_currency}, except per share.",
            f"Revenue {thousands(one.revenue)}{earlier}.",
            f"Cost of revenue {thousands(one.cost_of_revenue)}; gross profit {thousands(one.gross_profit)}.",
            f"Operating expenses {thousands(one.operating_expenses)}; operating income {thousands(one.operating_income)}.",
            f"Net income {thousands(one.net_income)}.",
            f"Risk factors include competition, the price of energy and the loss of customers in {company.industry.lower()}.",
        )  # fmt: skip
        subject = f"FY{one.fiscal_year}"
        self._state("revenue", company, subject, money(one.revenue, one.reported_currency), url, one.date, one.revenue)
        value = money(one.net_income, one.reported_currency)
        self._state("net_income", company, subject, value, url, one.date, one.net_income)

    def _quarter_news(self, company: Company, one: IncomeStatement, draw: Stream) -> None:
        day = date.fromisoformat(one.filing_date)
        name, _ = self._known(company, day)
        revenue = money(one.revenue, one.reported_currency)
        income = money(abs(one.net_income), one.reported_currency)
        made = f"a profit of {income}" if one.net_income >= 0 else f"a loss of {income}"
        url = self._page(
            draw.pick((WIRE, POST)), day, "earnings",
            f"{name} posts {revenue} of revenue in {one.period} of fiscal {one.fiscal_year}",
            f"{self._tag(company, day)} had revenue of {revenue} in the quarter that ended on {long_date(one.date)}, "
            f"its {one.period} of fiscal {one.fiscal_year}.",
            f"The quarter closed with {made}.",
            draw.pick(
                (
                    "The company did not change its outlook for the year.",
                    f"Orders from {draw.pick(TOWNS)} were better than planned, it said.",
                    "Shares were little moved after the report.",
                )
            ),
        )  # fmt: skip
        subject = f"{one.period} {one.fiscal_year}"
        self._state("revenue", company, subject, revenue, url, one.date, one.revenue)

    def _restatement(self, company: Company) -> None:
        pairs = self._corrections[company.symbol]
        year = pairs[0][1].fiscal_year
        whole, corrected = next(pair for pair in pairs if pair[1].period == "FY")
        quarters = [pair for pair in pairs if pair[1].period != "FY"]
        day = date.fromisoformat(corrected.filing_date)
        name, symbol = self._known(company, day)
        sign = corrected.reported_currency
        which = " and ".join(pair[1].period for pair in quarters)
        old, new = money(whole.revenue, sign), money(corrected.revenue, sign)
        news = self._page(
            WIRE, day, "restatement",
            f"{name} restates fiscal {year} results",
            f"{self._tag(company, day)} has corrected its figures for fiscal {year} after a review of {which}.",
            f"Revenue for the year is now {new} instead of {old}.",
            f"Net income was restated from {money(whole.net_income, sign)} to {money(corrected.net_income, sign)}.",
            "Earlier reports for the year should no longer be relied upon.",
        )  # fmt: skip
        filing = self._page(
            FILINGS, day, "restatement",
            f"{name} amended annual report for fiscal {year} (10-K/A)",
            f"Amendment of the annual report of {name}, symbol {symbol}, for the fiscal year ended {long_date(corrected.date)}.",
            f"All amounts are in thousands of {sign}.",
            f"Revenue, as restated, {thousands(corrected.revenue)}; as first reported, {thousands(whole.revenue)}.",
            f"Net income, as restated, {thousands(corrected.net_income)}; as first reported, {thousands(whole.net_income)}.",
            *(
                f"{after.period} revenue, as restated, {thousands(after.revenue)}; as first reported, {thousands(first.revenue)}."
                for first, after in quarters
            ),
        )  # fmt: skip
        for url in (news, filing):
            self._state("revenue", company, f"FY{year}", new, url, corrected.date, corrected.revenue)
            value = money(corrected.net_income, sign)
            self._state("net_income", company, f"FY{year}", value, url, corrected.date, corrected.net_income)
        for _, after in quarters:
            value = money(after.revenue, sign)
            self._state("revenue", company, f"{after.period} {year}", value, filing, after.date, after.revenue)

    def _leaders(self, company: Company, draw: Stream) -> None:
        change = self._changes.get(company.symbol)
        if change:
            day = date.fromisoformat(change.date)
            name, _ = self._known(company, day)
            told = day - timedelta(days=draw.between(3, 25))
            url = self._page(
                PEOPLE, told, "ceo",
                f"{name} names {change.new} chief executive",
                f"{self._tag(company, told)} said that {change.new} becomes chief executive (CEO) on {long_date(day)}.",
                f"{change.new.split()[0]} follows {change.old}, who {draw.pick(('retires', 'leaves the company', 'becomes adviser to the board'))}.",
            )  # fmt: skip
            self._state("ceo", company, "chief executive", change.new, url, day)
        day = self._some_day(company, draw) if not change else date.fromisoformat(change.date) - timedelta(days=150)
        if day >= FIRST_DAY:
            chief = change.old if change else company.ceo
            name, _ = self._known(company, day)
            url = self._page(
                POST, day, "interview",
                f"Interview: {chief} on the plans of {name}",
                f"{chief}, chief executive of {self._tag(company, day)}, spoke with us about the years ahead.",
                f"“We sell {company.description.split(' sells ')[1].split('.')[0]}, and we will stay with what we know,” {chief.split()[0]} said.",
            )  # fmt: skip
            self._state("ceo", company, "chief executive", chief, url, day)
        self._finance_chief(company, draw)

    def _finance_chief(self, company: Company, draw: Stream) -> None:
        if not draw.chance(70):
            return
        days = sorted({self._some_day(company, draw) for _ in range(draw.between(1, 2))})
        for day in days:
            person = f"{draw.pick(GIVEN_NAMES)} {draw.pick(FAMILY_NAMES)}"
            name, _ = self._known(company, day)
            start = day + timedelta(days=draw.between(5, 28))
            url = self._page(
                PEOPLE, day, "cfo",
                f"{name} appoints {person} as chief financial officer",
                f"{self._tag(company, day)} has appointed {person} as chief financial officer (CFO), from {long_date(start)} on.",
                f"{person.split()[0]} was {draw.pick(('treasurer', 'head of audit', 'controller'))} at a competitor for {draw.between(3, 12)} years.",
            )  # fmt: skip
            self._state("cfo", company, "chief financial officer", person, url, start)

    def _headquarters(self, company: Company, draw: Stream) -> None:
        towns = draw.some(TOWNS, 3)
        first, last = self._span(company)
        day = first + timedelta(days=draw.below(60))
        name, _ = self._known(company, day)
        url = self._page(
            INDUSTRY, day, "headquarters",
            f"A visit to {name} in {towns[0]}",
            f"The headquarters of {self._tag(company, day)} are in {towns[0]}, where {draw.between(90, 900)} of its people work.",
            f"Visitors are shown how the company came to sell {company.description.split(' sells ')[1].split('.')[0]}.",
        )  # fmt: skip
        self._state("headquarters", company, "headquarters", towns[0], url, day)
        if draw.chance(45) and (last - day).days > 150:
            moved = day + timedelta(days=draw.between(90, (last - day).days - 40))
            name, _ = self._known(company, moved)
            if draw.chance(40):
                told = moved - timedelta(days=35)
                rumour = self._page(
                    RUMOURS, told, "rumour",
                    f"Is {name} moving its headquarters to {towns[2]}?",
                    f"People in the trade say that {self._tag(company, told)} will move its headquarters from {towns[0]} to {towns[2]}.",
                    "The company would not comment.",
                )  # fmt: skip
                self._state("headquarters", company, "headquarters", towns[2], rumour, told, weight=0)
            url = self._page(
                WIRE, moved, "headquarters",
                f"{name} moves its headquarters to {towns[1]}",
                f"{self._tag(company, moved)} has moved its headquarters from {towns[0]} to {towns[1]}, it said on {long_date(moved)}.",
                f"About {draw.between(80, 700)} people move with it.",
            )  # fmt: skip
            self._state("headquarters", company, "headquarters", towns[1], url, moved)

    def _plant(self, company: Company, draw: Stream) -> None:
        if not draw.chance(55):
            return
        day = self._some_day(company, draw, 200 if self._is_old(company) else 30)
        town, jobs, capacity = draw.pick(TOWNS), draw.between(12, 190) * 10, draw.between(8, 240) * 1_000
        kind = draw.pick(("plant", "depot", "laboratory", "works"))
        planned = day - timedelta(days=draw.between(150, 190))
        if planned > max(FIRST_DAY, date.fromisoformat(company.ipo_date)) and draw.chance(70):
            name, _ = self._known(company, planned)
            hoped = jobs + draw.between(3, 40) * 10
            url = self._page(
                INDUSTRY, planned, "plant",
                f"{name} plans a {kind} in {town}",
                f"{self._tag(company, planned)} plans a {kind} in {town} with {hoped:,} jobs.",
                f"It is to handle {capacity + draw.between(2, 30) * 1_000:,} units a year.",
            )  # fmt: skip
            self._state("plant_jobs", company, town, f"{hoped:,}", url, planned, hoped)
        name, _ = self._known(company, day)
        url = self._page(
            INDUSTRY, day, "plant",
            f"{name} opens its {kind} in {town}",
            f"{self._tag(company, day)} opened its new {kind} in {town} on {long_date(day)}.",
            f"The {kind} has {jobs:,} jobs and handles {capacity:,} units a year.",
            f"The mayor of {town} spoke of the largest opening in {draw.between(5, 40)} years.",
        )  # fmt: skip
        self._state("plant_jobs", company, town, f"{jobs:,}", url, day, jobs)
        self._state("plant_capacity", company, town, f"{capacity:,}", url, day, capacity)

    def _contract(self, company: Company, draw: Stream) -> None:
        if not draw.chance(60):
            return
        day = self._some_day(company, draw)
        partner = draw.pick(self._active)
        own = partner.issuer == company.issuer
        client = f"the city of {draw.pick(TOWNS)}" if own else self._known(partner, day)[0]
        sign, years = company.reported_currency, draw.between(2, 8)
        amount = draw.between(12, 980) * 1_000_000 // 2
        name, _ = self._known(company, day)
        if draw.chance(55):
            told = day - timedelta(days=draw.between(6, 20))
            rumoured = amount * draw.pick((60, 70, 125, 140, 160)) // 100 // 500_000 * 500_000
            url = self._page(
                RUMOURS, told, "rumour",
                f"{name} said to be close to a contract with {client}",
                f"{self._tag(company, told)} is close to a contract with {client} worth {money(rumoured, sign)}, people in the trade say.",
                "Neither side would comment.",
            )  # fmt: skip
            self._state("contract", company, client, money(rumoured, sign), url, told, rumoured, weight=0)
        url = self._page(
            WIRE, day, "contract",
            f"{name} wins contract from {client}",
            f"{self._tag(company, day)} has signed a contract with {client} worth {money(amount, sign)} over {years} years.",
            f"Deliveries begin in {MONTHS[draw.below(12)]}.",
        )  # fmt: skip
        self._state("contract", company, client, money(amount, sign), url, day, amount)

    def _product(self, company: Company, draw: Stream) -> None:
        if not draw.chance(50):
            return
        day = self._some_day(company, draw)
        name, _ = self._known(company, day)
        product = f"{draw.pick(('Aria', 'Boreal', 'Cirrus', 'Delta', 'Ember', 'Fjord', 'Granite', 'Halo'))} {draw.between(2, 90) * 10}"
        price = draw.between(19, 900) * 100 - 1
        shown = f"{SIGNS[company.currency]}{price // 100}.{price % 100:02}"
        url = self._page(
            POST, day, "product",
            f"{name} launches the {product}",
            f"{self._tag(company, day)} has launched the {product}, which costs {shown}.",
            f"It replaces a product that was sold for {draw.between(4, 11)} years.",
        )  # fmt: skip
        self._state("product_price", company, product, shown, url, day, price)
        if draw.chance(35) and day + timedelta(days=120) < self._span(company)[1]:
            later = day + timedelta(days=draw.between(60, 110))
            lower = price * 4 // 5 // 100 * 100 + 99
            shown = f"{SIGNS[company.currency]}{lower // 100}.{lower % 100:02}"
            name, _ = self._known(company, later)
            url = self._page(
                POST, later, "product",
                f"{name} cuts the price of the {product}",
                f"{self._tag(company, later)} has cut the price of the {product} to {shown}.",
            )  # fmt: skip
            self._state("product_price", company, product, shown, url, later, lower)

    def _targets(self, company: Company, draw: Stream) -> None:
        if not draw.chance(45):
            return
        broker = draw.pick(BROKERS)
        days = sorted({self._some_day(company, draw) for _ in range(draw.between(1, 3))})
        for day in days:
            name, _ = self._known(company, day)
            target = draw.between(8, 240) * 100
            view = draw.pick(("buy", "hold", "sell"))
            shown = f"{SIGNS[company.currency]}{target // 100}"
            url = self._page(
                NOTES, day, "analyst",
                f"{broker} sets price target of {shown} for {name}",
                f"Analysts of {broker} rate {self._tag(company, day)} as a {view}, with a price target of {shown}.",
                f"“{draw.pick(('Margins may have peaked', 'The order book is full', 'We wait for the next report', 'The shares are cheap for a reason'))},” they write.",
            )  # fmt: skip
            self._state("price_target", company, broker, shown, url, day, target)

    def _takeover(self, company: Company, draw: Stream) -> None:
        if not draw.chance(20):
            return
        day = self._some_day(company, draw, 40)
        bidder = draw.pick(self._active)
        if bidder.issuer == company.issuer or bidder.symbol == company.acquired_by:
            return
        buyer, _ = self._known(bidder, day)
        name, _ = self._known(company, day)
        rumour = self._page(
            RUMOURS, day, "rumour",
            f"{buyer} may bid for {name}",
            f"{buyer} is preparing a bid for {self._tag(company, day)}, according to people in the trade.",
            f"A price {draw.between(15, 45)}% above the market is being talked about.",
        )  # fmt: skip
        self._state("takeover", company, buyer, "in talks", rumour, day, weight=0)
        denied = day + timedelta(days=draw.between(1, 9))
        url = self._page(
            WIRE, denied, "denial",
            f"{name} denies talks with {buyer}",
            f"{self._tag(company, denied)} said that there are no talks with {buyer}, and that reports of a bid are wrong.",
        )  # fmt: skip
        self._state("takeover", company, buyer, "no talks", url, denied)

    def _listing(self, company: Company, draw: Stream) -> None:
        for split in self._market.splits(company.symbol):
            day = date.fromisoformat(split.date)
            told = day - timedelta(days=draw.between(14, 30))
            name, _ = self._known(company, told)
            kind = f"{split.numerator}-for-{split.denominator}"
            reverse = "reverse " if split.numerator < split.denominator else ""
            url = self._page(
                WIRE, told, "split",
                f"{name} announces {kind} {reverse}stock split",
                f"The board of {self._tag(company, told)} has approved a {kind} {reverse}stock split.",
                f"Trading on a split-adjusted basis begins on {long_date(day)}.",
            )  # fmt: skip
            self._state("split", company, split.date, kind, url, day)
        change = self._renames.get(company.symbol)
        if change:
            day = date.fromisoformat(change.date)
            url = self._page(
                WIRE, day, "rename",
                f"{change.old_name} becomes {change.new_name}",
                f"{change.old_name} is now called {change.new_name}, and its symbol changed from {change.old_symbol} to "
                f"{change.new_symbol} on {long_date(day)}.",
                "Nothing changes for holders of its shares.",
            )  # fmt: skip
            self._state("rename", company, change.old_symbol, change.new_symbol, url, day)
        if company.delisted_on:
            self._farewell(company)
        for halt in runs([date.fromisoformat(day) for day in self._market.halts(company.symbol)]):
            name, _ = self._known(company, halt[0])
            url = self._page(
                POST, halt[0], "halt",
                f"Trading in {name} halted",
                f"Trading in {self._tag(company, halt[0])} was halted on {long_date(halt[0])} at the request of the company.",
                draw.pick(("News is pending.", "The exchange asked for a statement.", "No reason was given.")),
            )  # fmt: skip
            self._state("halt", company, halt[0].isoformat(), long_date(halt[0]), url, halt[0])

    def _farewell(self, company: Company) -> None:
        day = date.fromisoformat(company.delisted_on or "")
        if company.acquired_by:
            buyer = self._market.company(company.acquired_by)
            text = f"{buyer.short_name} has completed its purchase of {self._tag(company, day)}."
            title = f"{buyer.short_name} completes purchase of {company.short_name}"
            value = f"acquired by {buyer.short_name}"
        else:
            text = f"{self._tag(company, day)} has filed for bankruptcy."
            title = f"{company.short_name} files for bankruptcy and leaves the exchange"
            value = "bankrupt"
        url = self._page(
            WIRE, day, "delisting", title, text, f"The shares were traded for the last time on {long_date(day)}."
        )
        self._state("delisting", company, "delisting", value, url, day)

    def _sheet(self, company: Company, draw: Stream) -> None:
        """Write the summary of a site that copies what was known on a day and never updates it."""
        day = self._some_day(company, draw)
        name, symbol = self._known(company, day)
        known = [claim for claim in self._claims[company.symbol] if claim.published <= day.isoformat()]

        def latest(kind: str) -> Fact | None:
            facts = [
                claim for claim in known if claim.fact.kind == kind and claim.weight and claim.fact.date <= str(day)
            ]
            return max(facts, key=lambda claim: (claim.published, claim.fact.url)).fact if facts else None

        new = self._changes.get(company.symbol)
        chief = new.old if new and day.isoformat() < new.date else company.ceo
        sentences = [f"The chief executive (CEO) of {name} is {chief}."]
        stated: list[Fact] = []
        for kind, words in (
            ("cfo", "Its chief financial officer (CFO) is {value}."),
            ("headquarters", "The headquarters of {name} are in {value}."),
        ):
            fact = latest(kind)
            if fact:
                sentences.append(words.format(name=name, value=fact.value))
                stated.append(fact)
        years = [claim.fact for claim in known if claim.fact.kind == "revenue" and claim.fact.subject.startswith("FY")]
        if years:
            fact = max(years, key=lambda one: (one.subject, one.url))
            sentences.append(f"Revenue of {name} in fiscal {fact.subject[2:]} was {fact.value}.")
            stated.append(fact)
        url = self._page(
            MIRROR, day, "sheet",
            f"{name} ({symbol}): CEO, headquarters, revenue and key facts",
            f"Key facts about {name}, symbol {symbol}, listed on {company.exchange}.",
            *sentences,
            f"Last updated on {long_date(day)}.",
        )  # fmt: skip
        self._state("ceo", company, "chief executive", chief, url, day, weight=0)
        for fact in stated:
            self._state(fact.kind, company, fact.subject, fact.value, url, fact.date, fact.amount, weight=0)

    def _is_old(self, company: Company) -> bool:
        first, last = self._span(company)
        return (last - first).days > 500

    def _wraps(self) -> None:
        """Write closing prices as traded, of some companies whose shares were split later."""
        split = [one for one in self._companies if self._market.splits(one.symbol)]
        for company in Stream(self._market.seed, "wraps").some(split, 14):
            day = date.fromisoformat(self._market.splits(company.symbol)[0].date) - timedelta(days=25)
            bar = self._market.close_on_or_before(company.symbol, day.isoformat(), adjusted=False)
            if bar:
                day = date.fromisoformat(bar.date)
                name, _ = self._known(company, day)
                price = f"{SIGNS[company.currency]}{bar.close // 100:,}.{bar.close % 100:02}"
                self._page(
                    POST, day, "wrap",
                    f"Market wrap: {name} closes at {price}",
                    f"Shares of {self._tag(company, day)} closed at {price} on {long_date(day)}, with {bar.volume:,} shares traded.",
                )  # fmt: skip

    def _elsewhere(self) -> None:
        """Write pages that have nothing to do with the market."""
        draw = Stream(self._market.seed, "elsewhere")
        for _ in range(120):
            town, other = draw.some(TOWNS, 2)
            day = FIRST_DAY + timedelta(days=draw.below((TODAY - FIRST_DAY).days))
            person = f"{draw.pick(GIVEN_NAMES)} {draw.pick(FAMILY_NAMES)}"
            number = draw.between(3, 400)
            domain, title, text = draw.pick(
                (
                    ("gardenledger.example", f"Growing beans in {town}", f"The soil of {town} is heavy, and beans like it. {person} plants {number} of them each spring."),
                    ("kitchentable.example", f"Soup from {town}", f"{person} cooks for {number} guests and starts with onions. The soup of {town} is thicker than that of {other}."),
                    ("fieldscience.example", f"{number} owls counted near {town}", f"A count by {person} found {number} owls between {town} and {other}. The north wind made the work hard."),
                    ("chessgazette.example", f"{person} wins the {town} open", f"{person} won the chess open in {town} after {number} moves in the last game. The runner-up came from {other}."),
                    ("footpath.example", f"Walking from {town} to {other}", f"The path from {town} to {other} is {number} kilometres long. {person} has walked it in both directions."),
                    ("townhall.example", f"{town} repairs its bridge", f"The bridge of {town} closes for {number} days. The mayor, {person}, asks drivers to go by {other}."),
                )
            )  # fmt: skip
            self._page(domain, day, "elsewhere", title, text)
