"""Numbers and dates as people write them."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date


SCALES: Mapping[str, float] = {
    **dict.fromkeys(("k", "thousand", "thousands"), 1e3),
    **dict.fromkeys(("m", "mn", "mio", "million", "millions"), 1e6),
    **dict.fromkeys(("b", "bn", "billion", "billions"), 1e9),
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


def _any_of(words: Mapping[str, object]) -> str:
    """A pattern for one of these, the longest first; words end where they end."""
    ranked = sorted(words, key=len, reverse=True)
    return "|".join(re.escape(word) + (r"(?!\w)" if word[-1].isalpha() else "") for word in ranked)


# Possessive throughout: a number that is not followed by what may follow is none, and not a shorter one.
_NUMBER = re.compile(
    rf"""
    (?<![\w.]) (?P<sign> [-+] | (?:minus|negative)\s+ )?+
    (?P<before> (?:{_any_of(CURRENCIES)}) )?+ \s?+
    (?P<inner> - )?+
    (?P<digits> (?: \d{{1,3}}(?:[,'\u00a0\u2009\u202f]\d{{3}})++ | \d++ )(?:\.\d++)?+ | \.\d++ )
    (?: e(?P<exponent>[-+]?\d{{1,3}}) | \s?[x×*]\s?10(?:\^|\*\*)(?P<power>[-+]?\d{{1,2}}) )?+
    (?: \s?(?P<percent>{_any_of(PERCENTS)}) | [\s-]?(?P<scale>{_any_of(SCALES)}) )?+
    (?: \s?(?P<after>{_any_of(CURRENCIES)}) )?+
    (?! \w | [,']\d{{3}}(?!\d) )
    """,
    re.VERBOSE | re.IGNORECASE,
)
_MONTHS = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
_MONTH = (
    r"(?P<{0}>jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|"
    r"oct(?:ober)?|nov(?:ember)?|dec(?:ember)?)\.?"
)
_DATE = re.compile(
    rf"""
    (?<![\w.])(?:
      (?P<year>\d{{4}})[-/.](?P<month>\d{{1,2}})[-/.](?P<day>\d{{1,2}})(?:[T ]\d\d:\d\d(?::\d\d)?Z?)?
    | (?P<first>\d{{1,2}})[-/.](?P<second>\d{{1,2}})[-/.](?P<year2>\d{{4}})
    | (?P<day3>\d{{1,2}})(?:st|[nr]d|th)?\s+(?:of\s+)?{_MONTH.format("month3")},?\s+(?P<year3>\d{{4}})
    | {_MONTH.format("month4")}\s+(?P<day4>\d{{1,2}})(?:st|[nr]d|th)?,?\s+(?P<year4>\d{{4}})
    )(?!\w)
    """,
    re.VERBOSE | re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """
    A number in a text.

    Args:
        value (`float`):
            Its digits, without what follows them.
        scale (`float`, *optional*, defaults to `1.0`):
            What "million" and the like multiply it by.
        percent (`float`, *optional*):
            What "%" and the like multiply it by; `None` if there is none.
        currency (`str`, *optional*):
            Code of its currency, such as `"USD"`.
    """

    value: float
    scale: float = 1.0
    percent: float | None = None
    currency: str | None = None


def numbers_in(text: str) -> list[Number]:
    """
    The numbers in a text, those of dates left out.

    Separators are those of English: `1,234.5`. A figure that is part of a word, as in `Q3` and `FY2024`, is no number.

    Args:
        text (`str`):
            The text.

    Returns:
        `list[Number]`: In the order of the text.
    """
    return [_number(match) for match in _NUMBER.finditer(_DATE.sub(" ", text))]


def dates_in(text: str) -> list[date | None]:
    """
    The dates in a text.

    Args:
        text (`str`):
            The text.

    Returns:
        `list[date | None]`: In the order of the text; `None` for one that could be two (`03/05/2024`) or does not exist.
    """
    return list(_dates(text))


def _number(match: re.Match[str]) -> Number:
    part = match.groupdict()
    exponent = int(part["exponent"] or part["power"] or 0)
    value = float(re.sub(r"[^\d.]", "", part["digits"]) + f"e{exponent}")
    is_negative = (part["inner"] is not None) != ((part["sign"] or "+").strip().lower() in ("-", "minus", "negative"))
    currency = part["before"] or part["after"]
    return Number(
        value=-value if is_negative else value,
        scale=SCALES.get((part["scale"] or "").lower(), 1.0),
        percent=PERCENTS.get((part["percent"] or "").lower()),
        currency=None if currency is None else CURRENCIES[currency.lower()],
    )


def _dates(text: str) -> Iterator[date | None]:
    for match in _DATE.finditer(text):
        part = match.groupdict()
        year = int(part["year"] or part["year2"] or part["year3"] or part["year4"])
        if part["first"] is not None:
            month, day = _in_order(int(part["first"]), int(part["second"]))
        elif part["month"] is not None:
            month, day = int(part["month"]), int(part["day"])
        else:
            month = _MONTHS.index((part["month3"] or part["month4"])[:3].lower()) + 1
            day = int(part["day3"] or part["day4"])
        try:
            yield date(year, month, day)
        except ValueError:
            yield None


def _in_order(first: int, second: int) -> tuple[int, int]:
    """Month and day; a month of 0, which does not exist, if it could be either."""
    if first > 12 or first == second:
        return second, first
    return (first, second) if second > 12 else (0, 0)
