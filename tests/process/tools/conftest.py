import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mcp_grpo.tools import ServerConfig


SERVERS = Path(__file__).parents[2] / "servers"


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """Every test of this folder also states that it left no child process behind."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    left = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    assert not left, f"processes left behind: {left}"


@pytest.fixture
def rogue() -> Callable[..., ServerConfig]:
    """Makes configurations of the misbehaving stdio server."""

    def make(*args: str, name: str = "rogue", **options: Any) -> ServerConfig:
        options = {"protocol": "legacy", "call_timeout": 20.0, "max_result_bytes": 100_000} | options
        command = (str(SERVERS / "rogue.py"), *args)
        return ServerConfig(name=name, transport="stdio", command=sys.executable, args=command, **options)

    return make


class HttpServer:
    """The well-behaved server in a process of its own, over HTTP."""

    def __init__(self, *args: str) -> None:
        self.port = 0
        self._args = args
        self.start()

    def start(self) -> None:
        command = [sys.executable, str(SERVERS / "weather.py"), "http", str(self.port), *self._args]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout
        self.port = int(self._process.stdout.readline())

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()

    def config(self, **options: Any) -> ServerConfig:
        url = f"http://127.0.0.1:{self.port}/mcp"
        return ServerConfig(**{"name": "web", "transport": "http", "url": url, "call_timeout": 20.0} | options)


@pytest.fixture(scope="module")
def http_server() -> Iterator[HttpServer]:
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def own_http_server() -> Iterator[HttpServer]:
    """One that the test may kill."""
    server = HttpServer()
    yield server
    server.stop()


@pytest.fixture
def stateless_http_server() -> Iterator[HttpServer]:
    """One that keeps no sessions."""
    server = HttpServer("stateless")
    yield server
    server.stop()
