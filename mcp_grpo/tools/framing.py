"""Cuts a server's output into JSON-RPC messages: in linear time, within a bound on memory, whatever comes."""

import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

import mcp.types as types
from mcp.types import ErrorData, JSONRPCError, JSONRPCMessage


# The id is looked for at both ends, where servers put it: `{"jsonrpc":"2.0","id":1,"result":...}` (Python) and
# `{"result":...,"jsonrpc":"2.0","id":1}` (TypeScript). In between it could be anything that a result contains.
_ID = rb'"id"\s*:\s*(\d+|"[^"\\]*")'
_VERSION = rb'"jsonrpc"\s*:\s*"2\.0"'
_ID_AT_START = re.compile(rb"\s*\{\s*(?:" + _VERSION + rb"\s*,\s*)?" + _ID)
_ID_AT_END = re.compile(_ID + rb"\s*(?:,\s*" + _VERSION + rb"\s*)?\}\s*$")
_EDGE = 256  # bytes kept of each end of an oversized line

# Marks of the errors that we put in the place of a reply. Not to be guessed by a server, whose own errors they are not.
OVERSIZED = f"oversized-{uuid.uuid4().hex}"
MALFORMED = f"malformed-{uuid.uuid4().hex}"


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line that was dropped for its size; `edge` is the end of it that was kept."""

    edge: bytes


class LineSplitter:
    """
    Collects chunks into lines, and drops lines over `max_bytes`.

    Args:
        max_bytes (`int`):
            Longest line that is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pieces: list[bytes] = []  # joined once per line: adding each chunk to one buffer is quadratic
        self._size = 0
        self._dropping = False
        self._tail = b""

    def feed(self, chunk: bytes) -> Iterator[bytes | Oversized]:
        """
        Take in what was read.

        Args:
            chunk (`bytes`):
                The next bytes of the stream.

        Yields:
            `bytes` or `Oversized`: Each line that ends in this chunk, without its newline. An oversized line is
            reported twice, by its start as soon as it is too long (it may never end) and by its end.
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
    The message in a line.

    Args:
        line (`bytes` or `Oversized`):
            A line of the server's output.
        max_bytes (`int`):
            The limit to name in the error that answers an oversized line.

    Returns:
        `JSONRPCMessage` or `None`: The message. A reply that was too long or that cannot be read becomes an error reply
        to the same request, so that its caller learns at once. `None` for a line that is nobody's reply, such as a
        banner.
    """
    if isinstance(line, Oversized):
        text = f"the result is larger than {max_bytes} bytes"
        return _failed_reply(line.edge, types.INTERNAL_ERROR, text, OVERSIZED)
    try:
        # Undecodable bytes are replaced rather than refused: a tool may well return half a character.
        return types.jsonrpc_message_adapter.validate_json(line.decode("utf-8", "replace"), by_name=False)
    except ValueError:
        return _failed_reply(line, types.PARSE_ERROR, "the reply is not a JSON-RPC message", MALFORMED)


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
