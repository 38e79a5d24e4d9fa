"""The present day of the world, and the days on which its exchanges are open."""

from datetime import date, timedelta
from functools import cache


FIRST_DAY = date(2021, 1, 4)
TODAY = date(2025, 6, 30)
US_EXCHANGES = ("NASDAQ", "NYSE")
DAY = timedelta(days=1)


@cache
def trading_days(exchange: str) -> tuple[date, ...]:
    """Return the days from `FIRST_DAY` to `TODAY` on which an exchange was open."""
    closed = {day for year in range(FIRST_DAY.year, TODAY.year + 1) for day in _holidays(exchange, year)}
    days = (FIRST_DAY + timedelta(days=number) for number in range((TODAY - FIRST_DAY).days + 1))
    return tuple(day for day in days if day.weekday() < 5 and day not in closed)


def month_end(year: int, month: int) -> date:
    """Return the last day of a month."""
    return date(year + month // 12, month % 12 + 1, 1) - DAY


def _holidays(exchange: str, year: int) -> set[date]:
    good_friday = _easter(year) - 2 * DAY
    easter_monday = _easter(year) + DAY
    if exchange in US_EXCHANGES:
        return {
            _observed(date(year, 1, 1)),
            _nth(year, 1, 0, 3),
            _nth(year, 2, 0, 3),
            good_friday,
            _last(year, 5, 0),
            _observed(date(year, 6, 19)),
            _observed(date(year, 7, 4)),
            _nth(year, 9, 0, 1),
            _nth(year, 11, 3, 4),
            _observed(date(year, 12, 25)),
        }
    if exchange == "LSE":
        bank = {_nth(year, 5, 0, 1), _last(year, 5, 0), _last(year, 8, 0)}
        return bank | {date(year, 1, 1), good_friday, easter_monday, date(year, 12, 25), date(year, 12, 26)}
    fixed = {date(year, 1, 1), date(year, 5, 1), date(year, 12, 24), date(year, 12, 25), date(year, 12, 26)}
    return fixed | {good_friday, easter_monday}


def _observed(day: date) -> date:
    """Move a holiday on a weekend to the nearest weekday."""
    return day - DAY if day.weekday() == 5 else day + DAY if day.weekday() == 6 else day


def _nth(year: int, month: int, weekday: int, number: int) -> date:
    first = date(year, month, 1)
    return first + timedelta(days=(weekday - first.weekday()) % 7 + 7 * (number - 1))


def _last(year: int, month: int, weekday: int) -> date:
    end = month_end(year, month)
    return end - timedelta(days=(end.weekday() - weekday) % 7)


def _easter(year: int) -> date:
    """Compute Easter Sunday by the anonymous Gregorian algorithm."""
    golden, century, rest = year % 19, year // 100, year % 100
    epact = (19 * golden + century - century // 4 - (century - (century + 8) // 25 + 1) // 3 + 15) % 30
    offset = (32 + 2 * (century % 4) + 2 * (rest // 4) - epact - rest % 4) % 7
    shift = (golden + 11 * epact + 22 * offset) // 451
    month, day = divmod(epact + offset - 7 * shift + 114, 31)
    return date(year, month, day + 1)
