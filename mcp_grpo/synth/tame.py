"""Decide which words of a server may stand in a prompt: what it says is data, and some servers speak to the reader."""

import re
from collections.abc import Iterable
from typing import Any

from mcp_grpo.tools.catalog import Tool


MAX_TEXT = 120  # characters of a value in a prompt
MAX_KEY = 40
MAX_PHRASE = 110

_KEY = re.compile(r"[^\W_][\w .:/%()#-]*")
_TOKEN = re.compile(r"<[|/!\w][^>]*>|\[/?[A-Z]{3,}\]|\|>|\{\{|\]\(|https?://", re.IGNORECASE)
_ADDRESSES_READER = re.compile(
    r"\b(?:ignore|disregard|forget|override|instead|instructions?|prompts?|jailbreak|assistant|secrets?|passwords?|api.?keys?)\b"
    r"|\b(?:you|your|yourself|user|users)\b|\b(?:always|never|must|important|system\s+message)\b",
    re.IGNORECASE,
)
_SPEAKS = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b.{0,40}\b(?:all|any|previous|prior|above|earlier|instructions?|rules?)\b"
    r"|\b(?:instructions?|system\s+prompt|jailbreak)\b|\byou\s+(?:must|are|should|will|have)\b",
    re.IGNORECASE,
)
_NO_VERBS = {
    *("a", "an", "the", "this", "that", "these", "it", "its", "tool", "tools", "deprecated", "note", "warning", "for", "to"),
    *("when", "if", "in", "on", "with", "by", "from", "use", "used", "using", "please", "and", "or", "not", "no", "all", "any"),
}  # fmt: skip


def is_tame(text: str, longest: int = MAX_TEXT) -> bool:
    """Tell whether a value of a server can be quoted in a prompt: one short line that is no markup and no instruction."""
    return (
        0 < len(text) <= longest
        and text == text.strip()
        and text.isprintable()
        and "`" not in text
        and not _TOKEN.search(text)
        and not _SPEAKS.search(text)
    )


def is_tame_key(key: Any) -> bool:
    """Tell whether the name of a field can be quoted in a prompt."""
    return isinstance(key, str) and len(key) <= MAX_KEY and _KEY.fullmatch(key) is not None and is_tame(key, MAX_KEY)


def phrase(tool: Tool) -> str:
    """
    Return what a tool does as the rest of "Please ...": by the first sentence of its description, where that is a plain one, or else
    by its name.
    """
    first = re.split(r"(?<=[a-z)])\.(?:\s|$)|\n|;|:\s", tool.description.strip(), maxsplit=1)[0].strip().rstrip(".")
    words = first.split()
    is_plain = (
        len(words) > 1
        and is_tame(first, MAX_PHRASE)
        and re.fullmatch(r"[A-Za-z][\w ,'()/-]+", first) is not None
        and not _ADDRESSES_READER.search(first)
        and words[0].isalpha()
        and words[0].lower() not in _NO_VERBS
    )
    if not is_plain:
        return f"use `{tool.name}`"
    if words[1].lower() == "of":  # "Price of an item"
        return " ".join(["find the", words[0] if words[0].isupper() else words[0].lower(), *words[1:]])
    return " ".join([_imperative(words[0]), *words[1:]])


def _imperative(verb: str) -> str:
    """Return "show" for "Shows"."""
    verb = verb if verb[1:].isupper() else verb[0].lower() + verb[1:]
    if not verb.endswith("s") or verb.endswith(("ss", "us", "is")):
        return verb
    if verb.endswith("ies"):
        return f"{verb[:-3]}y"
    return verb[:-2] if verb.endswith(("ches", "shes", "sses", "xes", "zes")) else verb[:-1]


def words_of(*texts: str) -> frozenset[str]:
    """Return the words of names such as `tableName`, `list_tables` and `repo-path`, in the singular."""
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", " ".join(texts))
    return frozenset(_singular(word.lower()) for word in found)


def _singular(word: str) -> str:
    if word.endswith("ies") and len(word) > 4:
        return f"{word[:-3]}y"
    return word[:-1] if word.endswith("s") and not word.endswith("ss") and len(word) > 3 else word


def listed(items: Iterable[str]) -> str:
    """Join clauses with commas and "and"."""
    found = list(items)
    return " and ".join([", ".join(found[:-1]), found[-1]] if len(found) > 1 else found)
