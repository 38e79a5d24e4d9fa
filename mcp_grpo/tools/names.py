"""Suggest names that were probably meant."""

import difflib
import re
from collections.abc import Iterable, Sequence


MAX_NAME_LENGTH = 100  # of a name that does not exist, in a message
MAX_NAMES = 30  # listed in a message; some servers have hundreds of tools

# Names of tools in tasks of earlier systems, and what their vendors call them now.
EARLIER_TOOL_NAMES = {"send_slack_message": "slack_post_message", "tavily_qna_search": "tavily_qna"}

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of `get_stock_quote` and of `getStockQuote`


def ranked(name: str, names: Iterable[str]) -> list[str]:
    """
    Order names by how likely they were meant, the likeliest first.

    Names are compared letter by letter and word by word, so that `send_slack_message` is near `slack_post_message`.
    """
    name = name[:MAX_NAME_LENGTH]  # a policy may repeat a letter thousands of times
    words, successor = _words(name), EARLIER_TOOL_NAMES.get(name)

    def likeness(other: str) -> tuple[bool, float]:
        return other == successor, _ratio(name.lower(), other.lower()) + _shared(words, _words(other))

    return sorted(names, key=likeness, reverse=True)


def nearest_first(name: str, names: Iterable[str]) -> str:
    """List names for a message, the likeliest first: `` `read`, `write` and 200 more ``."""
    return shortlist([f"`{other}`" for other in ranked(name, names)], MAX_NAMES) or "none"


def shortlist(words: Sequence[str], limit: int) -> str:
    """List at most `limit` words for a message: `a, b and 3 more`."""
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _shared(words: Sequence[str], others: Sequence[str]) -> float:
    """Return the mean similarity of each word to the best match in the other name, from 0 to 1."""
    if not words or not others:
        return 0.0
    best = [max(_ratio(word, other) for other in others) for word in words]
    best += [max(_ratio(other, word) for word in words) for other in others]
    return sum(best) / len(best)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
