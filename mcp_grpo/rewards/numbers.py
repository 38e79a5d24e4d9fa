"""Parse numbers and dates as people write them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date


SCALES: Mapping[str, float] = {
    **dict.fromkeys(("k", "thousand", "thousands"), 1e3),
    **dict.fromkeys(("m", "mm", "mn", "mln", "mio", "million", "millions"), 1e6),
    **dict.fromkeys(("b", "bn", "bln", "billion", "billions"), 1e9),
    **dict.fromkeys(("t", "tn", "trillion", "trillions"), 1e12),
}
PERCENTS: Mapping[str, float] = {
    **dict.fromkeys(("%", "percent", "per cent", "pct", "percentage points", "percentage point"), 1e-2),
    **dict.fromkeys(("bps", "basis points", "basis point"), 1e-4),
}
CURRENCIES: Mapping[str, str] = {
    **dict.fromkeys(("$", "us$", "usd", "dollar", "dollars"), "USD"),
    **dict.fromkeys(("€", "eur", "euro", "euros"), "EUR"),
    **dict.fromkeys(("£", "gbp", "pound", "pounds"), "GBP"),
    **dict.fromkeys(("¥", "jpy", "yen"), "JPY"),
    **{code.lower(): code for code in ("CHF", "CAD", "AUD", "INR", "CNY", "SEK", "NOK", "DKK", "HKD", "SGD")},
}


def _any_of(words: Mapping[str, object], end: str = r"(?!\w)") -> str:
    """Return a pattern for any of these words, the longest first."""
    ranked = sorted(words, key=len, reverse=True)
    return "|".join(re.escape(word) + (end if word[-1].isalpha() else "") for word in ranked)


_BEFORE = _any_of(CURRENCIES, end=r"(?![^\W\d])")  # also right before its digits, as in "USD5"

# Possessive throughout: a number that is not followed by what may follow is none, and not a shorter one.
_NUMBER = re.compile(
    rf"""
    (?<![\w.]) (?P<sign> [-+] | (?:minus|negative)\s+ )?+
    (?P<before> (?:{_BEFORE}) )?+ \s?+
    (?P<inner> - )?+
    (?P<digits> (?: \d{{1,3}}(?:[,'\u00a0\u2009\u202f]\d{{3}})++ | \d++ )(?:\.\d++)?+ | \.\d++ )
    (?: e(?P<exponent>[-+]?\d{{1,3}}) | \s?[x×*]\s?10(?:\^|\*\*)(?P<power>[-+]?\d{{1,2}}) )?+
    (?: \s?(?P<percent>{_any_of(PERCENTS)}) | [\s-]?(?P<scale>{_any_of(SCALES)}) )?+
    (?: \s?(?P<after>{_any_of(CURRENCIES)}) )?+
    (?! \w | [,']\d{{3}}(?!\d) )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_OPENS = r"(?:^|[:=]|\b(?:is|was|of)\b)\s*"  # what a figure follows that has nothing else before it
_IN_BRACKETS = re.compile(  # a loss, as accountants write it
    rf"(?P<opens>{_OPENS})-?(?P<before>(?:{_BEFORE})\s?)?"
    rf"\((?P<figure>(?:{_BEFORE})?\s?\d[\d,.]*+(?:\s?(?:{_any_of(PERCENTS)}|{_any_of(SCALES)}))?)\)",
    re.IGNORECASE,
)
_MINUS = re.compile(rf"(?P<opens>{_OPENS})-\s+(?=\d|(?:{_BEFORE})\s?\d)", re.IGNORECASE)
_DASH = re.compile(r"(?<=[^\s(])\s+-\s+")
_FALL = r"loss(?!\s+(?:ratio|rate))|losses|lost|los(?:es|ing)|decreas\w*|declin\w*|fell|fall(?:s|en|ing)?|drop(?:s|ped|ping)?|reduc\w*|shrank|shrunk"
_FALLS = re.compile(rf"(?<![\w-])(?:{_FALL})\b", re.IGNORECASE)
_RISES = re.compile(
    r"\b(?:ris(?:e|es|en|ing)|rose|gain\w*|grow\w*|grew|increas\w*|chang\w*|profits?|income|up)\b", re.IGNORECASE
)
_FALL_BEFORE = re.compile(
    rf"(?<![\w-])(?:{_FALL}|down)(?:\s+(?:(?:inc|corp|co|ltd)\.|[\w&'’-]+)){{0,10}}[\s:(]*$", re.IGNORECASE
)
_LEVEL = re.compile(
    r"\b(?:to|from|at|above|below)(?:\s+(?:about|approximately|around|roughly|nearly|just|a|an|the))*\s*$",
    re.IGNORECASE,
)
_FALL_AFTER = re.compile(rf"\s*\(?(?:(?:a|an|net|operating|annual|quarterly)\s+)*(?:{_FALL})\b", re.IGNORECASE)
_CONTEXT = 100  # characters before a figure in which a word may say that it is a loss
_COUNTED = re.compile(
    r"[\s-]+(?:trading\s+|full\s+|business\s+|fiscal\s+)?"
    r"(?:days?|weeks?|months?|quarters?|years?|sessions?|results?|records?|matches|hits|entries|reports?|filings?|statements?)\b",
    re.IGNORECASE,
)
_LESS_AFTER = re.compile(r"\s*\(?(?:lower|less|down)\b", re.IGNORECASE)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<{0}>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DATE = re.compile(
    rf"""
    (?<![\w.])(?:
      (?P<year>\d{{4}})(?P<by>[-/.])(?P<month>\d{{1,2}})(?P=by)(?P<day>\d{{1,2}})(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?
    | (?P<first>\d{{1,2}})(?P<by2>[-/.])(?P<second>\d{{1,2}})(?P=by2)(?P<year2>\d{{4}})
    | (?P<day3>\d{{1,2}})(?:st|[nr]d|th)?\s+(?:of\s+)?{_MONTH.format("month3")},?\s+(?P<year3>\d{{4}})
    | {_MONTH.format("month4")}\s+(?P<day4>\d{{1,2}})(?:st|[nr]d|th)?,?\s+(?P<year4>\d{{4}})
    )(?!\w)
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A number in a text."""

    value: float
    scale: float = 1.0
    percent: float | None = None
    currency: str | None = None
    is_year: bool = False
    is_count: bool = False
    is_fall: bool = False


def numbers_in(text: str) -> list[Number]:
    """
    Find the numbers in a text, except those of dates.

    Separators are those of English: `1,234.5`. Digits inside a word, as in `Q3` and `FY2024`, are no number.
    """
    text = _signed(_DATE.sub(" ", text))
    return [_number(match) for match in _NUMBER.finditer(text)]


def dates_in(text: str) -> list[date | None]:
    """Find the dates in a text; `None` stands for one that does not exist or is ambiguous."""
    return list(_dates(text))


def asks_for_fall(question: str) -> bool:
    """Tell whether a question presupposes a loss or fall, as "By how much did it fall?" does."""
    return _FALLS.search(question) is not None and _RISES.search(question) is None


def _signed(text: str) -> str:
    """Put the minus right before every negative figure, and make other dashes look different."""
    text = _IN_BRACKETS.sub(lambda found: f"{found['opens']}-{found['before'] or ''}{found['figure']} ", text)
    text = _MINUS.sub(lambda found: f"{found['opens']}-", text)
    return _DASH.sub(" ; ", text)


def _number(match: re.Match[str]) -> Number:
    part = match.groupdict()
    exponent = int(part["exponent"] or part["power"] or 0)
    value = float(re.sub(r"[^\d.]", "", part["digits"]) + f"e{exponent}")
    is_negative = (part["inner"] is not None) != ((part["sign"] or "+").strip().lower() in ("-", "minus", "negative"))
    currency = part["before"] or part["after"]
    is_fall = _is_fall(match)
    is_bare = not any(
        part[name] for name in ("sign", "before", "inner", "exponent", "power", "percent", "scale", "after")
    )
    return Number(
        value=-value if is_negative or is_fall else value,
        scale=SCALES.get((part["scale"] or "").lower(), 1.0),
        percent=PERCENTS.get((part["percent"] or "").lower()),
        currency=None if currency is None else CURRENCIES.get(currency.casefold()),
        is_year=is_bare and re.fullmatch(r"(?:19|20)\d\d", part["digits"]) is not None,
        is_count=is_bare
        and value < 1000
        and value == int(value)
        and _COUNTED.match(match.string, match.end()) is not None,
        is_fall=is_fall,
    )


def _is_fall(match: re.Match[str]) -> bool:
    before = match.string[max(0, match.start() - _CONTEXT) : match.start()]
    if _FALL_BEFORE.search(before) is not None and _LEVEL.search(before) is None:
        return True
    if _FALL_AFTER.match(match.string, match.end()) is not None:
        return True
    return match["percent"] is not None and _LESS_AFTER.match(match.string, match.end()) is not None


def _dates(text: str) -> Iterator[date | None]:
    for match in _DATE.finditer(text):
        part = match.groupdict()
        year = int(part["year"] or part["year2"] or part["year3"] or part["year4"])
        if part["first"] is not None:
            month, day = _in_order(int(part["first"]), int(part["second"]))
        elif part["month"] is not None:
            month, day = int(part["month"]), int(part["day"])
        else:
            month = _MONTHS.index((part["month3"] or part["month4"])[:3].casefold()) + 1
            day = int(part["day3"] or part["day4"])
        try:
            yield date(year, month, day)
        except ValueError:
            yield None


def _in_order(first: int, second: int) -> tuple[int, int]:
    """Return month and day, or 0 for both if the order is ambiguous."""
    if first > 12 or first == second:
        return second, first
    return (first, second) if second > 12 else (0, 0)
