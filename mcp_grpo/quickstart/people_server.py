"""MCP server `people`: who somebody is, and who they work with."""

from directory import lookup  # pyright: ignore[reportMissingImports]  # this file is run by its path
from mcp.server.mcpserver import MCPServer


server = MCPServer("people", log_level="ERROR")


@server.tool(structured_output=False)
async def find_person(name: str) -> str:
    """Employee with this name."""
    return lookup("find_person", name)


@server.tool(structured_output=False)
async def get_manager(employee: str) -> str:
    """Manager of an employee."""
    return lookup("get_manager", employee)


@server.tool(structured_output=False)
async def get_mentor(employee: str) -> str:
    """Mentor of an employee."""
    return lookup("get_mentor", employee)


if __name__ == "__main__":
    server.run("stdio")
