"""A well-behaved server. `python weather.py` speaks stdio; `python weather.py http` prints its port and serves HTTP."""

import asyncio
import os
import socket
import sys

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError


server = MCPServer("weather", log_level="ERROR")
waiting: list[asyncio.Event] = []


@server.tool()
async def weather(city: str, days: int = 1) -> str:
    """Forecast for a city."""
    return f"{city}: sun for {days} d"


@server.tool()
async def fail(reason: str) -> str:
    """Always fails."""
    raise ToolError(reason)


@server.tool()
async def meet(people: int) -> str:
    """Returns once `people` calls are under way at the same time."""
    mine = asyncio.Event()
    waiting.append(mine)
    if len(waiting) == people:
        for event in waiting:
            event.set()
        waiting.clear()
    await mine.wait()
    return "met"


@server.tool()
async def sleep() -> str:
    """Never returns."""
    await asyncio.Event().wait()
    return "?"


@server.tool()
async def session(ctx: Context) -> str:
    """The id of the session, over HTTP."""
    request = ctx.request_context.request
    return str(request and request.headers.get("mcp-session-id"))


@server.tool()
async def blob(size: int) -> str:
    """A text of a given size."""
    return "x" * size


@server.tool()
async def die() -> str:
    """Ends the process."""
    os.write(2, b"last words\n")
    os._exit(7)


def serve_http() -> None:
    """Serve on a free port of the loopback interface, after printing which."""
    import uvicorn

    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(sys.argv[2]) if len(sys.argv) > 2 else 0))
    listener.listen()
    os.write(1, f"{listener.getsockname()[1]}\n".encode())
    app = server.streamable_http_app(stateless_http="stateless" in sys.argv)
    config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    serve_http() if sys.argv[1:2] == ["http"] else server.run("stdio")
