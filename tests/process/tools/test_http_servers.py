import contextlib
import json
import logging
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import anyio
import pytest
import uvicorn
from anyio.abc import SocketAttribute, SocketStream
from helpers.marks import full
from mcp.server.mcpserver import MCPServer

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.anyio


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


@pytest.fixture(autouse=True)
def _sdk_is_quiet() -> Any:
    """The SDK logs every reply it cannot read, with its traceback."""
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    yield
    logging.getLogger("mcp").setLevel(logging.NOTSET)


@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_a_server_over_http_is_listed_and_called(http_server: Any, protocol: str) -> None:
    async with ToolPool([http_server.config(protocol=protocol)]) as pool:
        assert "weather" in [tool.name for tool in pool.catalog.tools]
        good = await pool.call(call("weather", city="Bern"))
        bad = await pool.call(call("fail", reason="no bread"))
    assert (good.kind, good.text, good.server) == (ResultKind.OK, "Bern: sun for 1 d", "web")
    assert bad.kind is ResultKind.TOOL_ERROR
    assert "no bread" in bad.text


@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_a_result_that_is_too_large_is_dropped(http_server: Any, protocol: str) -> None:
    async with ToolPool([http_server.config(protocol=protocol, max_result_bytes=50_000)]) as pool:
        large = await pool.call(call("blob", size=200_000))
        small = await pool.call(call("blob", size=10))
    assert (large.kind, small.kind) == (ResultKind.TOOL_ERROR, ResultKind.OK)
    assert "larger than 50000 bytes" in large.text


@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_a_call_ends_at_its_deadline_and_the_session_stays_usable(http_server: Any, protocol: str) -> None:
    async with ToolPool([http_server.config(protocol=protocol, call_timeout=1.0)]) as pool:
        assert (await pool.call(call("sleep"))).kind is ResultKind.TIMEOUT
        assert (await pool.call(call("weather", city="Bern"))).kind is ResultKind.OK


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("protocol", ["auto", full("legacy")])
async def test_a_server_that_dies_fails_the_calls_in_flight_and_serves_again_once_restarted(
    own_http_server: Any, protocol: str
) -> None:
    kinds: list[ResultKind] = []
    async with ToolPool([own_http_server.config(protocol=protocol)]) as pool:

        async def one(name: str) -> None:
            kinds.append((await pool.call(call(name))).kind)

        with anyio.fail_after(30):
            async with anyio.create_task_group() as tasks:
                for name in ("sleep", "sleep", "die"):
                    tasks.start_soon(one, name)
        down = await pool.call(call("weather", city="Bern"))
        own_http_server.stop()
        own_http_server.start()
        with anyio.fail_after(30):
            while (back := await pool.call(call("weather", city="Bern"))).kind is ResultKind.SERVER_ERROR:
                await anyio.sleep(0.05)
    assert kinds == [ResultKind.SERVER_ERROR] * 3
    assert down.kind is ResultKind.SERVER_ERROR
    assert back.kind is ResultKind.OK


@asynccontextmanager
async def unreliable_way_to(port: int) -> AsyncGenerator[int, None]:
    """A port that leads to another, but hangs up on whoever says `hang up`."""

    async def serve(here: SocketStream) -> None:
        async with here, await anyio.connect_tcp("127.0.0.1", port) as there, anyio.create_task_group() as tasks:

            async def forward(source: SocketStream, sink: SocketStream) -> None:
                with contextlib.suppress(anyio.BrokenResourceError):
                    async for data in source:
                        if b"hang up" in data:
                            break
                        await sink.send(data)
                tasks.cancel_scope.cancel()

            tasks.start_soon(forward, here, there)
            tasks.start_soon(forward, there, here)

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield listener.extra(SocketAttribute.local_port)
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("protocol", ["auto", "legacy"])
async def test_a_broken_connection_fails_one_call_and_no_other(http_server: Any, protocol: str) -> None:
    met: list[ResultKind] = []
    async with unreliable_way_to(http_server.port) as port:
        config = http_server.config(protocol=protocol, url=f"http://127.0.0.1:{port}/mcp")
        async with ToolPool([config]) as pool:

            async def meet() -> None:
                met.append((await pool.call(call("meet", people=2))).kind)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(meet)
                broken = await pool.call(call("weather", city="hang up"))
                tasks.start_soon(meet)
    assert broken.kind is ResultKind.SERVER_ERROR
    assert met == [ResultKind.OK, ResultKind.OK]


class Forgetful(BaseHTTPRequestHandler):
    """A server that forgets its sessions on request; as those made with other SDKs do when they are restarted."""

    protocol_version = "HTTP/1.1"
    known: ClassVar[set[str]] = set()
    refusal: ClassVar[tuple[int, bytes]] = (404, b"")

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"content-type": "application/json", "content-length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.reply(405, b"")

    def do_DELETE(self) -> None:
        self.reply(200, b"")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        session = self.headers.get("mcp-session-id") or str(len(self.known))
        results = {
            "initialize": {
                "protocolVersion": "2025-11-25",
                "capabilities": {"tools": {}},
                "serverInfo": {"name": "forgetful", "version": "1"},
            },
            "tools/list": {"tools": [{"name": "greet", "inputSchema": {"type": "object"}}]},
            "tools/call": {"content": [{"type": "text", "text": "hello"}]},
        }
        if message["method"] == "initialize":
            self.known.add(session)
        if session not in self.known:
            self.reply(*self.refusal)
        elif message["method"] in results:
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}
            self.reply(200, json.dumps(reply).encode(), **{"mcp-session-id": session})
        else:
            self.reply(202, b"")


def refusal(status: int, code: int, message: str, **fields: Any) -> tuple[int, bytes]:
    error = {"jsonrpc": "2.0", "error": {"code": code, "message": message}, **fields}
    return status, json.dumps(error).encode()


@pytest.mark.parametrize(
    "lost",
    [
        (404, b""),
        refusal(404, -32001, "Session not found", id=None),
        refusal(400, -32000, "Bad Request: No valid session ID provided", id=None),
        refusal(400, -32000, "Bad Request: No valid session ID provided"),
        refusal(400, -32000, "Bad Request: Server not initialized", id=None),
    ],
)
async def test_a_server_that_forgot_the_session_is_given_a_new_one(lost: tuple[int, bytes]) -> None:
    Forgetful.refusal = lost
    with ThreadingHTTPServer(("127.0.0.1", 0), Forgetful) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/mcp"
            async with ToolPool([ServerConfig(name="f", transport="http", url=url, protocol="legacy")]) as pool:
                await pool.call(call("greet"))
                Forgetful.known.clear()
                result = await pool.call(call("greet"))
        finally:
            server.shutdown()
            serving.join()
    assert (result.kind, result.text) == (ResultKind.OK, "hello")


@pytest.mark.full
async def test_a_server_that_takes_no_more_connections_still_answers_what_it_was_asked() -> None:
    asked, release = threading.Semaphore(0), threading.Event()

    class Slow(Forgetful):
        def do_POST(self) -> None:
            if b"wait" in self.rfile.peek():
                asked.release()
                release.wait(20)
            super().do_POST()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    kinds: list[ResultKind] = []
    url = f"http://127.0.0.1:{server.server_port}/mcp"
    async with ToolPool([ServerConfig(name="f", transport="http", url=url, protocol="legacy")]) as pool:

        async def wait() -> None:
            kinds.append((await pool.call(call("greet", wait=True))).kind)

        async with anyio.create_task_group() as tasks, anyio.create_task_group() as waiting:
            for _ in range(3):
                waiting.start_soon(wait)
            for _ in range(3):
                await anyio.to_thread.run_sync(asked.acquire)
            await anyio.to_thread.run_sync(server.shutdown)
            server.socket.close()
            tasks.start_soon(pool.call, call("greet"))  # finds nobody; the three must not pay for it
            await anyio.sleep(0.5)
            release.set()
            await anyio.sleep(1)
            tasks.cancel_scope.cancel()
    serving.join()
    server.server_close()
    assert kinds == [ResultKind.OK] * 3


@pytest.mark.parametrize(
    "reply",
    [
        (400, b""),
        (400, b'{"detail": "card was declined"}'),
        refusal(400, -32602, "checkout session is already paid", id=None),
    ],
)
async def test_a_call_that_was_looked_at_and_refused_is_not_sent_again(reply: tuple[int, bytes]) -> None:
    orders = []

    class Shop(Forgetful):
        def do_POST(self) -> None:
            body = self.rfile.peek()
            if b"tools/call" in body:
                orders.append(1)
                self.rfile.read(int(self.headers["content-length"]))
                self.reply(*reply)
            else:
                super().do_POST()

    with ThreadingHTTPServer(("127.0.0.1", 0), Shop) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/mcp"
            async with ToolPool([ServerConfig(name="f", transport="http", url=url, protocol="legacy")]) as pool:
                result = await pool.call(call("greet"))
        finally:
            server.shutdown()
            serving.join()
    assert result.is_error
    assert len(orders) == 1


async def test_an_address_where_nobody_listens_is_reported() -> None:
    config = ServerConfig(name="web", transport="http", url="http://127.0.0.1:9/mcp?key=s3cret-value")
    with pytest.raises(ToolServerError) as caught:
        async with ToolPool([config]):
            pass
    assert "'web' could not be opened: ConnectError" in str(caught.value)
    assert "`http://127.0.0.1:9/mcp`" in str(caught.value)
    assert "s3cret-value" not in str(caught.value)


async def test_headers_reach_their_own_server_only_and_a_refusal_is_reported_without_them() -> None:
    seen: list[tuple[str, str | None]] = []
    app = MCPServer("s", log_level="ERROR").streamable_http_app()

    async def guarded(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await app(scope, receive, send)
        key = dict(scope["headers"]).get(b"x-key", b"").decode()
        seen.append((scope["path"], key))
        if key != "right-password":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
            return await send({"type": "http.response.body", "body": b"who are you?"})
        scope["path"] = "/mcp"
        return await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(guarded, port=0, log_level="error", ws="none", lifespan="on"))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.serve)
        with anyio.fail_after(20):
            while not server.started:
                await anyio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]

        def config(name: str, key: str) -> ServerConfig:
            url = f"http://127.0.0.1:{port}/{name}"
            return ServerConfig(name=name, transport="http", url=url, headers={"X-Key": key})

        async with ToolPool([config("a", "right-password")]) as pool:
            assert pool.catalog.tools == ()
        with pytest.raises(ToolServerError) as caught:
            async with ToolPool([config("a", "right-password"), config("b", "wrong-password")]):
                pass
        server.should_exit = True
    assert "'b' could not be opened: HTTP 401" in str(caught.value)
    assert "wrong-password" not in str(caught.value)
    assert set(seen) == {("/a", "right-password"), ("/b", "wrong-password")}
