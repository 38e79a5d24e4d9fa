"""Split a server's output into JSON-RPC messages, in linear time and bounded memory."""

import re
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from typing import Any, cast

import mcp.types as types
from mcp.types import (
    ErrorData,
    JSONRPCError,
    JSONRPCMessage,
    JSONRPCNotification,
    JSONRPCRequest,
    JSONRPCResponse,
)
from pydantic_core import from_json, to_json


MAX_VALUES = 50_000  # of a message: each takes memory and time, however short it is
MAX_PARTS = 1_000  # of a result; texts beyond are joined, since the SDK takes a while for each

TOO_MANY_VALUES = f"the result has more than {MAX_VALUES} values"

# The id is looked for at both ends, where servers put it: `{"jsonrpc":"2.0","id":1,"result":...}` (Python) and
# `{"result":...,"jsonrpc":"2.0","id":1}` (TypeScript). In between it could be anything that a result contains.
_ID = rb'"id"\s*:\s*(\d+|"[^"\\]*")'
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID_AT_START = re.compile(rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?" + _ID)
_ID_AT_END = re.compile(_ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*$")
_EDGE = 256  # bytes kept of each end of an oversized line

# Escapes of half a surrogate pair, which is no character. What is in the group stays: whole pairs and escaped backslashes.
_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_SURROGATE = re.compile(rb"((?:\\\\)+|" + _HIGH + _LOW + rb")|" + _HIGH + rb"|" + _LOW)

# Mark the errors that we put in place of a reply. Random, so that no server can send them.
OVERSIZED = f"oversized-{uuid.uuid4().hex}"
MALFORMED = f"malformed-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line that was dropped for its size; `edge` is its start or its end."""

    edge: bytes


class LineSplitter:
    """Collects chunks into lines, and drops lines over `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []  # joined once per line: growing one buffer is quadratic
        self._size = 0
        self._dropping = False
        self._tail = b""

    @property
    def is_dropping(self) -> bool:
        """Return whether it is in a line that is too long."""
        return self._dropping

    def feed(self, chunk: bytes) -> Iterator[bytes | Oversized]:
        """
        Yield each line that ends in this chunk. An oversized line is reported twice: by its start as soon as it is too
        long, since it may never end, and by its end.
        """
        *ended, rest = chunk.split(b"\n")
        for piece in ended:
            yield from self._add(piece)
            if self._dropping:
                yield Oversized(self._tail)
            else:
                yield b"".join(self._pieces)
            self._pieces, self._size, self._dropping, self._tail = [], 0, False, b""
        yield from self._add(rest)

    def _add(self, piece: bytes) -> Iterator[Oversized]:
        self._size += len(piece)
        if not self._dropping:
            self._pieces.append(piece)
            if self._size <= self._max_bytes:
                return
            line = b"".join(self._pieces)
            self._pieces, self._dropping, self._tail = [], True, line[-_EDGE:]
            yield Oversized(line[:_EDGE])
        else:
            self._tail = (self._tail + piece)[-_EDGE:]


def parse(line: bytes | Oversized, max_bytes: int) -> JSONRPCMessage | None:
    """
    Parse a line. A reply that is too long or unreadable becomes an error reply to the same request, so that its caller does
    not wait; a line that is nobody's reply, such as a banner or a log in JSON, is `None`.
    """
    if isinstance(line, Oversized):
        text = f"the result is larger than {max_bytes} bytes"
        return _failed_reply(line.edge, types.INTERNAL_ERROR, text, OVERSIZED)
    if line[:_EDGE].lstrip()[:1] != b"{":
        return None
    if has_too_many_values(line):
        return _failed_reply(line, types.INTERNAL_ERROR, TOO_MANY_VALUES, OVERSIZED)
    try:
        content = read_message(line)
        if content.get("jsonrpc") != "2.0":
            return None
        return _model(content).model_validate(content, by_name=False)
    except ValueError:
        return _failed_reply(line, types.PARSE_ERROR, "the reply is not a JSON-RPC message", MALFORMED)


def has_too_many_values(text: bytes) -> bool:
    """Return whether JSON text has more than `MAX_VALUES` values, without reading it, which would take long."""
    if text.count(b",") + text.count(b"[") + text.count(b"{") <= MAX_VALUES:
        return False
    # Commas and brackets in strings do not count.
    plain = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    if plain.count(b'"') > 4 * MAX_VALUES:  # of keys and values
        return True
    outside = b"".join(plain.split(b'"')[::2])
    return outside.count(b",") + outside.count(b"[") + outside.count(b"{") > MAX_VALUES


def repaired(text: bytes) -> bytes:
    """Replace bytes that are not UTF-8, and escapes of half a surrogate pair."""
    text = text.decode("utf-8", "replace").encode()
    return _SURROGATE.sub(lambda found: found[1] or rb"\ufffd", text)


def joined(message: Any) -> Any:
    """Join neighbouring texts of a result that has very many parts, as the policy will read them; say what is left out."""
    result: Any = message.get("result")
    parts: Any = cast("dict[str, Any]", result).get("content") if isinstance(result, dict) else None
    if not isinstance(parts, list) or len(cast("list[Any]", parts)) <= MAX_PARTS:
        return message
    fewer: list[Any] = []
    for is_text, group in groupby(cast("list[Any]", parts), _is_text):
        run = list(group)
        fewer += [{"type": "text", "text": "\n".join(part["text"] for part in run)}] if is_text else run
    if len(fewer) > MAX_PARTS:
        fewer = [*fewer[:MAX_PARTS], {"type": "text", "text": f"[{len(fewer) - MAX_PARTS} more parts were left out]"}]
    return message | {"result": result | {"content": fewer}}


def read_message(text: bytes) -> Any:
    """Read JSON, with what is no character replaced and very many parts joined. Raises `ValueError` if it is none."""
    try:
        content = from_json(text)
    except ValueError:
        content = from_json(repaired(text))
    return joined(content) if isinstance(content, dict) else content


def cleaned(text: bytes) -> bytes:
    """Return a message that the SDK can read, and in a short time; what cannot be mended is returned as it is."""
    try:
        content = from_json(text)
        message = joined(content) if isinstance(content, dict) else content
        return text if message is content else to_json(message)
    except ValueError:
        with suppress(ValueError):
            return to_json(read_message(text))
    return text


def _is_text(part: Any) -> bool:
    match part:
        case {"type": "text", "text": str()}:
            return True
        case _:
            return False


def _model(content: Any) -> Any:
    if "method" in content:
        return JSONRPCRequest if "id" in content else JSONRPCNotification
    return JSONRPCError if "error" in content else JSONRPCResponse


def _failed_reply(line: bytes, code: int, message: str, mark: str) -> JSONRPCError | None:
    match = _ID_AT_START.match(line[:_EDGE]) or _ID_AT_END.search(line[-_EDGE:])
    if match is None:
        return None
    request_id = match[1].decode("utf-8", "replace").strip('"')
    return JSONRPCError(
        jsonrpc="2.0",
        id=int(request_id) if request_id.isdecimal() else request_id,
        error=ErrorData(code=code, message=message, data={mark: True}),
    )
