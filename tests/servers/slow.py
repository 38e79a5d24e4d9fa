"""
A real stdio MCP server whose tools may be waited for in vain.

`--hang-once FILE` makes the first call of `add` write the file, and never come back.
"""

import sys
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer


server = MCPServer("slow", log_level="ERROR")


@server.tool()
async def add(a: int, b: int) -> int:
    """Add."""
    if "--hang-once" in sys.argv and not Path(sys.argv[-1]).exists():
        Path(sys.argv[-1]).write_text("called")
        await anyio.sleep_forever()
    return a + b


@server.tool()
async def wait() -> str:
    """Takes for ever."""
    await anyio.sleep_forever()
    return ""


if __name__ == "__main__":
    server.run("stdio")
