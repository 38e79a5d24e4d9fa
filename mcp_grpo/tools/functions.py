"""A server of plain Python functions, which can be called without a connection."""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

from mcp.server.lowlevel import Server
from mcp.types import CallToolRequestParams, CallToolResult, ListToolsResult, TextContent, Tool

from mcp_grpo.errors import ToolServerError
from mcp_grpo.types import OUTAGE


Functions = Callable[[str, Mapping[str, Any]], str | Awaitable[str]]
"""Function that answers for tools: called with a tool's name and its arguments."""


class FunctionServer:
    """
    A server of tools that one function answers for. A trajectory that has one to itself calls the function as it is, without a connection.

    Args:
        name (`str`):
            Name of the server.
        tools (`Sequence[Tool]`):
            Descriptions of the tools.
        call (`Callable[[str, Mapping[str, Any]], str | Awaitable[str]]`):
            Answers for the tools.
    """

    def __init__(self, name: str, tools: Sequence[Tool], call: Functions) -> None:
        self.name = name
        self.tools = tools
        self._call = call

    def connectable(self) -> Server[Any]:
        """Return the server for clients of the SDK, which takes longer to make than all else."""
        return Server(self.name, on_list_tools=self._on_list, on_call_tool=self._on_call)

    def answer(self, name: str, arguments: Mapping[str, Any]) -> CallToolResult | Awaitable[CallToolResult]:
        """Call the function, and return what a client gets; something to wait for, if the function is `async`."""
        try:
            said = self._call(name, arguments)
        except Exception as error:
            return _failed(error)
        return self._waited(said) if inspect.isawaitable(said) else _result(said)

    async def _waited(self, said: Awaitable[str]) -> CallToolResult:
        try:
            return _result(await said)
        except Exception as error:
            return _failed(error)

    async def _on_list(self, context: Any, params: Any) -> ListToolsResult:
        return ListToolsResult(tools=list(self.tools))

    async def _on_call(self, context: Any, params: CallToolRequestParams) -> CallToolResult:
        found = self.answer(params.name, params.arguments or {})
        return found if isinstance(found, CallToolResult) else await found


def _result(said: object) -> CallToolResult:
    if not isinstance(said, str):
        return _failed(ToolServerError(f"The function of a tool must return text, got {type(said).__name__}."))
    return CallToolResult(content=[TextContent(type="text", text=said)])


def _failed(error: Exception) -> CallToolResult:
    is_ours = isinstance(error, ToolServerError)
    text = str(error) if is_ours else f"{type(error).__name__}: {error}"
    meta = cast(Any, {OUTAGE: True} if is_ours else None)
    return CallToolResult(content=[TextContent(type="text", text=text)], is_error=True, _meta=meta)
