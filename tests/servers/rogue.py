"""A server that misbehaves on request; standard library only, so that it starts at once."""

import json
import os
import signal
import subprocess
import sys
import time


TOOLS = [
    "echo", "exit", "mute", "garbage", "bad_utf8", "huge", "huge_id_last", "endless", "stop_reading", "grandchild",
    "close_stdout", "not_a_result", "error_reply", "malformed", "print_secret", "count", "escaped_child",
    "reset", "remember", "crash_once", "read_crash_once", "wrong_id", "string_id", "partial_line", "no_content",
    "unknown_content", "bad_structured", "ask_client", "stderr_flood", "progress", "change_tools", "suspend", "say_key",
    "state", "daemon", "whoami",
]  # fmt: skip
SCHEMA = {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False}
num_calls = 0
changed = False
memory: dict[str, list[str]] = {}


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


def call(request_id, name: str, arguments: dict, meta: dict) -> None:
    global num_calls, changed
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
        case "daemon":
            # It has a session of its own, and its parent is gone.
            starter = (
                "import subprocess; print(subprocess.Popen(['sleep', '1000'], start_new_session=True, stdout=2).pid)"
            )
            started = subprocess.run([sys.executable, "-S", "-c", starter], stdout=subprocess.PIPE, check=True)
            say(request_id, started.stdout.decode())
        case "close_stdout":
            os.close(1)
            time.sleep(1000)
        case "not_a_result":
            reply(request_id, result={"content": "no list"})
        case "error_reply":
            reply(request_id, error={"code": -32602, "message": f"no such thing: {text}"})
        case "malformed":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[}\n' % request_id)
        case "reset" if "bad_reset" in sys.argv:
            reply(request_id, error={"code": -32603, "message": "cannot"})
        case "reset":
            num_calls = 0
            memory.pop(meta.get("mcp_grpo/trajectory_id", ""), None)
            say(request_id, "forgotten")
        case "remember":
            mine = memory.setdefault(meta.get("mcp_grpo/trajectory_id", ""), [])
            mine.append(text)
            say(request_id, " ".join(mine))
        case "state":
            mine = memory.get(meta.get("mcp_grpo/trajectory_id", ""), [])
            say(request_id, json.dumps({"remembered": mine, "num_calls": num_calls, "pid": os.getpid()}))
        case "crash_once" | "read_crash_once":
            if not os.path.exists(text):
                open(text, "w").close()
                os._exit(6)
            say(request_id, "second time")
        case "wrong_id":
            say(request_id + 1_000_000, "for somebody else")
        case "string_id":
            say(str(request_id), "by text")
        case "partial_line":
            write(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"te' % request_id)
            os._exit(8)
        case "no_content":
            reply(request_id, result={})
        case "unknown_content":
            reply(request_id, result={"content": [{"type": "smell", "data": "roses"}]})
        case "bad_structured":
            reply(request_id, result={"content": [{"type": "text", "text": "plain"}], "structuredContent": {"n": "x"}})
        case "ask_client":
            params = {"messages": [], "maxTokens": 1}
            write(
                json.dumps(
                    {"jsonrpc": "2.0", "id": "ask", "method": "sampling/createMessage", "params": params}
                ).encode()
            )
            write(b"\n")
            answer = json.loads(sys.stdin.buffer.readline())
            say(request_id, "refused" if "error" in answer else "obeyed")
        case "stderr_flood":
            for _ in range(100):
                os.write(2, b"noise " * 10_000)
            say(request_id, "said it all")
        case "progress":
            for step in range(30):
                params = {"progressToken": request_id, "progress": step}
                write(
                    json.dumps({"jsonrpc": "2.0", "method": "notifications/progress", "params": params}).encode()
                    + b"\n"
                )
                time.sleep(0.05)
        case "change_tools":
            changed = True
            write(b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}\n')
            say(request_id, "changed")
        case "suspend":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "say_key":
            say(request_id, f"key is {os.environ['API_KEY']}")
        case "print_secret":
            os.write(2, b"x" * 4000 + f"key is {os.environ['API_KEY']}\n".encode() + b"y" * int(text or 0))
            os._exit(4)


def page(request: dict) -> dict:
    """Tools on two pages; `circles` and `forever` in the arguments make listings that never end."""
    cursor = (request.get("params") or {}).get("cursor")
    if "circles" in sys.argv:
        return {"tools": [], "nextCursor": "again"}
    if "forever" in sys.argv:
        return {"tools": [], "nextCursor": str(int(cursor or 0) + 1)}
    tools = [{"name": name, "inputSchema": SCHEMA} for name in TOOLS]
    for tool in tools:
        if tool["name"] == "read_crash_once":
            tool["annotations"] = {"readOnlyHint": True}
        if tool["name"] == "bad_structured":
            tool["outputSchema"] = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        if tool["name"] == "echo" and changed:
            tool["description"] = "Now with a description."
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
                capabilities = {"tools": {"listChanged": True}}
                result = {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info}
                reply(request["id"], result=result)
            case "tools/list":
                reply(request["id"], result=page(request))
            case "tools/call":
                params = request["params"]
                call(request["id"], params["name"], params.get("arguments") or {}, params.get("_meta") or {})
            case _ if "id" in request and "ignore_unknown" not in sys.argv:
                reply(request["id"], error={"code": -32601, "message": "unknown method"})


if __name__ == "__main__":
    main()
