"""The notations in which arguments of tool calls are written."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mcp_grpo.masking.formats.cursor import Cursor, Unreadable
from mcp_grpo.masking.formats.offered_tools import OfferedTool, Shape
from mcp_grpo.masking.formats.spelling import plain, spelled


# Between the quotes of a JSON text.
_CONTENT = re.compile(r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*')
_SCALAR = re.compile(r"true|false|null|(-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)")
_WORD = re.compile("[A-Za-z0-9_]+")

# Of a Python literal: a text, a bracket, or anything else between them.
_PYTHON_PART = re.compile(
    r"""'(?P<text>[^'\\]*(?:\\.[^'\\]*)*)'|"[^"\\]*(?:\\.[^"\\]*)*"|(?P<open>[\[{])|(?P<close>[\]}])|,|[^\[\](){}'",]+""",
    re.DOTALL,
)
_PYTHON_WORD = re.compile(r"\b(?:True|False|None)\b")
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Nested:
    """An object in braces, like JSON: with objects, lists, texts and numbers in it."""

    after_name: str  # between the tool's name and the first key, up to the brace
    key_quote: str  # around keys, if anything
    colon: str  # between a key and its value, without quotes
    comma: str  # between a value and the next key, without quotes
    quote: str  # around texts; in JSON's quotes they are escaped, in others not
    closing: str  # after the last brace
    joint: str | None = None  # instead of that if another call follows, up to its name

    def spell_key(self, key: str) -> str:
        """Spell a key."""
        return spelled(json.dumps(key, ensure_ascii=False)[1:-1] if self.key_quote else key)

    def read(self, cursor: Cursor, tool: OfferedTool) -> tuple[Sequence[Mapping[str, Any]], bool]:
        """Read the arguments, in each way they can be understood, and whether another call follows in the same block."""
        cursor.literal(self.after_name)
        arguments = self._object(cursor, tool.shape)
        endings = (self.closing,) if self.joint is None else (self.closing, self.joint)
        return (arguments,), cursor.one_of(endings) == self.joint

    def _object(self, cursor: Cursor, shape: Shape) -> dict[str, Any]:
        found: dict[str, Any] = {}
        used: set[str] = set()
        comma = ""
        while self._continues(cursor, shape, used, comma):
            key = cursor.match(_CONTENT if self.key_quote else _WORD)[0]
            cursor.skip(len(key), shape.num_choices(key, used))
            cursor.literal(self.key_quote + self.colon)
            name = _unescaped(key)
            if name in found:
                raise Unreadable
            used.add(self.spell_key(name) if "\\" in key else key)
            found[name] = self._value(cursor, shape.keys.get(key, _ANYTHING))
            comma = self.comma
        return found

    def _continues(self, cursor: Cursor, shape: Shape, used: set[str], comma: str) -> bool:
        """Read the brace that closes an object, or what comes before its next key; return whether there is one."""
        options = [comma + self.key_quote] if not shape.is_closed or shape.keys.keys() - used else []
        options += ["}"] if shape.required <= used else []
        return cursor.one_of(options) != "}"

    def _value(self, cursor: Cursor, shape: Shape) -> Any:
        if cursor.text.startswith(self.quote, cursor.position):
            return self._text(cursor, shape)
        match cursor.text[cursor.position : cursor.position + 1]:
            case "{":
                cursor.skip(1, shape.type != "object")
                return self._object(cursor, shape)
            case "[":
                cursor.skip(1, shape.type != "array")
                return self._list(cursor, shape)
        scalar = cursor.match(_SCALAR)
        cursor.skip(len(scalar[0]), len(scalar[0]))
        if scalar[1]:
            cursor.choice()  # a number ends where another digit could have come
        return json.loads(scalar[0])

    def _text(self, cursor: Cursor, shape: Shape) -> str:
        cursor.skip(len(self.quote), 0 if shape.type == "string" else len(self.quote))
        is_json = self.quote == '"'
        content = cursor.match(_CONTENT)[0] if is_json else cursor.until(self.quote)
        length = len(content) + len(self.quote)
        if not cursor.skip(length, length).endswith(self.quote):
            raise Unreadable
        return _unescaped(content) if is_json else plain(content)

    def _list(self, cursor: Cursor, shape: Shape) -> list[Any]:
        found: list[Any] = []
        comma = ""
        while cursor.one_of((comma, "]")) != "]":
            found.append(self._value(cursor, shape.items))
            comma = self.comma
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """Keys and values one after the other, like XML or the arguments of a Python function. Nothing in a value is forced."""

    after_name: str  # always follows the tool's name
    before_key: str  # between the tool's name and the first key
    after_key: str  # between a key and its value
    after_value: str | None  # ends a value, which is then plain text; `None` if values are Python literals
    between: str  # between that and the next key
    closing: str  # instead of that after the last value
    empty: str  # after the name if there are no arguments
    joint: str | None = None  # instead of `closing` if another call follows, up to its name
    empty_joint: str | None = None  # instead of `empty` if another call follows

    def spell_key(self, key: str) -> str:
        """Spell a key."""
        return spelled(key)

    def read(self, cursor: Cursor, tool: OfferedTool) -> tuple[Sequence[Mapping[str, Any]], bool]:
        """Read the arguments, in each way they can be understood, and whether another call follows in the same block."""
        shape = tool.shape
        texts: dict[str, Any] = {}
        values: dict[str, Any] = {}
        used: set[str] = set()
        endings = [ending for ending in (self.empty, self.empty_joint) if ending is not None]
        before_key = self.before_key
        while True:
            options = [before_key] if not shape.is_closed or shape.keys.keys() - used else []
            found = cursor.one_of([*options, *endings] if shape.required <= used else options)
            if found in endings:
                return (values, texts), found in (self.joint, self.empty_joint)
            key = cursor.until(self.after_key)
            if key in used or not (key in shape.keys or _WORD.fullmatch(key)):
                raise Unreadable
            cursor.skip(len(key), shape.num_choices(key, used))
            cursor.literal(self.after_key)
            used.add(key)
            name, kind = plain(key), shape.keys.get(key, _ANYTHING).type
            text, values[name] = self._value(cursor, kind)
            texts[name] = text if kind is None else values[name]
            endings = [ending for ending in (self.closing, self.joint) if ending is not None]
            before_key = self.between

    def _value(self, cursor: Cursor, kind: str | None) -> tuple[Any, Any]:
        """Read a value, as text and as what it means."""
        if self.after_value is None:
            value = _python_value(cursor)
            cursor.choice()
            return value, value
        found = cursor.until(self.after_value)
        length = len(found) + len(self.after_value)
        cursor.skip(length, length)
        text = plain(found)
        return text, text if kind == "string" else _meaning(text)


# Of arguments, from the end of the tool's name to the end of the call.
Notation = Nested | Flat


def _unescaped(content: str) -> str:
    """Decode what is between the quotes of a JSON text."""
    return json.loads(f'"{plain(content)}"') if "\\" in content else plain(content)


def _meaning(text: str) -> Any:
    """Parse a text value as JSON or a Python constant; keep it as text if it is neither."""
    try:
        return json.loads(_JSON_WORDS.get(text, text))
    except ValueError:
        return text


def _python_value(cursor: Cursor) -> Any:
    start, depth, parts = cursor.position, 0, list[str]()
    while depth or cursor.position == start:
        part = cursor.match(_PYTHON_PART)
        depth += bool(part["open"]) - bool(part["close"])
        cursor.skip(len(part[0]), len(part[0]))
        is_quoted = part[0][0] in "'\""
        text = plain(part[0] if part["text"] is None else part["text"])
        parts.append(json.dumps(text) if part["text"] is not None else text if is_quoted else _as_json(text))
    return json.loads("".join(parts))


def _as_json(text: str) -> str:
    return _PYTHON_WORD.sub(lambda word: _JSON_WORDS[word[0]], text)


_ANYTHING = Shape(None, {}, spelled)
