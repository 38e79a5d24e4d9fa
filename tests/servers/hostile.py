"""A server that floods whoever reads it; standard library only, so that it starts at once."""

import json
import os
import sys
import threading
import time


NUM_TOOLS = int(sys.argv[1]) if len(sys.argv) > 1 else 0
PING = b'{"jsonrpc":"2.0","id":"p","method":"ping"}\n'
NOTE = b'{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":"noise"}}\n'
FLOODS = {
    "lines": b"x\n",
    "empty lines": b"\n",
    "objects": b"{}\n",
    "logs": b'{"level":"info","id":"p","message":"noise"}\n',
    "replies": b'{"jsonrpc":"2.0","id":999999,"result":{}}\n',
    "notes": NOTE,
    "pings": PING,
    "unread pings": PING,
    "long line": b"x" * 1000,
    "changes": b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n',
}
lock = threading.Lock()


def write(data: bytes, file: int = 1) -> None:
    with lock:
        while data:
            data = data[os.write(file, data) :]


def reply(request_id, **content) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request_id, **content}).encode() + b"\n")


def say(request_id, *texts: str) -> None:
    reply(request_id, result={"content": [{"type": "text", "text": text} for text in texts]})


def flood(line: bytes, file: int = 1, size: int = 30_000) -> None:
    chunk = line * (size // len(line))
    num_written = 0
    while True:
        write(chunk, file)
        num_written += 1
        if len(sys.argv) > 2 and os.sep in sys.argv[2]:
            with open(sys.argv[2] + ".new", "w") as count:
                count.write(str(num_written))
            os.replace(sys.argv[2] + ".new", sys.argv[2])


def call(request_id, how: str) -> None:
    match how:
        case "well":
            say(request_id, "hello")
        case "parts":
            say(request_id, *map(str, range(5_000)))
        case "many parts":
            say(request_id, *map(str, range(100_000)))
        case "values":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"structuredContent":[' % request_id)
            write(b"[]," * 1_000_000 + b"0]}}\n")
        case "logs with an id":
            write(b'{"id": %d, "level": "info", "message": "called"}\n' % request_id)
            write(b'{"level": "info", "id": %d}\n' % request_id)
            say(request_id, "hello")
        case "half a pair":
            write(rb'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"a\ud83d b"}]}}' % request_id)
            write(b"\n")
        case "unread pings":
            flood(FLOODS[how], size=3_000)  # on the thread that reads
        case "stderr":
            threading.Thread(target=flood, args=(b"noise\n", 2), daemon=True).start()
            say(request_id, "hello")
        case _:
            say(request_id, "hello")
            time.sleep(0.01)
            threading.Thread(target=flood, args=(FLOODS[how],), daemon=True).start()


def main() -> None:
    schema = {"type": "object", "properties": {"how": {"type": "string"}}}
    tools = [{"name": "do", "inputSchema": schema}]
    tools += [{"name": f"t{i}", "description": "d" * 100, "inputSchema": schema} for i in range(NUM_TOOLS)]
    info = {"name": "hostile", "version": "1"}
    for line in sys.stdin.buffer:
        request = json.loads(line)
        match request.get("method"):
            case "initialize":
                result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
                reply(request["id"], result=result)
            case "tools/list":
                number = int((request.get("params") or {}).get("cursor", 0)) + 1
                more = {"nextCursor": str(number)} if "endless" in sys.argv else {}
                reply(request["id"], result={"tools": tools, **more})
            case "tools/call":
                call(request["id"], request["params"]["arguments"]["how"])
            case _ if "id" in request and "method" in request:
                reply(request["id"], error={"code": -32601, "message": "unknown method"})


if __name__ == "__main__":
    main()
