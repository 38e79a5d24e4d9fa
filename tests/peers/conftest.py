from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import psutil
import pytest


PAGES = {
    "/harbour": "<p>The harbour has one lighthouse. Its keeper's log is at <a href='/log'>/log</a>.</p>",
    "/log": "<p>The lamp was first lit in 1874.</p>",
}


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Every test of this folder also states that it left no child process behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, f"processes left behind: {left}"


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path in PAGES else 404)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(f"<html><body><article>{PAGES.get(self.path, '')}</article></body></html>".encode())

    def log_message(self, format: str, *args: object) -> None:
        """The test's own output is enough."""


@pytest.fixture(scope="session")
def pages() -> Iterator[str]:
    """Address of a small web."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
