"""A vendor's HTTP API on a free port of this process, which answers as a test says."""

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from aiohttp import web


@dataclass(frozen=True)
class Reply:
    """One answer: JSON, or bytes as they are, perhaps after a while."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0


@dataclass(frozen=True)
class Seen:
    """One request, as it arrived."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass
class VendorAPI:
    """The API: `answer` is asked for every request."""

    url: str
    answer: Callable[[Seen], Reply]
    requests: list[Seen] = field(default_factory=list)

    def script(self, *replies: Reply) -> None:
        """Answer with these in turn, and from then on with the last."""
        left = list(replies)
        self.answer = lambda _: left.pop(0) if len(left) > 1 else left[0]


@asynccontextmanager
async def vendor_api(*replies: Reply) -> AsyncGenerator[VendorAPI, None]:
    """An API that is up for as long as the block lasts."""
    api = VendorAPI(url="", answer=lambda _: Reply({}))
    if replies:
        api.script(*replies)

    async def handle(request: web.Request) -> web.Response:
        text = await request.text()
        body = json.loads(text) if text else None
        seen = Seen(request.method, request.path, dict(request.query), dict(request.headers), body)
        api.requests.append(seen)
        reply = api.answer(seen)
        await anyio.sleep(reply.delay)
        raw = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        return web.Response(
            body=raw, status=reply.status, headers={"content-type": "application/json"} | reply.headers
        )

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    api.url = f"http://127.0.0.1:{port}"
    try:
        yield api
    finally:
        await runner.cleanup()
