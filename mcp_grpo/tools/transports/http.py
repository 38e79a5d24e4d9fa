"""Servers behind streamable HTTP: one pool of connections for all, and failures that only affect their call."""

import json
import logging
import re
import time
import uuid
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import anyio
import anyio.lowlevel
import httpx2
from mcp import MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR

from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.transports.framing import (
    OVERSIZED,
    TOO_MANY_VALUES,
    LineSplitter,
    Oversized,
    cleaned,
    has_too_many_values,
)
from mcp_grpo.tools.transports.share import BYTE_COST, LINE_COST, Share


# Marks of our own errors, as in `framing`.
TRANSPORT = f"transport-{uuid.uuid4().hex}"
UNSENT = f"unsent-{uuid.uuid4().hex}"
SESSION_ID = "mcp-session-id"
NOTIFY_TIMEOUT = 5.0
MAX_REDIRECTS = 5
MAX_REFUSALS = 10  # of one request by a server that asks to be sent it later
MIN_WAIT = 0.1  # seconds before it is sent again
FREE_LINES = 20  # of the event stream that answers a call; further ones count against the server's share
PIECE = 64 * 1024  # bytes that are decompressed at a time
_LOST_SESSION = re.compile(
    rb'"message"\s*:\s*"(?:Bad Request: )?(?:No valid session ID provided|Session not found|Server not initialized'
    rb'|(?:Missing|Invalid) session ID|Mcp-Session-Id header is required)\.?"',
    re.IGNORECASE,
)
_NOTIFICATION = b'"method":"notifications/'
_CALL = b'"method":"tools/call"'
_REDIRECTS = (301, 302, 303, 307, 308)


def shared_connections() -> httpx2.AsyncHTTPTransport:
    """Make the connections that all HTTP servers of a pool share."""
    # No limit on connections: waiting for one would count against a call's deadline; `max_inflight` is the limit.
    # `retries` are of connecting only, before anything was sent.
    # At its default level, httpx2 logs a line per call, with the address and any secrets in it.
    if (log := logging.getLogger("httpx2")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx2.AsyncHTTPTransport(retries=1, limits=limits)


class HttpTransport:
    """One connection to an HTTP server, over the shared connections."""

    def __init__(self, config: ServerConfig, connections: httpx2.AsyncBaseTransport) -> None:
        self._config = config
        self._transport = ErrorReplyTransport(
            connections, max_bytes=config.max_result_bytes, max_wait=config.call_timeout
        )

    @property
    def has_session(self) -> bool:
        """Return whether the server has given out a session id."""
        return self._transport.has_session

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Any, None]:
        """Connect, and yield the streams that `mcp.Client` takes; end the session on the way out."""
        config = self._config
        # Our own deadlines are shorter; this one only ends abandoned requests.
        timeout = httpx2.Timeout(min(30.0, config.connect_timeout), read=max(300.0, config.call_timeout + 10))
        # Uncompressed: a reply is small, or the server is next door. What comes compressed all the same is read too.
        headers = {"accept-encoding": "identity", **config.headers}
        streams: AbstractAsyncContextManager[Any]
        async with httpx2.AsyncClient(transport=self._transport, headers=headers, timeout=timeout) as client:
            streams = streamable_http_client(
                config.url or "", http_client=client, max_sse_event_size=config.max_result_bytes
            )
            async with streams as pair:
                yield pair


def is_unsent(error: MCPError) -> bool:
    """Return whether [`ErrorReplyTransport`] made this error because the request never reached the server."""
    data: Any = error.data
    return isinstance(data, dict) and UNSENT in data


class ErrorReplyTransport(httpx2.AsyncBaseTransport):
    """
    Answers a request that failed on the network with an error reply.

    The SDK lets such a failure end the session with every call in flight; an error reply only reaches its own call. A server
    that asks to be called later (`Retry-After`) is, if `max_wait` seconds allow.
    """

    def __init__(self, connections: httpx2.AsyncBaseTransport, max_bytes: int, max_wait: float = 30.0) -> None:
        self._connections = connections
        self._max_bytes = max_bytes
        self._max_wait = max_wait
        self._not_before = 0.0
        self._share = Share()
        self.has_session = False  # whether a reply had a session id

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request, and return the reply or an error reply that stands for a failure."""
        if request.method != "POST":
            return await self._send_other(request)
        if _NOTIFICATION in request.content[:200]:
            # The SDK sends notifications one by one, and no request may wait for a stuck one.
            request.extensions = request.extensions | {"timeout": httpx2.Timeout(NOTIFY_TIMEOUT).as_dict()}
        try:
            response = await self._send(request)
            self.has_session = self.has_session or SESSION_ID in response.headers
            if response.status_code < 300 and _is_event_stream(response):
                return self._as_events(response, request, FREE_LINES)  # the SDK handles a broken stream
            body = await self._read(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _error_reply(request, CONNECTION_CLOSED, f"{type(error).__name__}: {error}", UNSENT)
        except (httpx2.HTTPError, httpx2.StreamError, httpx2.InvalidURL, OSError, ValueError) as error:
            return _error_reply(request, CONNECTION_CLOSED, f"{type(error).__name__}: {error}", TRANSPORT)
        if body is None:
            return _error_reply(
                request, INTERNAL_ERROR, f"the result is larger than {self._max_bytes} bytes", OVERSIZED
            )
        return await self._as_reply(request, response, body)

    async def _send_other(self, request: httpx2.Request) -> httpx2.Response:
        """Send a GET or a DELETE, of which the SDK handles failures itself."""
        response = await self._connections.handle_async_request(request)
        if request.method == "GET" and response.status_code < 300 and _is_event_stream(response):
            return self._as_events(response, request, num_free_lines=0)
        await response.aclose()  # nobody needs what it says, and it may not end
        return httpx2.Response(response.status_code, request=request)

    async def _as_reply(self, request: httpx2.Request, response: httpx2.Response, body: bytes) -> httpx2.Response:
        began = time.perf_counter()
        is_too_much = has_too_many_values(body)
        body = body if is_too_much else cleaned(body)
        self._share.charge_answer(time.perf_counter() - began)
        await self._share.settle()
        if is_too_much:
            return _error_reply(request, INTERNAL_ERROR, TOO_MANY_VALUES, OVERSIZED)
        if _is_lost_session(request, response.status_code, body):
            # Refused unseen, so it may be sent again on a new session.
            return _error_reply(request, CONNECTION_CLOSED, "it no longer knows the session", UNSENT)
        is_refusal = _is_refusal(response.status_code) and not _is_error_reply(body)
        is_call = _CALL in request.content[:200]
        if is_refusal or 300 <= response.status_code < 400 or (is_call and _is_no_answer(response)):
            return _error_reply(request, CONNECTION_CLOSED, _describe(response, request), TRANSPORT)
        return httpx2.Response(response.status_code, headers=_plain_headers(response), content=body, request=request)

    async def _send(self, request: httpx2.Request) -> httpx2.Response:
        """Send a request; follow redirects to the same server, and come back later where it asks for that."""
        num_redirects, num_refusals, waited = 0, 0, 0.0
        while True:
            if (wait := self._not_before - time.monotonic()) > 0 and waited + wait <= self._max_wait:
                waited += wait
                await anyio.sleep(wait)
            response = await self._connections.handle_async_request(request)
            if (after := _retry_after(response)) is not None:
                num_refusals += 1
                if waited + after > self._max_wait or num_refusals > MAX_REFUSALS:
                    return response
                self._not_before = max(self._not_before, time.monotonic() + after)
            elif (url := _redirected(request, response)) is not None and num_redirects < MAX_REDIRECTS:
                num_redirects += 1
                request = httpx2.Request(
                    "POST", url, headers=request.headers, content=request.content, extensions=request.extensions
                )
            else:
                return response
            await response.aclose()

    async def _read(self, response: httpx2.Response) -> bytes | None:
        """Read the body; `None` if it is too large."""
        body = bytearray()
        try:
            async for piece in _pieces(response):
                body += piece
                if len(body) > self._max_bytes:
                    return None
        finally:
            await response.aclose()
        return bytes(body)

    def _as_events(self, response: httpx2.Response, request: httpx2.Request, num_free_lines: int) -> httpx2.Response:
        events = _Events(response, self._share, self._max_bytes, num_free_lines)
        return httpx2.Response(response.status_code, headers=_plain_headers(response), stream=events, request=request)


class _Events(httpx2.AsyncByteStream):
    """An event stream of which each line is made readable, and the server's share is kept."""

    def __init__(self, response: httpx2.Response, share: Share, max_bytes: int, num_free_lines: int) -> None:
        self._response = response
        self._share = share
        self._max_bytes = max_bytes
        self._num_free_lines = num_free_lines

    async def __aiter__(self) -> AsyncIterator[bytes]:
        splitter, held = LineSplitter(self._max_bytes), b""
        async for piece in _pieces(self._response):
            # Lines may also end with a carriage return, alone or before a line feed.
            piece, held = held + piece, b""
            if piece.endswith(b"\r"):
                piece, held = piece[:-1], b"\r"
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
            for start in range(0, len(piece), PIECE):
                for line in splitter.feed(piece[start : start + PIECE]):
                    self._num_free_lines -= 1
                    if self._num_free_lines < 0:
                        self._share.charge(LINE_COST)
                        await self._share.settle()
                    began = time.perf_counter()
                    readable = self._line(line)
                    self._share.charge_answer(time.perf_counter() - began)
                    yield readable
                if splitter.is_dropping:
                    self._share.charge(PIECE * BYTE_COST)
                    await self._share.settle()
        for line in splitter.feed(b"\n"):
            yield self._line(line)

    def _line(self, line: bytes | Oversized) -> bytes:
        if isinstance(line, Oversized):
            return _error_event(f"the result is larger than {self._max_bytes} bytes")
        if not line.startswith(b"data:"):
            return line + b"\n"
        if has_too_many_values(line):
            return _error_event(TOO_MANY_VALUES)
        return b"data: " + cleaned(line[5:].removeprefix(b" ")) + b"\n"

    async def aclose(self) -> None:
        """Close the connection."""
        await self._response.aclose()


async def _pieces(response: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """Yield a body piece by piece, decompressed, however much it is; others may run in between."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding in ("", "identity"):
        async for piece in response.aiter_raw():
            yield piece
        return
    if encoding not in ("gzip", "x-gzip", "deflate"):
        raise httpx2.DecodingError(f"the reply has the encoding {encoding!r}, which was not asked for")
    decoder = zlib.decompressobj(zlib.MAX_WBITS | 32)  # either header
    async for piece in response.aiter_raw():
        for plain in _inflated(decoder, piece):
            yield plain
            await anyio.lowlevel.checkpoint()


def _inflated(decoder: Any, piece: bytes) -> Iterator[bytes]:
    try:
        while piece and not decoder.eof:
            yield decoder.decompress(piece, PIECE)
            piece = decoder.unconsumed_tail
    except zlib.error as error:
        raise httpx2.DecodingError(f"the reply could not be decompressed: {error}") from error


def _plain_headers(response: httpx2.Response) -> list[tuple[str, str]]:
    left_out = ("content-encoding", "content-length", "transfer-encoding")
    return [(name, value) for name, value in response.headers.multi_items() if name.lower() not in left_out]


def _is_event_stream(response: httpx2.Response) -> bool:
    return response.headers.get("content-type", "").lower().startswith("text/event-stream")


def _is_no_answer(response: httpx2.Response) -> bool:
    """Return whether a reply to a call is neither a result nor an error: a page, or nothing."""
    is_json = response.headers.get("content-type", "").lower().startswith("application/json")
    return response.status_code in (202, 204) or (response.status_code < 300 and not is_json)


def _redirected(request: httpx2.Request, response: httpx2.Response) -> httpx2.URL | None:
    """Return where a reply sends a request on to, if that is the same server and may be the same request."""
    if response.status_code not in (307, 308) or (location := _location(request, response)) is None:
        return None
    was, now = request.url, location
    is_upgrade = (was.scheme, now.scheme, was.port, now.port) == ("http", "https", None, None)
    is_same = (was.scheme, was.port) == (now.scheme, now.port) or is_upgrade
    return now if is_same and was.host == now.host and now.userinfo in (b"", was.userinfo) else None


def _location(request: httpx2.Request, response: httpx2.Response) -> httpx2.URL | None:
    location = response.headers.get("location")
    with suppress(httpx2.InvalidURL, ValueError, TypeError):
        return request.url.join(location) if location else None
    return None


def _retry_after(response: httpx2.Response) -> float | None:
    """Return in how many seconds a server wants to be asked again, if it says so."""
    after = response.headers.get("retry-after", "").strip()
    if response.status_code not in (429, 503) or not after:
        return None
    if after.isascii() and after.isdecimal():
        return max(MIN_WAIT, float(after[:10]))
    with suppress(ValueError):
        moment = parsedate_to_datetime(after)
        return max(MIN_WAIT, (moment.replace(tzinfo=moment.tzinfo or UTC) - datetime.now(UTC)).total_seconds())
    return None


def _is_lost_session(request: httpx2.Request, status: int, body: bytes) -> bool:
    """Return whether a request was refused because the server, restarted or cleaned up, has lost its session."""
    if status == 404:
        return SESSION_ID in request.headers  # as the standard says
    # Servers made with the TypeScript SDK answer 400. Match only their own words: a call that may have been carried out must
    # not be sent again because its error mentions some session.
    return status == 400 and _LOST_SESSION.search(body) is not None


def _is_refusal(status: int) -> bool:
    # The SDK needs the others: 400, 404 and 405 tell an old server from a new one.
    return status in (401, 403, 407, 408, 429) or status >= 500


def _is_error_reply(body: bytes) -> bool:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "jsonrpc" in content and "error" in content


def _describe(response: httpx2.Response, request: httpx2.Request) -> str:
    said = f"HTTP {response.status_code} {response.reason_phrase}".rstrip()
    if wait := response.headers.get("retry-after"):
        return f"{said}, retry after {wait}"
    if response.status_code >= 400:
        return said
    if response.status_code in _REDIRECTS:
        location = _location(request, response)
        where = "nowhere" if location is None else location.copy_with(userinfo=b"", query=None, fragment=None)
        return f"{said}, a redirect to {where} that is not followed; if that is the server, make it the `url`"
    kind = response.headers.get("content-type", "").partition(";")[0] or "none"
    return f"{said} with the content type {kind!r}, where an answer was due"


def _error_reply(request: httpx2.Request, code: int, message: str, mark: str) -> httpx2.Response:
    return httpx2.Response(503, json=_error(code, message, mark), request=request)


def _error_event(message: str) -> bytes:
    return b"data: " + json.dumps(_error(INTERNAL_ERROR, message, OVERSIZED)).encode() + b"\n\n"


def _error(code: int, message: str, mark: str) -> dict[str, Any]:
    # The SDK fills in the request's id.
    return {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message, "data": {mark: True}}}
