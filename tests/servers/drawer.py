"""
A real stdio MCP server of files in memory, of each trajectory its own, which begin as `fill` says.

`mv` and `write` take a moment, so that calls that do not wait for each other overtake.
"""

import json
import sys
from collections import defaultdict
from typing import Any

import anyio
from mcp.server.mcpserver import Context, MCPServer
from mcp.types import ToolAnnotations

from mcp_grpo.types import SETUP, TRAJECTORY_ID


server = MCPServer("drawer", log_level="ERROR")
drawers: dict[str, dict[str, str]] = defaultdict(dict)
READ_ONLY = ToolAnnotations(readOnlyHint=True)


def drawer(context: Context) -> dict[str, str]:
    meta: Any = context.request_context.meta or {}
    trajectory = str(meta.get(TRAJECTORY_ID, ""))
    if trajectory not in drawers and SETUP in meta:
        drawers[trajectory] = dict(meta[SETUP]["files"])
    return drawers[trajectory]


@server.tool()
async def fill(files: dict[str, str], context: Context) -> str:
    """Begin with these files."""
    if not files:
        raise ValueError("nothing to begin with")
    await anyio.sleep(0.001)
    drawer(context).update(files)
    return "filled"


@server.tool()
async def write(name: str, text: str, context: Context) -> str:
    """Write a file."""
    await anyio.sleep(0.05)
    drawer(context)[name] = text
    return "written"


@server.tool()
async def mv(name: str, to: str, context: Context) -> str:
    """Rename a file."""
    files = drawer(context)
    if name not in files:
        raise ValueError(f"there is no {name}")
    await anyio.sleep(0.01)
    files[to] = files.pop(name)
    return "moved"


@server.tool(annotations=READ_ONLY)
async def read(name: str, context: Context) -> str:
    """Read a file."""
    return drawer(context)[name]


@server.tool(annotations=READ_ONLY)
async def wait(seconds: float, context: Context) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return "waited"


@server.tool()
def empty(context: Context) -> str:
    """Forget the trajectory."""
    meta: Any = context.request_context.meta or {}
    drawers.pop(str(meta.get(TRAJECTORY_ID, "")), None)
    return "empty"


@server.tool(annotations=READ_ONLY)
def content(context: Context) -> str:
    """Return all files as JSON."""
    return json.dumps(drawer(context))


if __name__ == "__main__":
    server.run(sys.argv[1] if len(sys.argv) > 1 else "stdio")
