"""
A real stdio MCP server with one tool.

`--die` makes it die when it is called. `--hang FILE` makes it write the file when it is called, and never answer. `--hold FOLDER`
makes it answer its first call only once there is a file `go` in the folder, where it writes `held` then.
"""

import os
import sys
import time
from pathlib import Path

import anyio
from mcp.server.mcpserver import MCPServer


server = MCPServer("sums", log_level="ERROR")


@server.tool()
async def add(a: int, b: int) -> int:
    """Add."""
    if "--die" in sys.argv:
        os._exit(3)
    if "--hang" in sys.argv:
        Path(sys.argv[-1]).write_text("called")
        time.sleep(3600)
    if "--hold" in sys.argv and not (held := Path(sys.argv[-1], "held")).exists():
        held.write_text("called")
        while not held.with_name("go").exists():
            await anyio.sleep(0.02)
    return a + b


if __name__ == "__main__":
    server.run("stdio")
