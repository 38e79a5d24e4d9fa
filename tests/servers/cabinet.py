"""A real stdio MCP server of the text files in the folder that its argument names."""

import json
import os
import sys
from pathlib import Path

from mcp.server.mcpserver import MCPServer
from mcp.types import ToolAnnotations


server = MCPServer("cabinet", log_level="ERROR")
folder = Path(sys.argv[1])
READ_ONLY = ToolAnnotations(readOnlyHint=True)


@server.tool(annotations=READ_ONLY)
def list_files() -> str:
    """List all files with their sizes."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return json.dumps([{"path": str(path), "bytes": path.stat().st_size} for path in files])


@server.tool(annotations=READ_ONLY)
def read_file(path: str) -> str:
    """Read the text of a file."""
    return _inside(path).read_text()


@server.tool()
def write_file(path: str, text: str) -> str:
    """Write a text into a file."""
    _inside(path).write_text(text)
    return f"wrote {path}"


@server.tool(annotations=READ_ONLY)
def working_directory() -> str:
    """Tell the working directory."""
    return json.dumps({"directory": os.getcwd(), "variable": os.environ.get("CABINET", "")})


def _inside(path: str) -> Path:
    if not Path(path).is_relative_to(folder):
        raise ValueError(f"{path} is not in {folder}")
    return Path(path)


if __name__ == "__main__":
    server.run("stdio")
