"""
A real stdio MCP server with one tool.

`--die` makes it die when it is called. `--hang FILE` makes it write the file when it is called, and never answer.
"""

import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer


server = MCPServer("sums", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add."""
    if "--die" in sys.argv:
        os._exit(3)
    if "--hang" in sys.argv:
        Path(sys.argv[-1]).write_text("called")
        time.sleep(3600)
    return a + b


if __name__ == "__main__":
    server.run("stdio")
