"""A real stdio MCP server that does what it is told, to see what it can do."""

import socket
import subprocess
import urllib.request
from pathlib import Path

from mcp.server.mcpserver import MCPServer


server = MCPServer("prisoner", log_level="ERROR")
NAMES = {"Path": Path, "socket": socket, "subprocess": subprocess, "urllib": urllib}


@server.tool()
def do(code: str) -> str:
    """Do something."""
    try:
        return f"did {eval(code, NAMES)}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    server.run("stdio")
