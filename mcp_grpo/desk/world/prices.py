"""Daily prices of one listing, in integer cents."""

from dataclasses import replace
from datetime import date

from mcp_grpo.desk.world.companies import Issuer
from mcp_grpo.desk.world.records import Bar
from mcp_grpo.desk.world.stream import Stream, words


WORDS_PER_DAY = 8
SCALE = 10_000
"""The walk is in units of a cent / `SCALE`, so that rounding does not bias prices."""

PriceRow = tuple[Bar, Bar]
"""A day adjusted for splits, and the same day as traded."""


def make_prices(seed: int, issuer: Issuer, first_price: int, usual_volume: int) -> list[PriceRow]:
    """
    Make all trading days of a listing, oldest first.

    Classes of shares of one issuer move together. The walk is in prices adjusted for splits. Before a split of `n` for
    `d`, prices are multiples of `d` cents and volumes multiples of `n` shares, so that prices as traded are whole cents.
    """
    draw = Stream(seed, "prices", issuer.key)
    drift, spread = draw.between(-250, 650), draw.between(9, 24)
    days = issuer.days
    noise = words(f"{seed}/walk/{issuer.key}", "H", len(days) * WORDS_PER_DAY)
    factors = _factors(days, issuer.splits)
    rows: list[PriceRow] = []
    walk = first_price * SCALE
    lowest = 150 * SCALE
    previous = walk
    for place, day in enumerate(days):
        times, over = factors[place]
        a, b, c, d, e, f, g, h = noise[place * WORDS_PER_DAY : (place + 1) * WORDS_PER_DAY]
        step = (a + b + c + d - 131_070) * spread // 40 + drift  # millionths
        walk += walk * step // 1_000_000
        if walk < lowest:
            walk = lowest + (lowest - walk)
        unit = SCALE * over
        close = walk // unit * over
        opening = (previous + (walk - previous) * (e & 255) // 640) // unit * over
        top = max(opening, close)
        bottom = min(opening, close)
        high = top + top * (f & 1_023) // 80_000 // over * over
        low = bottom - bottom * (g & 1_023) // 80_000 // over * over
        volume = (usual_volume + usual_volume * (h - 20_000) // 50_000) // times * times
        previous = walk
        bar = Bar(date=day.isoformat(), open=opening, high=high, low=low, close=close, volume=volume)
        traded = {name: getattr(bar, name) * times // over for name in ("open", "high", "low", "close")}
        rows.append((bar, replace(bar, **traded, volume=volume * over // times)))
    return rows


def _factors(days: list[date], splits: list[tuple[date, int, int]]) -> list[tuple[int, int]]:
    """Return, for each day, the products of numerators and denominators of the splits to come."""
    factors: list[tuple[int, int]] = []
    for day in days:
        times = over = 1
        for when, numerator, denominator in splits:
            if day < when:
                times *= numerator
                over *= denominator
        factors.append((times, over))
    return factors
