"""Issuers of the invented market, their symbols, and what happens to them."""

from dataclasses import dataclass, field
from datetime import date, timedelta

from mcp_grpo.desk.world.days import FIRST_DAY, TODAY, US_EXCHANGES, trading_days
from mcp_grpo.desk.world.names import (
    CLASS_STEMS,
    FAMILY_NAMES,
    GIVEN_NAMES,
    INDUSTRIES,
    PAIR_NOUNS,
    PAIR_STEMS,
    STEMS,
    TWIN_STEMS,
)
from mcp_grpo.desk.world.stream import Stream


NUM_CLASS_GROUPS = 7
NUM_TWINS = 6
NUM_PAIRS = 11
NUM_SINGLES = 105
SUFFIXES = {"NASDAQ": "", "NYSE": "", "LSE": ".L", "XETRA": ".DE"}
CURRENCIES = {"NASDAQ": "USD", "NYSE": "USD", "LSE": "GBP", "XETRA": "EUR"}
COUNTRIES = {"NASDAQ": "US", "NYSE": "US", "LSE": "GB", "XETRA": "DE"}
ENDINGS = {
    "NASDAQ": ("Inc.", "Corp."),
    "NYSE": ("Inc.", "Corp.", "Company", "Holdings"),
    "LSE": ("plc", "Group plc"),
    "XETRA": ("AG", "SE"),
}
SPLITS = ((2, 1), (2, 1), (2, 1), (3, 1), (3, 1), (4, 1), (5, 1), (3, 2), (10, 1), (1, 5), (1, 10))


@dataclass(slots=True, kw_only=True)
class Issuer:
    """A company while the world is made. `listings` has a symbol, a class and its percentage of the shares."""

    number: int
    stem: str
    noun: str
    ending: str
    industry: str
    exchange: str
    reported_currency: str
    listings: list[tuple[str, str, int]]
    fiscal_year_end: int
    ipo_date: date
    ceo: str = ""
    employees: int = 0
    first_price: int = 0
    former_name: str | None = None
    former_symbol: str | None = None
    renamed_on: date | None = None
    delisted_on: date | None = None
    acquirer: int | None = None
    halted: set[date] = field(default_factory=set)
    splits: list[tuple[date, int, int]] = field(default_factory=list)
    ceo_changes: list[tuple[date, str, str]] = field(default_factory=list)

    @property
    def short_name(self) -> str:
        """Return the name without its legal form."""
        return f"{self.stem} {self.noun}"

    @property
    def name(self) -> str:
        """Return the registered name."""
        return f"{self.stem} {self.noun} {self.ending}"

    @property
    def key(self) -> str:
        """Return the key of the issuer's streams."""
        return self.listings[0][0]

    @property
    def days(self) -> list[date]:
        """Return the days on which its shares were traded."""
        last = self.delisted_on or TODAY
        return [day for day in trading_days(self.exchange) if self.ipo_date <= day <= last and day not in self.halted]


def make_issuers(seed: int) -> list[Issuer]:
    """Make all issuers, with their events, without prices and figures."""
    register = _Register(seed)
    draw = Stream(seed, "issuers")
    for stem, lookalike in CLASS_STEMS[:1] + tuple(draw.some(CLASS_STEMS[1:], NUM_CLASS_GROUPS - 1)):
        code = _consonants(stem)[:3]
        share = draw.between(68, 86)
        register.add(stem, _industry(draw), [(f"{code}A", "A", share), (f"{code}B", "B", 100 - share)], "US")
        register.add(lookalike, _industry(draw), [(f"{code}AA", "", 100)], "US")
    for first, second in draw.some(TWIN_STEMS, NUM_TWINS):
        code = _consonants(first)[:4]
        abroad = draw.pick(("LSE", "XETRA"))
        register.add(first, _industry(draw), [(code, "", 100)], "US")
        register.add(second, _industry(draw), [(code + SUFFIXES[abroad], "", 100)], abroad)
    stems = PAIR_STEMS[:1] + tuple(draw.some(PAIR_STEMS[1:], NUM_PAIRS - 1))
    nouns = PAIR_NOUNS[:1] + tuple(draw.some(PAIR_NOUNS[1:], NUM_PAIRS - 1))
    for stem, pair in zip(stems, nouns, strict=True):
        for noun, industry in pair:
            register.add(stem, industry, None, "US", noun=noun)
    for stem in draw.some(STEMS, NUM_SINGLES):
        register.add(stem, _industry(draw), None, draw.pick(("US",) * 7 + ("LSE", "XETRA")))
    issuers = register.issuers
    _rename(issuers, Stream(seed, "renames"), register)
    _delist(issuers, Stream(seed, "delistings"))
    for issuer in issuers:
        _fill(issuer, Stream(seed, "events", issuer.key))
    for issuer in Stream(seed, "halted now").some([one for one in issuers if not one.delisted_on], 3):
        issuer.halted |= set(trading_days(issuer.exchange)[-(2 + issuer.number % 3) :])
    return issuers


class _Register:
    """Assigns each issuer a number, a unique name and a unique symbol."""

    def __init__(self, seed: int) -> None:
        self.issuers: list[Issuer] = []
        self.symbols: set[str] = set()
        self._seed = seed
        people = [f"{given} {family}" for family in FAMILY_NAMES for given in GIVEN_NAMES]
        self._people = iter(Stream(seed, "people").shuffled(people))

    def add(
        self,
        stem: str,
        industry: str,
        listings: list[tuple[str, str, int]] | None,
        place: str,
        noun: str | None = None,
    ) -> None:
        noun = noun or INDUSTRIES[industry][1]
        draw = Stream(self._seed, "issuer", stem, noun)
        exchange = draw.pick(US_EXCHANGES) if place == "US" else place
        if listings is None:
            listings = [(self.symbol(stem, noun) + SUFFIXES[exchange], "", 100)]
        self.symbols |= {symbol for symbol, _, _ in listings}
        currency = CURRENCIES[exchange]
        is_young = draw.chance(12) and len(listings) == 1
        years = (FIRST_DAY.year, 2023) if is_young else (1984, 2020)
        ipo_date = date(draw.between(*years), draw.between(3, 10), draw.between(1, 28))
        if is_young:
            ipo_date = next(day for day in trading_days(exchange) if day >= ipo_date)
        elif ipo_date.weekday() >= 5:
            ipo_date -= timedelta(days=2)
        issuer = Issuer(
            number=len(self.issuers),
            stem=stem,
            noun=noun,
            ending=draw.pick(ENDINGS[exchange]),
            industry=industry,
            exchange=exchange,
            reported_currency="USD" if place != "US" and draw.chance(40) else currency,
            listings=listings,
            fiscal_year_end=draw.pick((12,) * 9 + (1, 3, 3, 6, 6, 9, 9)),
            ipo_date=ipo_date,
        )
        issuer.ceo = next(self._people)
        if draw.chance(50):
            first = max(ipo_date, date(2021, 6, 1)) + timedelta(days=20)
            day = first + timedelta(days=draw.below((TODAY - first).days - 40))
            day -= timedelta(days=max(0, day.weekday() - 4))
            former, issuer.ceo = issuer.ceo, next(self._people)
            issuer.ceo_changes.append((day, former, issuer.ceo))
        self.issuers.append(issuer)

    def symbol(self, stem: str, noun: str) -> str:
        letters, tail = _consonants(stem), _consonants(noun)
        whole = "".join(filter(str.isalpha, stem)).upper()
        tries = (
            letters[:3] + tail[:1],
            letters[:2] + tail[:2],
            whole[:4],
            letters[:3] + tail[1:2],
            whole[:3] + tail[:1],
        )
        return next(
            one for one in (*tries, whole[:5], whole[:3] + tail[:2]) if len(one) >= 3 and one not in self.symbols
        )


def _consonants(text: str) -> str:
    letters = [letter for letter in text.upper() if letter.isalpha()]
    return letters[0] + "".join(letter for letter in letters[1:] if letter not in "AEIOU")


def _industry(draw: Stream) -> str:
    return draw.pick(tuple(INDUSTRIES))


def _rename(issuers: list[Issuer], draw: Stream, register: _Register) -> None:
    """Give some issuers a former name and symbol."""
    stems = [stem for stem in STEMS if all(stem != issuer.stem for issuer in issuers)]
    old = [issuer for issuer in issuers if len(issuer.listings) == 1 and issuer.ipo_date < FIRST_DAY]
    for issuer, stem in zip(draw.some(old, 14), draw.shuffled(stems), strict=False):
        issuer.former_name = f"{stem} {issuer.noun}"
        issuer.former_symbol = register.symbol(stem, issuer.noun) + SUFFIXES[issuer.exchange]
        register.symbols.add(issuer.former_symbol)
        days = trading_days(issuer.exchange)
        issuer.renamed_on = days[draw.between(200, len(days) - 60)]


def _delist(issuers: list[Issuer], draw: Stream) -> None:
    """Delist some issuers: bought by another, or bankrupt."""
    free = [one for one in issuers if len(one.listings) == 1 and not one.renamed_on and one.ipo_date < FIRST_DAY]
    chosen = draw.some(free, 10)
    buyers = [one for one in issuers if one not in chosen and not one.renamed_on and one.ipo_date < FIRST_DAY]
    for place, issuer in enumerate(chosen):
        days = trading_days(issuer.exchange)
        issuer.delisted_on = days[draw.between(350, len(days) - 40)]
        issuer.acquirer = draw.pick(buyers).number if place < 6 else None
        if issuer.ceo_changes and issuer.ceo_changes[-1][0] >= issuer.delisted_on:
            issuer.ceo = issuer.ceo_changes.pop()[1]


def _fill(issuer: Issuer, draw: Stream) -> None:
    """Draw employees, the first price, halts and splits."""
    issuer.first_price = draw.pick((12, 18, 25, 40, 60, 90, 140)) * draw.between(70, 130)
    issuer.employees = draw.pick((1, 1, 2, 3, 5, 8)) * draw.between(180, 9_500)
    days = issuer.days
    if draw.chance(40) and len(days) > 300:
        for _ in range(draw.between(1, 3)):
            start = draw.between(20, len(days) - 30)
            issuer.halted |= set(days[start : start + draw.between(1, 4)])
    if draw.chance(32) and len(days) > 300:
        days = [day for day in issuer.days if day - timedelta(days=7) not in issuer.halted]
        num_splits = 2 if draw.chance(15) else 1
        for day in sorted(draw.some(days[60:-45], num_splits)):
            issuer.splits.append((day, *draw.pick(SPLITS)))
