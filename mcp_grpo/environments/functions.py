"""Offer plain Python functions as an MCP server, cheap enough to make one for each trajectory."""

from collections.abc import Sequence

from mcp.types import Tool

from mcp_grpo.tools.functions import Functions, FunctionServer


def function_server(name: str, tools: Sequence[Tool], call: Functions) -> FunctionServer:
    """
    Make a server of tools that one function answers for.

    The tools are described once for all trajectories, so that making a server takes microseconds; pass the same list each time. One that
    is made for each trajectory is called without a connection. Calls run in the thread of the rollout: for functions that are quick, or
    `async`.

    Args:
        name (`str`):
            Name of the server.
        tools (`Sequence[Tool]`):
            Descriptions of the tools.
        call (`Callable[[str, Mapping[str, Any]], str | Awaitable[str]]`):
            Called with a tool's name and its arguments; may be `async`. What it returns is the result, and what it raises is an error
            that the policy reads, except for [`ToolServerError`], which is not the policy's fault.

    Returns:
        [`FunctionServer`]: The server; `connectable()` returns one for clients of the SDK.
    """
    return FunctionServer(name, tools, call)
