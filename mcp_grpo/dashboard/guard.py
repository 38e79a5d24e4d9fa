"""Who may read the dashboard: this machine, or whoever has its token; and only from its own page."""

import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


COOKIE = "mcp_grpo_dashboard"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """
    Refuses requests that do not come from the dashboard's own page, and adds headers that keep text from becoming code.

    Without a token, only names of this machine are answered: a page whose name was made to mean this machine (DNS rebinding) has
    another one. With a token, it must be in the address or in the cookie that is set for it.
    """

    def __init__(self, app: ASGIApp, token: str | None = None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # no other protocol is spoken
        headers = Headers(scope=scope)
        status, reason = self._refusal(scope, headers)

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found[name] = value
                if self._token is not None and not status and not self._has_cookie(headers):
                    found["Set-Cookie"] = f"{COOKIE}={self._token}; HttpOnly; SameSite=Strict; Path=/"
            await send(message)

        answer = PlainTextResponse(reason, status) if status else self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope, headers: Headers) -> tuple[int, str]:
        """Return the status and the reason with which a request is refused; 0 if it is not."""
        if scope["method"] not in ("GET", "HEAD"):
            return 405, "The dashboard only shows; it takes no other requests than GET.\n"
        host = headers.get("host", "")
        if self._token is None and _name(host) not in LOOPBACK:
            return 403, "This name is not one of this machine. Open the dashboard at the address that it printed.\n"
        if _is_foreign(scope, headers, host):
            return 403, "Requests from other pages are refused. Open the dashboard at the address that it printed.\n"
        if self._token is not None and not (self._has_cookie(headers) or self._is_in_address(scope)):
            return 401, "A token is needed. Open the dashboard at the address that it printed, token included.\n"
        return 0, ""

    def _has_cookie(self, headers: Headers) -> bool:
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and self._is_token(cookie.value)

    def _is_in_address(self, scope: Scope) -> bool:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        return any(self._is_token(value) for value in query.get("token", []))

    def _is_token(self, value: str) -> bool:
        return self._token is not None and secrets.compare_digest(value.encode(), self._token.encode())


def _is_foreign(scope: Scope, headers: Headers, host: str) -> bool:
    """Return whether another page made a request. One may link to this one, which shows nothing until it asks by itself."""
    if headers.get("sec-fetch-site", "none") not in ("same-origin", "none"):
        is_link = headers.get("sec-fetch-mode") == "navigate" and headers.get("sec-fetch-dest") == "document"
        return not (is_link and scope["path"] == "/")
    origin = headers.get("origin")
    return origin is not None and urlsplit(origin).netloc != host


def _name(host: str) -> str:
    """Return the name in a `Host` header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
