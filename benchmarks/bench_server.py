"""
A stdio MCP server for benchmarks: answers at once, or fails in the way it is asked to.

Standard library only, so that it starts in 20 ms. With a file as its argument it notes there when it starts and how it
ends, so that what a pool says about its processes can be checked against what the processes say.
"""

import json
import os
import sys
import time
from typing import Any


TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
SIZE = {
    "type": "object",
    "properties": {"size": {"type": "integer"}},
    "required": ["size"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
TOOLS = {
    "echo": ("Answers with the text.", TEXT),
    "crash": ("Ends the process.", NOTHING),
    "hang": ("Never answers; other calls are served.", NOTHING),
    "oversize": ("Answers with so many bytes.", SIZE),
    "whoami": ("Answers with the process and how many calls it has had.", NOTHING),
    "reset": ("Forgets how many calls there were.", NOTHING),
}
num_calls = 0


def note(event: str) -> None:
    """Add a line to the journal; a short write to a file opened for appending is not mixed up with others."""
    if len(sys.argv) > 1:
        line = json.dumps({"event": event, "pid": os.getpid(), "time": time.monotonic()}) + "\n"
        file = os.open(sys.argv[1], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(file, line.encode())
        os.close(file)


def reply(request_id: int | str, **content: Any) -> None:
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", "id": request_id, **content}).encode() + b"\n")
    sys.stdout.buffer.flush()


def say(request_id: int | str, text: str) -> None:
    reply(request_id, result={"content": [{"type": "text", "text": text}]})


def call(request_id: int | str, name: str, arguments: dict[str, Any]) -> None:
    global num_calls
    num_calls += 1
    match name:
        case "echo":
            say(request_id, arguments["text"])
        case "crash":
            note("crash")
            os._exit(1)
        case "hang":
            pass
        case "oversize":
            say(request_id, "x" * arguments["size"])
        case "whoami":
            say(request_id, json.dumps({"pid": os.getpid(), "num_calls": num_calls}))
        case "reset":
            num_calls = 0
            say(request_id, "")


def main() -> None:
    note("start")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        match request.get("method"):
            case "tools/call":
                call(request["id"], request["params"]["name"], request["params"].get("arguments") or {})
            case "initialize":
                info = {"name": "bench", "version": "1"}
                result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
                reply(request["id"], result=result)
            case "tools/list":
                tools = [{"name": n, "description": d, "inputSchema": schema} for n, (d, schema) in TOOLS.items()]
                reply(request["id"], result={"tools": tools})
            case _ if "id" in request:
                reply(request["id"], error={"code": -32601, "message": "unknown method"})
    note("end")


if __name__ == "__main__":
    main()
