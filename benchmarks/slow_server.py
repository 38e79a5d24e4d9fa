"""
A stdio MCP server with one tool that takes as long as it is asked to. Any number of calls may wait at once.

Standard library only, so that it starts fast.
"""

import asyncio
import json
import sys
from typing import Any


NAME = "wait"
DESCRIPTION = "Wait for so many seconds."
ANSWER = "done"
SCHEMA = {
    "type": "object",
    "properties": {"seconds": {"type": "number", "description": "How long."}},
    "required": ["seconds"],
}


def reply(request_id: int | str, **content: Any) -> None:
    sys.stdout.buffer.write(json.dumps({"jsonrpc": "2.0", "id": request_id, **content}).encode() + b"\n")
    sys.stdout.buffer.flush()


def answer(request_id: int | str) -> None:
    reply(request_id, result={"content": [{"type": "text", "text": ANSWER}]})


def handle(request: dict[str, Any]) -> None:
    match request.get("method"):
        case "tools/call":
            seconds = float(request["params"]["arguments"]["seconds"])
            if seconds:
                asyncio.get_running_loop().call_later(seconds, answer, request["id"])
            else:
                answer(request["id"])
        case "initialize":
            info = {"name": "slow", "version": "1"}
            result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
            reply(request["id"], result=result)
        case "tools/list":
            tool = {"name": NAME, "description": DESCRIPTION, "inputSchema": SCHEMA}
            reply(request["id"], result={"tools": [tool]})
        case _ if "id" in request:
            reply(request["id"], error={"code": -32601, "message": "unknown method"})


async def main() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        handle(json.loads(line))


if __name__ == "__main__":
    asyncio.run(main())
