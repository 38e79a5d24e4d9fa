"""Text from outside, such as a server's or a policy's, made so that it does nothing where it is shown."""

import re


# Characters that a terminal obeys or that turn the direction of text, halves of characters, and what is shown for them. One
# for one, so that positions in a text stay what they were.
_SHOWN = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
_SHOWN |= dict.fromkeys([*range(0x80, 0xA0), 0x2028, 0x2029, 0x061C, 0x200E, 0x200F, 0xFEFF], 0xFFFD)
_SHOWN |= dict.fromkeys([*range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)
_SPECIAL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
_MARKDOWN = re.compile(r"([\\`*_{}\[\]()#!|~$:@]|(?<=www)\.)", re.IGNORECASE)
_BACKTICKS = re.compile("`+")


def inert(text: str) -> str:
    """Return a text with control characters shown (`␛`) instead of obeyed; lines and tabs stay."""
    return _SPECIAL.sub(lambda found: chr(_SHOWN.get(ord(found[0]), 0xFFFD)), text)


def markdown(text: str, max_length: int = 300) -> str:
    """Return a text as one line that Markdown and HTML show as it is: no link, no image, no tag, no cell of a table."""
    words = " ".join(inert(text).split())
    words = words if len(words) <= max_length else f"{words[:max_length]} ..."
    words = words.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKDOWN.sub(r"\\\1", words)


def markdown_code(text: str) -> str:
    """Return a text as a code span in a line or in a cell of a table."""
    words = " ".join(inert(text).split()).replace("|", "\\|")
    fence = "`" * (1 + max((len(run) for run in _BACKTICKS.findall(words)), default=0))
    padding = " " if "`" in words else ""
    return f"{fence}{padding}{words}{padding}{fence}"


def markdown_block(text: str, language: str) -> str:
    """Return a text as a block of code, whatever is in it."""
    fence = "`" * max(3, 1 + max((len(run) for run in _BACKTICKS.findall(text)), default=0))
    return f"{fence}{language}\n{inert(text)}\n{fence}"
