"""Names that do not exist, and those that were probably meant."""

import difflib
import re
from collections.abc import Iterable, Sequence

from mcp_grpo.servers.earlier_names import EARLIER_TOOL_NAMES


MAX_NAME_LENGTH = 100  # of a name that does not exist, in a message
MAX_NAMES = 30  # of the names listed in a message; some servers have hundreds of tools

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")  # of `get_stock_quote` and of `getStockQuote`


def ranked(name: str, names: Iterable[str]) -> list[str]:
    """
    Order names by how likely they were meant.

    Names are compared letter by letter and word by word, so that `send_slack_message` is near `slack_post_message`. A name
    that is known to have been another one's comes first.

    Args:
        name (`str`):
            The name that was written.
        names (`Iterable[str]`):
            The names that exist.

    Returns:
        `list[str]`: The names, the likeliest first.
    """
    name = name[:MAX_NAME_LENGTH]  # a policy may well write the same letters thousands of times
    words, successor = _words(name), EARLIER_TOOL_NAMES.get(name)

    def likeness(other: str) -> tuple[bool, float]:
        return other == successor, _ratio(name.lower(), other.lower()) + _shared(words, _words(other))

    return sorted(names, key=likeness, reverse=True)


def nearest_first(name: str, names: Iterable[str]) -> str:
    """
    List names for a message, the likeliest meant first.

    Args:
        name (`str`):
            The name that was written.
        names (`Iterable[str]`):
            The names that exist.

    Returns:
        `str`: Such as `` `read`, `write` and 200 more ``.
    """
    return shortlist([f"`{other}`" for other in ranked(name, names)], MAX_NAMES) or "none"


def shortlist(words: Sequence[str], limit: int) -> str:
    """
    List words for a message.

    Args:
        words (`Sequence[str]`):
            The words.
        limit (`int`):
            How many are shown; of the others only the number is.

    Returns:
        `str`: Such as `a, b and 3 more`.
    """
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return ", ".join(words[:limit]) + more


def _words(name: str) -> list[str]:
    return [word.lower() for word in _WORDS.findall(name)]


def _shared(words: Sequence[str], others: Sequence[str]) -> float:
    """Mean likeness of each word of either name to the best of the other's, from 0 to 1."""
    if not words or not others:
        return 0.0
    best = [max(_ratio(word, other) for other in others) for word in words]
    best += [max(_ratio(other, word) for word in words) for other in others]
    return sum(best) / len(best)


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()
