"""An HTTP client for vendors' APIs: deadlines, a rate limit, safe retries, and helpful errors."""

import json
import os
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal, cast
from urllib.parse import quote, quote_plus

import anyio
import httpx2
from mcp.server.mcpserver.exceptions import ToolError

from mcp_grpo.errors import MCPGRPOError, SettingsError


FIRST_DELAY = 0.25
MAX_BODY_BYTES = 8 << 20
MAX_QUOTED = 200
MAX_PAUSE = 300.0  # seconds; then a request probes whether a longer pause still holds
_KEY_IN_URL = re.compile(r"((?:api[-_]?key|token)=)[^&\s\"']+", re.IGNORECASE)


class VendorError(MCPGRPOError, ToolError):
    """
    A failed request to a vendor, in words that never hold the key.

    `is_outage` marks what is not the policy's fault, so that another request would not help.
    """

    def __init__(self, text: str, *, is_outage: bool) -> None:
        super().__init__(text)
        self.is_outage = is_outage


def only(record: dict[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the fields that a record has."""
    return {name: record[name] for name in fields if record.get(name) is not None}


def required_key(variable: str, backend: str) -> str:
    """Read a key from the environment; raise [`SettingsError`] if there is none."""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise SettingsError(
            f"The environment variable {variable} is not set. Set it to your key, "
            f"or leave --backend out to use the {backend} one."
        )
    if not key.isascii() or not key.isprintable():
        raise SettingsError(
            f"The environment variable {variable} holds characters that no key has. Copy the key again."
        )
    return key


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """
    Timeouts and rate limit of a vendor's client. `deadline` includes retries, and is below the pool's call timeout.
    """

    timeout: float = 10.0
    connect_timeout: float = 5.0
    deadline: float = 25.0
    max_attempts: int = 4
    rate: float = 5.0
    burst: int = 5


class TokenBucket:
    """A rate limit: each request takes a token, and tokens come back at a fixed rate."""

    def __init__(self, rate: float, burst: int) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = float(burst)
        self._at = 0.0

    def take(self, now: float) -> float:
        """Take a token."""
        if now > self._at:
            self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
            self._at = now
        self._tokens -= 1
        return max(0.0, self._at - now - self._tokens / self._rate)

    def give_back(self) -> None:
        """Undo [`take`] for a request that was not sent after all."""
        self._tokens += 1

    def pause(self, until: float) -> None:
        """Send nothing for a while."""
        self._at = max(self._at, until)
        self._tokens = min(self._tokens, 1.0)


class VendorClient:
    """Sends requests to one vendor, and removes the key from messages."""

    def __init__(
        self,
        vendor: str,
        base_url: str,
        variable: str,
        key: str,
        headers: Mapping[str, str],
        limits: Limits | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise SettingsError(f"The address of {vendor} must begin with http:// or https://, got {base_url!r}.")
        self._vendor = vendor
        self._variable = variable
        self._secrets = sorted({key, quote(key, safe=""), quote_plus(key)}, key=len, reverse=True)
        self._limits = limits or Limits()
        self._bucket = TokenBucket(self._limits.rate, self._limits.burst)
        self._paused_until = 0.0  # by the clock of anyio
        self._asked_until = datetime.now(UTC)
        timeout = httpx2.Timeout(self._limits.timeout, connect=self._limits.connect_timeout)
        try:
            url = httpx2.URL(base_url.rstrip("/") + "/")
        except httpx2.InvalidURL as error:
            raise SettingsError(f"The address of {vendor} is not one: {base_url!r} ({error}).") from None
        try:
            self._http = httpx2.AsyncClient(base_url=url, headers=dict(headers), timeout=timeout)
        except (ImportError, OSError, ValueError, httpx2.InvalidURL) as error:
            raise SettingsError(
                f"The proxies or certificates of the environment cannot be used ({type(error).__name__}: {error}). Check "
                "HTTP_PROXY, HTTPS_PROXY and ALL_PROXY, in small letters, too, and SSL_CERT_FILE and SSL_CERT_DIR."
            ) from None

    async def get(self, path: str, params: Mapping[str, Any]) -> Any:
        """Read something."""
        kept = {name: value for name, value in params.items() if value is not None}
        return await self._ask("GET", path, is_read=True, params=kept)

    async def post(self, path: str, body: Mapping[str, Any], *, is_read: bool) -> Any:
        """Send something."""
        kept = {name: value for name, value in body.items() if value is not None}
        return await self._ask("POST", path, is_read=is_read, json=kept)

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def error(self, text: str, *, is_outage: bool) -> VendorError:
        """Make an error about this vendor, without the key."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return VendorError(_KEY_IN_URL.sub(r"\1***", text), is_outage=is_outage)

    def unexpected(self, answer: object) -> VendorError:
        """Make the error for JSON that the vendor does not document, with its own words if it has any."""
        said = _words(answer)
        if said is not None:
            return self.error(f"{self._vendor} refused the request: {said}", is_outage=False)
        shown = json.dumps(answer, ensure_ascii=False)[:MAX_QUOTED]
        return self.error(
            f"{self._vendor} answered with JSON of an unexpected shape: {shown}. Its API may have changed.",
            is_outage=True,
        )

    def records(self, answer: Any, name: str | None = None) -> list[dict[str, Any]]:
        """Return an answer that must be a list of objects, or such a list under a name in it."""
        values = answer if name is None else answer.get(name) if isinstance(answer, dict) else None
        if not isinstance(values, list) or not all(isinstance(one, dict) for one in cast(list[Any], values)):
            raise self.unexpected(answer)
        return cast(list[dict[str, Any]], values)

    async def _ask(self, method: Literal["GET", "POST"], path: str, *, is_read: bool, **content: Any) -> Any:
        end = anyio.current_time() + self._limits.deadline
        for attempt in range(self._limits.max_attempts):
            await self._wait_for_turn(end)
            try:
                return self._answer(await self._send(method, path, end, is_read, content), is_read)
            except _Repeatable as failure:
                delay = failure.delay
                if delay is None:
                    delay = FIRST_DELAY * 2**attempt * random.uniform(0.5, 1.0)
                else:
                    self._pause(delay)
                if attempt + 1 == self._limits.max_attempts or anyio.current_time() + delay >= end:
                    raise failure.error from None
                await anyio.sleep(delay)
        raise AssertionError("unreachable")

    async def _wait_for_turn(self, end: float) -> None:
        now = anyio.current_time()
        delay = self._bucket.take(now)
        if now + delay >= end:
            self._bucket.give_back()
            if now < self._paused_until:
                raise self.error(
                    f"{self._vendor} has had too many requests, and asked us to wait until {self._asked_until:%Y-%m-%d %H:%M:%S} "
                    "UTC. Try again later, let fewer trajectories call it at a time, or use a larger plan.",
                    is_outage=True,
                )
            raise self.error(
                f"Too many requests to {self._vendor} are waiting: its rate limit is {self._limits.rate:g} per second. "
                "Let fewer trajectories call it at a time.",
                is_outage=True,
            )
        await anyio.sleep(delay)

    def _pause(self, seconds: float) -> None:
        """Send nothing for as long as the vendor asks for, or until it may have changed its mind."""
        self._asked_until = datetime.now(UTC) + timedelta(seconds=seconds)
        self._paused_until = anyio.current_time() + min(seconds, MAX_PAUSE)
        self._bucket.pause(self._paused_until)

    async def _send(
        self, method: str, path: str, end: float, is_read: bool, content: dict[str, Any]
    ) -> tuple[int, httpx2.Headers, bytes]:
        seconds = min(self._limits.timeout, end - anyio.current_time())
        unclear = "" if is_read else " It is not known whether it was done: look before you repeat it."
        try:
            with anyio.fail_after(seconds):
                async with self._http.stream(method, path, **content) as response:
                    return response.status_code, response.headers, await self._body(response)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as failure:
            text = (
                f"{self._vendor} could not be reached ({type(failure).__name__}). Check the network and the address."
            )
            raise _Repeatable(self.error(text, is_outage=True)) from None
        except (TimeoutError, httpx2.TimeoutException):
            text = f"{self._vendor} did not answer within {seconds:.3g} s.{unclear or ' Try again later.'}"
            raise self._perhaps(text, is_read) from None
        except httpx2.HTTPError as failure:
            text = f"The connection to {self._vendor} broke off ({type(failure).__name__}).{unclear}"
            raise self._perhaps(text, is_read) from None

    async def _body(self, response: httpx2.Response) -> bytes:
        pieces: list[bytes] = []
        size = 0
        async for piece in response.aiter_bytes():
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise self.error(
                    f"The answer of {self._vendor} is larger than {MAX_BODY_BYTES >> 20} MiB. Ask for less.",
                    is_outage=False,
                )
            pieces.append(piece)
        return b"".join(pieces)

    def _answer(self, reply: tuple[int, httpx2.Headers, bytes], is_read: bool) -> Any:
        status, headers, body = reply
        if 200 <= status < 300:
            try:
                return json.loads(body, parse_constant=_refuse_constant)
            except (ValueError, RecursionError):
                raise self.error(
                    f"{self._vendor} answered with something that is not JSON: {_shown(body)!r}. "
                    "Check its address, or try again later.",
                    is_outage=True,
                ) from None
        said = f" It says: {_said(body)}" if _said(body) else ""
        if status == 429:
            delay = _retry_after(headers.get("retry-after"))
            when = f"in {delay:.3g} s" if delay is not None else "later"
            text = f"{self._vendor} has had too many requests (429). Try again {when}, or use a larger plan.{said}"
            raise _Repeatable(self.error(text, is_outage=True), delay)
        if status >= 500:
            unclear = "" if is_read else " It is not known whether it was done: look before you repeat it."
            text = f"{self._vendor} has a fault of its own ({status}).{unclear or ' Try again later.'}{said}"
            raise self._perhaps(text, is_read)
        advice, is_outage = _advice(status, self._variable)
        raise self.error(f"{self._vendor} refused the request ({status}). {advice}{said}", is_outage=is_outage)

    def _perhaps(self, text: str, is_read: bool) -> "Exception":
        """Make the error for a request that may have been carried out: only a reading one is retried."""
        error = self.error(text, is_outage=True)
        return _Repeatable(error) if is_read else error


class _Repeatable(Exception):
    """A failure after which the same request may be sent again, after `delay` seconds if known."""

    def __init__(self, error: VendorError, delay: float | None = None) -> None:
        super().__init__(str(error))
        self.error = error
        self.delay = delay


def _advice(status: int, variable: str) -> tuple[str, bool]:
    """Return the advice for a status, and whether it is an outage."""
    match status:
        case 401:
            return f"Check the key in {variable}.", True
        case 402 | 432 | 433:  # the last two are Tavily's
            return f"The plan of the key in {variable} does not cover it, or is used up.", True
        case 403:
            return f"The key in {variable} may not do this: check the key and what its plan covers.", True
        case 404:
            return "There is no such thing: check the names in the arguments.", False
        case _:
            return "Check the arguments.", 300 <= status < 400


def _said(body: bytes) -> str:
    """Return the message of an error body in one line."""
    try:
        said = _words(json.loads(body))
    except ValueError:
        said = None
    return said or _shown(body)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")  # but Python reads NaN and Infinity, and would pass them on


def _words(answer: object) -> str | None:
    """Find the message in the error bodies of known vendors."""
    if not isinstance(answer, dict):
        return None
    fields = cast(dict[str, Any], answer)
    for name in ("Error Message", "error", "message", "detail"):
        value = fields.get(name)
        if isinstance(value, dict):
            value = _words(cast(object, value))
        if isinstance(value, str) and value:
            return " ".join(value.split())[:MAX_QUOTED]
    return None


def _shown(body: bytes) -> str:
    return " ".join(body[: 4 * MAX_QUOTED].decode(errors="replace").split())[:MAX_QUOTED]


def _retry_after(value: str | None) -> float | None:
    """Parse the seconds of a header that holds seconds or a date."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            date = parsedate_to_datetime(value)
        except ValueError:
            return None
        date = date if date.tzinfo is not None else date.replace(tzinfo=UTC)
        seconds = (date - datetime.now(UTC)).total_seconds()
    return max(0.0, seconds) if seconds < 1e9 else None
