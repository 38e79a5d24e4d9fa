"""Read what a tool returned: JSON, Python literals, tables, pairs, marked lines, a single value, or plain text."""

import ast
import csv
import io
import json
import math
import re
from dataclasses import dataclass
from typing import Any, Literal, cast

from mcp_grpo.synth.tame import is_tame, is_tame_key


Form = Literal["data", "table", "marked", "pairs", "scalar", "text"]
MARK, NAME = "mark", "name"  # fields of a line such as "[FILE] notes.txt"
MAX_READ = 200_000  # characters
MAX_ANSWER = 80
MAX_WORDS = 5  # of a result that is one value: more make a sentence

_GUESSED = {"true", "false", "yes", "no", "none", "null", "n/a"}  # where one guess in two is right
# What a tool says, rather than names: a sentence, a part of data, or how it went.
_SAID = re.compile(
    r"[.!?:;…]$|^\W|[\[\]{}<>]|\b(?:no|not|none|ok|done|error|failed|unknown|invalid|success\w*)\b", re.IGNORECASE
)
_PAIR = re.compile(r"^([A-Za-z][\w -]{0,39}):\s+(\S.*)$")
_MARKED = re.compile(r"^\[([A-Z][A-Za-z]{1,15})\]\s+(\S.*)$")


@dataclass(frozen=True, slots=True)
class Reading:
    """A result as data: an object, a list, a single value, or the lines of a text that has no other form."""

    form: Form
    value: Any

    @property
    def is_empty(self) -> bool:
        """Tell whether nothing is in it."""
        return not any(True for _ in _leaves(self.value))


def read(text: str) -> Reading:
    """Read the text of a result."""
    text = text.strip()
    if len(text) > MAX_READ:
        return Reading("text", [])
    if (value := _data(text)) is not None:
        return Reading("data", value)
    lines = [line.rstrip() for line in text.split("\n") if line.strip()]
    for form, found in (
        ("marked", _marked(lines)),
        ("pairs", _pairs(text)),
        ("table", _table(lines)),
        ("scalar", _single(lines)),
    ):
        if found is not None:
            return Reading(cast("Form", form), found)
    return Reading("text", [line.strip() for line in lines])


def is_scalar(value: Any) -> bool:
    """Tell whether a value can be asked for: a number, or a short text of one line."""
    if isinstance(value, bool):
        return False
    if isinstance(value, int | float):
        return math.isfinite(value) and abs(value) < 1e15
    is_text = isinstance(value, str) and is_tame(value, MAX_ANSWER) and re.search(r"\w", value) is not None
    return is_text and value.casefold() not in _GUESSED


def _leaves(value: Any) -> Any:
    if isinstance(value, dict):
        for inner in cast("dict[str, Any]", value).values():
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _leaves(inner)
    elif value is not None and value != "":
        yield value


def _data(text: str) -> Any:
    """Read JSON, several JSON objects after each other, or a literal of Python; only objects and lists count."""
    if not text.startswith(("{", "[")) or _MARKED.match(text.split("\n", 1)[0]):
        return None
    decoder, found, at = json.JSONDecoder(), list[Any](), 0
    try:
        while at < len(text):
            value, at = decoder.raw_decode(text, at)
            found.append(value)
            at += len(text[at:]) - len(text[at:].lstrip())
    except (ValueError, RecursionError):
        try:
            found = [_plain(ast.literal_eval(text))]
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            return None
    value = found[0] if len(found) == 1 else found
    return value if isinstance(value, dict | list) else None


def _plain(value: Any) -> Any:
    """Return a literal of Python with lists for tuples."""
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple | set):
        return [_plain(inner) for inner in cast("list[Any]", value)]
    return value


def _single(lines: list[str]) -> Any:
    """Read a result that is nothing but a number or a short name; a sentence is none."""
    value = _number(lines[0].strip()) if len(lines) == 1 else None
    is_name = isinstance(value, str) and len(value.split()) <= MAX_WORDS and not _SAID.search(value)
    return value if is_scalar(value) and (is_name or not isinstance(value, str)) else None


def _marked(lines: list[str]) -> list[dict[str, str]] | None:
    matches = [_MARKED.match(line) for line in lines]
    found = [{MARK: match[1], NAME: match[2].strip()} for match in matches if match is not None]
    return found if found and len(found) == len(lines) else None


def _pairs(text: str) -> dict[str, Any] | list[dict[str, Any]] | None:
    """Read lines of the form `key: value`; blocks with the same keys, between blank lines, are a list."""
    blocks: list[dict[str, Any]] = []
    for block in re.split(r"\n\s*\n", text):
        lines = [line.strip() for line in block.split("\n") if line.strip()]
        if not blocks and len(lines) > 1 and re.fullmatch(r"[A-Za-z ]{3,40}:", lines[0]):
            lines = lines[1:]  # a title
        matches = [_PAIR.match(line) for line in lines]
        if not lines or any(match is None for match in matches):
            return None
        pairs = {match[1].strip(): _number(match[2].strip()) for match in matches if match is not None}
        if len(pairs) < max(2, len(lines)):
            return None
        blocks.append(pairs)
    if len(blocks) == 1:
        return blocks[0]
    return blocks if blocks and all(one.keys() == blocks[0].keys() for one in blocks) else None


def _table(lines: list[str]) -> list[dict[str, Any]] | None:
    """Read comma-separated values under a line with their names."""
    if len(lines) < 3 or "," not in lines[0]:
        return None
    try:
        rows = list(csv.reader(io.StringIO("\n".join(lines)), strict=True))
    except csv.Error:
        return None
    head = [name.strip() for name in rows[0]]
    is_head = len(set(head)) == len(head) and all(is_tame_key(name) and not name[0].isdigit() for name in head)
    if (
        not is_head
        or any(len(row) != len(head) for row in rows)
        or any(" " in name and len(name) > 20 for name in head)
    ):
        return None
    return [dict(zip(head, (_number(cell.strip()) for cell in row), strict=True)) for row in rows[1:]]


def _number(text: str) -> Any:
    """Return the number that a text spells, unless it would be written differently."""
    text = text[1:-1] if len(text) > 2 and text[0] == text[-1] and text[0] in "'\"" else text
    if re.fullmatch(r"-?(?:0|[1-9]\d{0,14})", text):
        return int(text)
    return float(text) if re.fullmatch(r"-?(?:0|[1-9]\d{0,11})\.\d{1,8}", text) else text
