"""A server that misbehaves on request; standard library only, so that it starts at once."""

import json
import os
import subprocess
import sys
import time


TOOLS = [
    "echo", "exit", "mute", "garbage", "bad_utf8", "huge", "huge_id_last", "endless", "stop_reading", "grandchild",
    "close_stdout", "not_a_result", "error_reply", "malformed", "print_secret", "count", "escaped_child", "whoami",
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False}
num_calls = 0


def write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def reply(request_id, **content) -> None:
    write(json.dumps({"jsonrpc": "2.0", "id": request_id, **content}).encode() + b"\n")


def say(request_id, text: str) -> None:
    reply(request_id, result={"content": [{"type": "text", "text": text}]})


def spawn(**options) -> str:
    child = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=sys.stdout, **options)
    return str(child.pid)


def call(request_id, name: str, arguments: dict) -> None:
    global num_calls
    num_calls += 1
    text = arguments.get("text", "")
    match name:
        case "echo":
            say(request_id, text)
        case "count":
            say(request_id, str(num_calls))
        case "whoami":
            say(request_id, str(os.getpid()))
        case "exit":
            os.write(2, b"I am leaving\n")
            os._exit(3)
        case "mute":
            pass
        case "garbage":
            write(b'Starting up...\n\n[1, 2\n{"no": "message"}\n\x00\xff\n')
            say(request_id, "after the garbage")
        case "bad_utf8":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"a\xffb"}]}}\n' % request_id)
        case "huge":
            say(request_id, "x" * 300_000)
        case "huge_id_last":
            result = {"content": [{"type": "text", "text": "x" * 300_000}]}
            write(json.dumps({"result": result, "jsonrpc": "2.0", "id": request_id}).encode() + b"\n")
        case "endless":
            write(b'{"jsonrpc":"2.0","id":%d,"result":' % request_id)
            while True:
                write(b"x" * 65536)
        case "stop_reading":
            time.sleep(1000)
        case "grandchild":
            say(request_id, spawn())
        case "escaped_child":
            say(request_id, spawn(start_new_session=True))
        case "close_stdout":
            os.close(1)
            time.sleep(1000)
        case "not_a_result":
            reply(request_id, result={"content": "no list"})
        case "error_reply":
            reply(request_id, error={"code": -32602, "message": f"no such thing: {text}"})
        case "malformed":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[}\n' % request_id)
        case "print_secret":
            os.write(2, f"key is {os.environ['API_KEY']}\n".encode())
            os._exit(4)


def page(request: dict) -> dict:
    """Tools on two pages; `circles` and `forever` in the arguments make listings that never end."""
    cursor = (request.get("params") or {}).get("cursor")
    if "circles" in sys.argv:
        return {"tools": [], "nextCursor": "again"}
    if "forever" in sys.argv:
        return {"tools": [], "nextCursor": str(int(cursor or 0) + 1)}
    tools = [{"name": name, "inputSchema": SCHEMA} for name in TOOLS]
    return {"tools": tools[:5], "nextCursor": "2"} if cursor is None else {"tools": tools[5:]}


def main() -> None:
    if "crash" in sys.argv:
        os.write(2, f"cannot find my {os.environ.get('API_KEY', 'key')}\n".encode())
        sys.exit(5)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        match request.get("method"):
            case _ if "silent" in sys.argv:
                pass
            case "initialize" if "refuse" in sys.argv:
                reply(request["id"], error={"code": -32603, "message": "not today"})
            case "initialize":
                info = {"name": "rogue", "version": "1"}
                result = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}
                reply(request["id"], result=result)
            case "tools/list":
                reply(request["id"], result=page(request))
            case "tools/call":
                call(request["id"], request["params"]["name"], request["params"].get("arguments") or {})
            case _ if "id" in request:
                reply(request["id"], error={"code": -32601, "message": "unknown method"})


if __name__ == "__main__":
    main()
