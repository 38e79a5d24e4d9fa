"""A real stdio MCP server that tells its environment and its arguments to everybody: in its tool, its results and its log."""

import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field


TOLD = "\n".join([*os.environ.values(), *sys.argv[1:]])
if __name__ == "__main__":
    sys.stderr.write(TOLD)
if __name__ == "__main__" and "--fail" in sys.argv:
    sys.exit(f"It cannot start with {TOLD}")
server = MCPServer("teller", log_level="ERROR")


@server.tool(description=f"Tell all: {' '.join(TOLD.split())}")
def tell(text: str = Field(default=TOLD, description=TOLD, examples=[TOLD])) -> str:
    if text == "error":
        raise ToolError(TOLD)
    return TOLD


if "--forget" in sys.argv:

    @server.tool()
    def forget() -> None:
        return


if __name__ == "__main__":
    server.run("stdio")
