"""MCP server `office`: what an employee has been given."""

from directory import lookup  # pyright: ignore[reportMissingImports]  # this file is run by its path
from mcp.server.mcpserver import MCPServer


server = MCPServer("office", log_level="ERROR")


@server.tool(structured_output=False)
async def get_phone(employee: str) -> str:
    """Phone of an employee."""
    return lookup("get_phone", employee)


@server.tool(structured_output=False)
async def get_desk(employee: str) -> str:
    """Desk of an employee."""
    return lookup("get_desk", employee)


@server.tool(structured_output=False)
async def get_badge(employee: str) -> str:
    """Badge of an employee."""
    return lookup("get_badge", employee)


@server.tool(structured_output=False)
async def get_locker(employee: str) -> str:
    """Locker of an employee."""
    return lookup("get_locker", employee)


if __name__ == "__main__":
    server.run("stdio")
