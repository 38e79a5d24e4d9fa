"""What an HTTP server does wrong, or to harm, costs its own call and nobody else's."""

import gzip
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import anyio
import psutil
import pytest
from helpers.stalls import longest_stall

from mcp_grpo.tools import ServerConfig, ToolPool
from mcp_grpo.types import ResultKind, ToolCall


pytestmark = pytest.mark.anyio

BOMB_SIZE = 300_000_000
MAX_RESULT_BYTES = 1_000_000


def answer(request_id: Any, text: str) -> bytes:
    result = {"content": [{"type": "text", "text": text}]}
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result}).encode()


@cache
def bomb() -> bytes:
    """300 MB in 300 kB."""
    compressor = zlib.compressobj(9, wbits=zlib.MAX_WBITS | 16)
    start = compressor.compress(b'{"jsonrpc":"2.0","id":1,"result":{"content":[{"type":"text","text":"')
    middle = b"".join(compressor.compress(b"x" * 1_000_000) for _ in range(BOMB_SIZE // 1_000_000))
    return start + middle + compressor.flush()


class Hostile(BaseHTTPRequestHandler):
    """Does with a call what its argument `how` says."""

    protocol_version = "HTTP/1.1"
    seen: ClassVar[list[tuple[str, float]]] = []
    release: ClassVar[threading.Event] = threading.Event()

    def log_message(self, *args: Any) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", kind: str | None = "application/json", **headers: str) -> None:
        self.send_response(status)
        headers = {name.replace("_", "-"): value for name, value in headers.items()} | {"mcp-session-id": "1"}
        for name, value in headers.items() | {("content-length", str(len(body)))}:
            self.send_header(name, value)
        if kind:
            self.send_header("content-type", kind)
        self.end_headers()
        self.wfile.write(body)

    def endless(self, kind: str, line: bytes) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("connection", "close")
        self.end_headers()
        with suppress(OSError):
            while True:
                self.wfile.write(line * 2000)
        self.close_connection = True

    def do_GET(self) -> None:
        self.reply(405)

    def do_DELETE(self) -> None:
        self.endless("text/plain", b"no end ")

    def do_POST(self) -> None:
        message = json.loads(self.rfile.read(int(self.headers["content-length"])))
        info = {"name": "hostile", "version": "1"}
        results = {
            "initialize": {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info},
            "tools/list": {"tools": [{"name": "do", "inputSchema": {"type": "object"}}]},
        }
        if message.get("method") == "tools/call":
            how = message["params"]["arguments"]["how"]
            self.seen.append((how, time.monotonic()))
            self.do(how, message["id"])
        elif message.get("method") in results:
            reply = {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}
            self.reply(200, json.dumps(reply).encode())
        else:
            self.reply(202)

    def do(self, how: str, request_id: Any) -> None:
        good = answer(request_id, "hello")
        num_seen = sum(seen == how for seen, _ in self.seen)
        match how:
            case "well":
                self.reply(200, good)
            case "wait":
                self.release.wait(20)
                self.reply(200, good)
            case "zipped":
                self.reply(200, gzip.compress(good), content_encoding="gzip")
            case "bomb":
                self.reply(200, bomb(), content_encoding="gzip")
            case "bomb events":
                self.reply(200, bomb(), "text/event-stream", content_encoding="gzip")
            case "not zipped":
                self.reply(200, good, content_encoding="gzip")
            case "unknown encoding":
                self.reply(200, good, content_encoding="br")
            case "relative redirect":
                self.reply(302, location="/elsewhere")
            case "bad redirect":
                self.reply(307, location="http://host:99999999/")
            case "foreign redirect":
                self.reply(307, location="http://elsewhere.invalid/mcp")
            case "slash" if not self.path.endswith("/"):
                self.reply(307, location=self.path + "/")
            case "slash":
                self.reply(200, good)
            case "circle":
                self.reply(308, location=self.path)
            case "page":
                self.reply(200, b"<html>log in</html>", "text/html; charset=utf-8")
            case "accepted":
                self.reply(202, kind=None)
            case "deep":
                self.reply(500, b"[" * 30_000)
            case "bad utf-8":
                self.reply(200, good.replace(b"hello", b"a\xffb"))
            case "half a pair":
                self.reply(200, good.replace(b"hello", rb"a\ud83d b\\ud83d"))
            case "bad utf-8 events":
                self.reply(200, b"data: " + good.replace(b"hello", b"a\xffb") + b"\n\n", "text/event-stream")
            case "half a pair events":
                self.reply(200, b"data: " + good.replace(b"hello", rb"a\ud83d") + b"\r\n\r\n", "text/event-stream")
            case "carriage returns":
                self.reply(200, b"data: " + good + b"\r\r", "text/event-stream")
            case "busy once" | "busy until" if num_seen == 1:
                date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(time.time() + 2))
                self.reply(429, retry_after="1" if how == "busy once" else date)
            case "busy once" | "busy until":
                self.reply(200, good)
            case "busy for long":
                self.reply(429, retry_after="1000")
            case "parts":
                parts = [{"type": "text", "text": str(i)} for i in range(5_000)]
                self.reply(
                    200, json.dumps({"jsonrpc": "2.0", "id": request_id, "result": {"content": parts}}).encode()
                )
            case "values":
                self.reply(200, good.replace(b'"hello"', b"[" + b"[]," * 200_000 + b"0]"))
            case "event flood":
                note = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}}
                self.endless("text/event-stream", b"data: " + json.dumps(note).encode() + b"\n\n")
            case "comment flood":
                self.endless("text/event-stream", b":\n")


@pytest.fixture(scope="module", autouse=True)
def url() -> Iterator[str]:
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}/mcp"
    server.shutdown()
    serving.join()
    server.server_close()
    logging.getLogger("mcp").setLevel(logging.NOTSET)


@pytest.fixture
def config(url: str) -> Callable[..., ServerConfig]:
    def make(**options: Any) -> ServerConfig:
        options = {"call_timeout": 10.0, "max_result_bytes": MAX_RESULT_BYTES, "protocol": "legacy"} | options
        return ServerConfig(name="web", transport="http", url=url, **options)

    Hostile.seen.clear()
    Hostile.release.clear()
    return make


def do(how: str) -> ToolCall:
    return ToolCall(name="do", arguments={"how": how})


async def test_a_compressed_reply_is_read(config: Callable[..., ServerConfig]) -> None:
    async with ToolPool([config()]) as pool:
        result = await pool.call(do("zipped"))
    assert (result.kind, result.text) == (ResultKind.OK, "hello")


@pytest.mark.parametrize("how", ["bomb", "bomb events"])
async def test_a_small_reply_that_becomes_a_large_one_is_dropped_while_it_is_read(
    config: Callable[..., ServerConfig], how: str
) -> None:
    bomb()  # made before anything is measured
    process, before = psutil.Process(), psutil.Process().memory_info().rss
    largest = before
    async with ToolPool([config()]) as pool, longest_stall() as stall:
        start = time.monotonic()
        async with anyio.create_task_group() as tasks:

            async def watch() -> None:
                nonlocal largest
                while True:
                    largest = max(largest, process.memory_info().rss)
                    await anyio.sleep(0.005)

            tasks.start_soon(watch)
            result = await pool.call(do(how))
            tasks.cancel_scope.cancel()
        assert time.monotonic() - start < 20
        assert stall() < 0.5
    assert result.kind is ResultKind.TOOL_ERROR
    assert f"larger than {MAX_RESULT_BYTES} bytes" in result.text
    assert largest - before < 50e6


async def test_a_body_without_end_does_not_hold_up_closing(config: Callable[..., ServerConfig]) -> None:
    before = psutil.Process().memory_info().rss
    async with ToolPool([config()]):
        start = time.monotonic()
    assert time.monotonic() - start < 20
    assert psutil.Process().memory_info().rss - before < 50e6


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("not zipped", "could not be decompressed"),
        ("unknown encoding", "'br'"),
        ("relative redirect", "/elsewhere"),
        ("bad redirect", "http://host:99999999/"),
        ("foreign redirect", "elsewhere.invalid"),
        ("circle", "redirect"),
        ("page", "'text/html'"),
        ("accepted", "HTTP 202"),
        ("deep", "HTTP 500"),
    ],
)
async def test_a_reply_that_is_none_is_the_server_s_fault_and_costs_no_other_call(
    config: Callable[..., ServerConfig], how: str, said: str
) -> None:
    kinds: list[ResultKind] = []
    async with ToolPool([config()]) as pool:

        async def wait() -> None:
            kinds.append((await pool.call(do("wait"))).kind)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
            await anyio.sleep(0.05)
            start = time.monotonic()
            result = await pool.call(do(how))
            seconds = time.monotonic() - start
            Hostile.release.set()
        assert (await pool.call(do("well"))).kind is ResultKind.OK
    assert result.kind is ResultKind.SERVER_ERROR
    assert said in result.text
    assert seconds < 20  # not until the deadline
    assert kinds == [ResultKind.OK] * 2


async def test_a_redirect_to_the_same_server_is_followed(config: Callable[..., ServerConfig]) -> None:
    async with ToolPool([config()]) as pool:
        assert (await pool.call(do("slash"))).text == "hello"


@pytest.mark.parametrize(
    ("how", "text"),
    [
        ("bad utf-8", "a\ufffdb"),
        ("half a pair", "a\ufffd b\\ud83d"),
        ("bad utf-8 events", "a\ufffdb"),
        ("half a pair events", "a\ufffd"),
        ("carriage returns", "hello"),
    ],
)
async def test_what_is_no_character_is_replaced(config: Callable[..., ServerConfig], how: str, text: str) -> None:
    async with ToolPool([config()]) as pool:
        result = await pool.call(do(how))
    assert (result.kind, result.text) == (ResultKind.OK, text)


@pytest.mark.parametrize("how", ["busy once", "busy until"])
async def test_a_server_that_is_busy_is_asked_again_when_it_says(
    config: Callable[..., ServerConfig], how: str
) -> None:
    async with ToolPool([config()]) as pool:
        result = await pool.call(do(how))
        (_, first), (_, second) = Hostile.seen
    assert result.kind is ResultKind.OK
    assert second - first >= 0.95  # the date has whole seconds


async def test_no_call_is_sent_before_a_busy_server_wants_one(config: Callable[..., ServerConfig]) -> None:
    async with ToolPool([config()]) as pool, anyio.create_task_group() as tasks:
        tasks.start_soon(pool.call, do("busy once"))
        while not Hostile.seen:
            await anyio.sleep(0.01)
        await anyio.sleep(0.1)
        assert (await pool.call(do("well"))).kind is ResultKind.OK
        times = dict(reversed(Hostile.seen))  # the first of each
        assert times["well"] - times["busy once"] >= 0.95


async def test_a_server_that_is_busy_for_longer_than_a_call_may_take_fails_it_at_once(
    config: Callable[..., ServerConfig],
) -> None:
    async with ToolPool([config()]) as pool:
        start = time.monotonic()
        result = await pool.call(do("busy for long"))
        assert time.monotonic() - start < 20
    assert result.kind is ResultKind.SERVER_ERROR
    assert "HTTP 429 Too Many Requests, retry after 1000" in result.text


async def test_very_many_parts_are_read_as_one_and_very_many_values_are_too_much(
    config: Callable[..., ServerConfig],
) -> None:
    async with ToolPool([config()]) as pool, longest_stall() as stall:
        parts = await pool.call(do("parts"))
        values = await pool.call(do("values"))
        assert stall() < 0.5
    assert parts.text == "\n".join(str(i) for i in range(5_000))
    assert values.kind is ResultKind.TOOL_ERROR
    assert "more than 50000 values" in values.text


@pytest.mark.parametrize("how", ["event flood", "comment flood"])
async def test_a_stream_that_floods_holds_up_nobody(config: Callable[..., ServerConfig], how: str) -> None:
    async with ToolPool([config(call_timeout=1.5)]) as pool, longest_stall() as stall:
        result = await pool.call(do(how))
        assert stall() < 0.6
    assert result.kind is ResultKind.TIMEOUT
