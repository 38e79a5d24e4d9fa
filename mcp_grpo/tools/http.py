"""Servers behind streamable HTTP: one pool of connections for all, and failures that stay with their call."""

import json
import logging
import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import httpx2
from mcp import MCPError
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, INTERNAL_ERROR

from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.framing import OVERSIZED


# See `framing` for why they look like this.
TRANSPORT = f"transport-{uuid.uuid4().hex}"
UNSENT = f"unsent-{uuid.uuid4().hex}"
SESSION_ID = "mcp-session-id"
NOTIFY_TIMEOUT = 5.0
_LOST_SESSION = re.compile(
    rb'"message"\s*:\s*"(?:Bad Request: )?(?:No valid session ID provided|Session not found|Server not initialized'
    rb'|(?:Missing|Invalid) session ID|Mcp-Session-Id header is required)\.?"',
    re.IGNORECASE,
)
_NOTIFICATION = b'"method":"notifications/'


def shared_connections() -> httpx2.AsyncHTTPTransport:
    """
    The connections that all HTTP servers of a pool share.

    Returns:
        `httpx2.AsyncHTTPTransport`: To be closed by the pool.
    """
    # No limit on connections: waiting for one would count against a call's deadline; `max_inflight` is the limit.
    # `retries` are of connecting only, before anything was sent.
    # One line for each call, with the address and what secrets are in it, is not what anybody wants to read.
    if (log := logging.getLogger("httpx2")).level == logging.NOTSET:
        log.setLevel(logging.WARNING)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=100)
    return httpx2.AsyncHTTPTransport(retries=1, limits=limits)


class HttpTransport:
    """
    One connection to an HTTP server.

    Args:
        config ([`ServerConfig`]):
            An HTTP server.
        connections (`httpx2.AsyncBaseTransport`):
            From [`shared_connections`].
    """

    def __init__(self, config: ServerConfig, connections: httpx2.AsyncBaseTransport) -> None:
        self._config = config
        self._transport = SoftTransport(connections, max_bytes=config.max_result_bytes)

    @property
    def has_session(self) -> bool:
        """Whether the server has given out a session id, by which it tells its clients apart."""
        return self._transport.has_session

    @asynccontextmanager
    async def connect(self) -> AsyncGenerator[Any, None]:
        """
        Connect, and let go of the session on the way out.

        Yields:
            The pair of streams that `mcp.Client` takes for a transport.
        """
        config = self._config
        # Our own deadlines come first; this one only ends what nobody waits for any more.
        timeout = httpx2.Timeout(min(30.0, config.connect_timeout), read=max(300.0, config.call_timeout + 10))
        # Uncompressed, so that the limit on bytes is one on memory.
        headers = {"accept-encoding": "identity", **config.headers}
        streams: AbstractAsyncContextManager[Any]
        async with httpx2.AsyncClient(transport=self._transport, headers=headers, timeout=timeout) as client:
            streams = streamable_http_client(
                config.url or "", http_client=client, max_sse_event_size=config.max_result_bytes
            )
            async with streams as pair:
                yield pair


def is_unsent(error: MCPError) -> bool:
    """
    Whether an error reply says that the request never reached the server.

    Args:
        error (`mcp.MCPError`):
            The error.

    Returns:
        `bool`: Whether it was [`SoftTransport`] that wrote it, because no connection came about.
    """
    data: Any = error.data
    return isinstance(data, dict) and UNSENT in data


class SoftTransport(httpx2.AsyncBaseTransport):
    """
    Answers a request that failed on the network with an error reply.

    The SDK lets such a failure end the session and every call in flight with it; an error reply reaches the one call
    that it belongs to.

    Args:
        connections (`httpx2.AsyncBaseTransport`):
            What does the work. It is shared, and not closed from here.
        max_bytes (`int`):
            Largest body that is read.
    """

    def __init__(self, connections: httpx2.AsyncBaseTransport, max_bytes: int) -> None:
        self._connections = connections
        self._max_bytes = max_bytes
        self.has_session = False
        """Whether a reply had a session id."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """
        Send a request.

        Args:
            request (`httpx2.Request`):
                What to send.

        Returns:
            `httpx2.Response`: What came back, or the error reply that stands for a failure.
        """
        if request.method != "POST":  # the SDK contains the failures of its GET and DELETE by itself
            return await self._connections.handle_async_request(request)
        if _NOTIFICATION in request.content[:200]:
            # The SDK sends notifications one by one, and no request may wait for the cancelling of a stuck one.
            request.extensions = request.extensions | {"timeout": httpx2.Timeout(NOTIFY_TIMEOUT).as_dict()}
        try:
            response = await self._connections.handle_async_request(request)
            self.has_session = self.has_session or SESSION_ID in response.headers
            if response.status_code < 400 and response.headers.get("content-type", "").startswith("text/event-stream"):
                return response  # a stream that breaks is contained by the SDK
            body = await self._read(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _error_reply(request, CONNECTION_CLOSED, f"{type(error).__name__}: {error}", UNSENT)
        except httpx2.TransportError as error:
            return _error_reply(request, CONNECTION_CLOSED, f"{type(error).__name__}: {error}", TRANSPORT)
        if body is None:
            return _error_reply(
                request, INTERNAL_ERROR, f"the result is larger than {self._max_bytes} bytes", OVERSIZED
            )
        if _is_lost_session(request, response.status_code, body):
            # Refused before it was looked at, so that it may be sent again, on a new session.
            return _error_reply(request, CONNECTION_CLOSED, "it does not know the session any more", UNSENT)
        if _is_refusal(response.status_code) and not _is_error_reply(body):
            return _error_reply(request, CONNECTION_CLOSED, _describe(response), TRANSPORT)
        return httpx2.Response(response.status_code, headers=response.headers, content=body, request=request)

    async def _read(self, response: httpx2.Response) -> bytes | None:
        """The body, or `None` if it is too large."""
        pieces: list[bytes] = []
        size = 0
        try:
            async for piece in response.aiter_raw():
                size += len(piece)
                if size > self._max_bytes:
                    return None
                pieces.append(piece)
        finally:
            await response.aclose()
        return b"".join(pieces)


def _is_lost_session(request: httpx2.Request, status: int, body: bytes) -> bool:
    """Whether a request was refused because of its session: the server has been restarted, or has cleaned up."""
    if status == 404:
        return SESSION_ID in request.headers  # which is what the standard says
    # Servers made with the TypeScript SDK say so with 400. Only in their own words: a call that was looked at, and maybe
    # carried out, must not be sent again because its error speaks of some session.
    return status == 400 and _LOST_SESSION.search(body) is not None


def _is_refusal(status: int) -> bool:
    # Others mean something to the SDK: 400, 404 and 405 tell an old server from a new one.
    return status in (401, 403, 407, 408, 429) or status >= 500


def _is_error_reply(body: bytes) -> bool:
    try:
        content = json.loads(body)
    except ValueError:
        return False
    return isinstance(content, dict) and "jsonrpc" in content and "error" in content


def _describe(response: httpx2.Response) -> str:
    wait = response.headers.get("retry-after")
    return f"HTTP {response.status_code} {response.reason_phrase}" + (f", retry after {wait}" if wait else "")


def _error_reply(request: httpx2.Request, code: int, message: str, mark: str) -> httpx2.Response:
    error = {"code": code, "message": message, "data": {mark: True}}
    # The SDK puts the request's own id in place of the missing one.
    return httpx2.Response(503, json={"jsonrpc": "2.0", "id": None, "error": error}, request=request)
