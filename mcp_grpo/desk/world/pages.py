"""Pages of the invented web, the facts they state, and their wording."""

from dataclasses import dataclass
from datetime import date

from mcp_grpo.desk.world.market import MONTHS


SIGNS = {"USD": "$", "GBP": "£", "EUR": "€"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A page of the invented web. `kind` is what it is about, such as `"earnings"`."""

    url: str
    domain: str
    title: str
    published: str
    text: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A statement of a page, such as the revenue of a company (`symbol`) in a year (`subject`)."""

    kind: str
    symbol: str
    subject: str
    value: str
    amount: int | None
    date: str
    url: str
    is_stale: bool = False  # another page of the corpus states otherwise, and is right
    superseded_by: str | None = None  # that page


def money(amount: int, currency: str) -> str:
    """Return an amount as in prose, such as `"$2.49 billion"`."""
    sign, size = SIGNS[currency], abs(amount)
    minus = "-" if amount < 0 else ""
    if size >= 999_950_000:
        parts = (size + 5_000_000) // 10_000_000
        return f"{minus}{sign}{parts // 100}.{parts % 100:02} billion"
    parts = (size + 50_000) // 100_000
    return f"{minus}{sign}{parts // 10}.{parts % 10} million"


def long_date(day: date | str) -> str:
    """Return a date as in prose, such as `"March 3, 2024"`."""
    day = date.fromisoformat(day) if isinstance(day, str) else day
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def thousands(amount: int) -> str:
    """Return an amount in thousands as in a filing, losses in brackets."""
    return f"{amount // 1_000:,}" if amount >= 0 else f"({-amount // 1_000:,})"


def compared(now: int, before: int) -> str:
    """Compare an amount with an earlier one, as in `"4.3% above that of"`."""
    tenths = (2_000 * abs(now - before) + before) // (2 * before)
    return f"{tenths // 10}.{tenths % 10}% {'above' if now >= before else 'below'} that of"


def runs(days: list[date]) -> list[list[date]]:
    """Group days that are at most four days apart."""
    runs: list[list[date]] = []
    for day in days:
        if runs and (day - runs[-1][-1]).days <= 4:
            runs[-1].append(day)
        else:
            runs.append([day])
    return runs
