"""A stand-in for an OpenAI-compatible endpoint, which replies as a test says."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


Reply = dict[str, Any] | tuple[int, str, dict[str, str]]  # a message, or status, body and headers


@dataclass
class StandIn:
    """The endpoint while it is up: its address and what it was sent."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)


@contextmanager
def stand_in(reply: Callable[[dict[str, Any]], Reply]) -> Iterator[StandIn]:
    """Serve on loopback; `reply` gets the body of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            seen.bodies.append(body)
            seen.keys.append(self.headers.get("authorization"))
            given = reply(body)
            status, text, headers = given if isinstance(given, tuple) else (200, json.dumps(completion(given)), {})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        seen = StandIn(f"http://127.0.0.1:{server.server_port}/v1")
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield seen
        finally:
            server.shutdown()


def completion(message: dict[str, Any]) -> dict[str, Any]:
    reason = message.pop("finish_reason", "tool_calls" if message.get("tool_calls") else "stop")
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    return {"choices": [{"message": {"role": "assistant", **message}, "finish_reason": reason}], "usage": usage}


def call(name: str, arguments: Any, id: str = "1") -> dict[str, Any]:
    """A call as the API writes it."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return {"id": id, "type": "function", "function": {"name": name, "arguments": text}}
