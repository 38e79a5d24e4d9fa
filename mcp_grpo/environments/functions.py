"""Offer plain Python functions as an MCP server, cheap enough to make one for each trajectory."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mcp.server.lowlevel import Server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool


def function_server(name: str, tools: Sequence[Tool], call: Callable[[str, Mapping[str, Any]], str]) -> Server[Any]:
    """
    Make a server of tools that one function answers for.

    The tools are described once for all trajectories, so that making a server takes microseconds. Calls run one at a time, in the
    thread of the rollout: for functions that are quick and do not wait.

    Args:
        name (`str`):
            Name of the server.
        tools (`Sequence[Tool]`):
            Descriptions of the tools.
        call (`Callable[[str, Mapping[str, Any]], str]`):
            Called with a tool's name and its arguments. What it returns is the result, and what it raises is an error that the policy
            reads.

    Returns:
        `mcp.server.lowlevel.Server`: The server.
    """
    listed = ListToolsResult(tools=list(tools))

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return listed

    async def call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        try:
            text, is_error = call(params.name, params.arguments or {}), False
        except Exception as error:
            text, is_error = f"{type(error).__name__}: {error}", True
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error)

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)
