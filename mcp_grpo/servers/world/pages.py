"""Pages of the invented web, what they state, and how they say it."""

from dataclasses import dataclass
from datetime import date

from mcp_grpo.servers.world.market import MONTHS


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
    """
    What a page states.

    Args:
        kind (`str`):
            `"revenue"`, `"net_income"`, `"ceo"`, `"cfo"`, `"headquarters"`, `"plant_jobs"`, `"plant_capacity"`,
            `"contract"`, `"product_price"`, `"price_target"`, `"takeover"`, `"split"`, `"rename"`, `"delisting"` or
            `"halt"`.
        symbol (`str`):
            Today's symbol of the company, the one of class A where there are two.
        subject (`str`):
            What it is about among facts of its kind and company, such as `"FY2023"` or the town of a plant.
        value (`str`):
            The answer in words, as the page has it.
        amount (`int`, *optional*):
            The answer as a number, exact where the page rounds: whole units of a currency, cents of a price, or a count.
        date (`str`):
            Since when it holds, or when it happened.
        url (`str`):
            The page.
        is_stale (`bool`):
            Whether another page of the corpus states otherwise, and is right.
        superseded_by (`str`, *optional*):
            That page.
    """

    kind: str
    symbol: str
    subject: str
    value: str
    amount: int | None
    date: str
    url: str
    is_stale: bool
    superseded_by: str | None


def money(amount: int, currency: str) -> str:
    """
    An amount as prose has it.

    Args:
        amount (`int`):
            Whole units.
        currency (`str`):
            `"USD"`, `"GBP"` or `"EUR"`.

    Returns:
        `str`: Such as `"$2.49 billion"` or `"-£948.6 million"`, rounded half up.
    """
    sign, size = SIGNS[currency], abs(amount)
    minus = "-" if amount < 0 else ""
    if size >= 999_950_000:
        parts = (size + 5_000_000) // 10_000_000
        return f"{minus}{sign}{parts // 100}.{parts % 100:02} billion"
    parts = (size + 50_000) // 100_000
    return f"{minus}{sign}{parts // 10}.{parts % 10} million"


def long_date(day: date | str) -> str:
    """A date as prose has it, such as `"March 3, 2024"`."""
    day = date.fromisoformat(day) if isinstance(day, str) else day
    return f"{MONTHS[day.month - 1]} {day.day}, {day.year}"


def thousands(amount: int) -> str:
    """An amount in thousands as a filing has it, losses in brackets."""
    return f"{amount // 1_000:,}" if amount >= 0 else f"({-amount // 1_000:,})"


def compared(now: int, before: int) -> str:
    """How an amount compares with an earlier one, such as `"4.3% above that of"`."""
    tenths = (2_000 * abs(now - before) + before) // (2 * before)
    return f"{tenths // 10}.{tenths % 10}% {'above' if now >= before else 'below'} that of"


def runs(days: list[date]) -> list[list[date]]:
    """Days in groups that are at most four days apart."""
    runs: list[list[date]] = []
    for day in days:
        if runs and (day - runs[-1][-1]).days <= 4:
            runs[-1].append(day)
        else:
            runs.append([day])
    return runs
