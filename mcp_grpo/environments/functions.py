"""Offer plain Python functions as an MCP server, cheap enough to make one for each trajectory."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from mcp.server.lowlevel import Server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from mcp_grpo.errors import ToolServerError
from mcp_grpo.types import OUTAGE


Functions = Callable[[str, Mapping[str, Any]], str | Awaitable[str]]
"""Function that answers for tools: called with a tool's name and its arguments."""


def function_server(name: str, tools: Sequence[Tool], call: Functions) -> Server[Any]:
    """
    Make a server of tools that one function answers for.

    The tools are described once for all trajectories, so that making a server takes microseconds. Calls run one at a time, in the
    thread of the rollout: for functions that are quick, or `async`.

    Args:
        name (`str`):
            Name of the server.
        tools (`Sequence[Tool]`):
            Descriptions of the tools.
        call (`Callable[[str, Mapping[str, Any]], str | Awaitable[str]]`):
            Called with a tool's name and its arguments; may be `async`. What it returns is the result, and what it raises is an error
            that the policy reads, except for [`ToolServerError`], which is not the policy's fault.

    Returns:
        `mcp.server.lowlevel.Server`: The server.
    """
    listed = ListToolsResult(tools=list(tools))

    async def list_tools(context: Any, params: Any) -> ListToolsResult:
        return listed

    async def call_tool(context: Any, params: CallToolRequestParams) -> CallToolResult:
        meta: Any = None
        try:
            said = call(params.name, params.arguments or {})
            text, is_error = await said if inspect.isawaitable(said) else said, False
        except ToolServerError as error:
            text, is_error, meta = str(error), True, {OUTAGE: True}
        except Exception as error:
            text, is_error = f"{type(error).__name__}: {error}", True
        return CallToolResult(content=[TextContent(type="text", text=text)], is_error=is_error, _meta=meta)

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)
