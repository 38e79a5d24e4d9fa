"""What every server has in common: how it lists its tools, how it says what went wrong, how it is started and ended."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from typing import Any, NoReturn, cast

import mcp.types as types
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

from mcp_grpo.servers.vendor import VendorError
from mcp_grpo.types import OUTAGE, TRAJECTORY_ID


logger = logging.getLogger(__name__)

READ_ONLY = types.ToolAnnotations(read_only_hint=True)


class OutageError(ToolError):
    """What a tool of ours relies on has failed: the policy is not to blame, and need not pay for it."""


class DeskServer(MCPServer):
    """
    An MCP server that spends few tokens: schemas say no more than they must, and errors are in the tool's own words.

    Args:
        name (`str`):
            Name of the server.
        **options:
            Others of `MCPServer`.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, log_level="WARNING", **options)

    async def list_tools(self) -> list[types.Tool]:
        """See `MCPServer.list_tools`. Arguments that a tool does not have are refused, not ignored."""
        tools = await super().list_tools()
        schemas = [_lean(tool.input_schema) | {"additionalProperties": False} for tool in tools]
        return [tool.model_copy(update={"input_schema": schema}) for tool, schema in zip(tools, schemas, strict=True)]

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context | None = None) -> Any:
        """
        See `MCPServer.call_tool`. A `ToolError` reaches the policy as the tool raised it. One that is none of the policy's
        doing is marked, so that the policy need not pay for it.
        """
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:  # a mistake of ours
            logger.error("The tool %r failed.", name, exc_info=error.__cause__)
            return _outage(f"The tool {name} has failed, for a reason of its own. Try another way.")
        except ToolError as error:
            cause = error.__cause__
            if isinstance(cause, OutageError) or (isinstance(cause, VendorError) and cause.is_outage):
                return _outage(str(cause))
            raise cause if isinstance(cause, ToolError) else error from None


def _outage(text: str) -> types.CallToolResult:
    content = types.TextContent(type="text", text=text)
    return types.CallToolResult(content=[content], is_error=True, _meta={OUTAGE: True})


def compact(value: Any) -> str:
    """
    A result as text: JSON without a space too many.

    Args:
        value (`Any`):
            What JSON can hold.

    Returns:
        `str`: The text.
    """
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def trajectory_id(context: Context) -> str:
    """
    The trajectory that a call belongs to.

    Args:
        context (`Context`):
            Context of the call.

    Returns:
        `str`: The id that came with the call, or `""`, the one trajectory of a server that is told of none.
    """
    return str((context.request_context.meta or {}).get(TRAJECTORY_ID, ""))


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """
    The options that every server has.

    Args:
        name (`str`):
            Name of the server, as in `python -m mcp_grpo.servers.<name>`.
        description (`str`):
            What it offers, in a sentence.

    Returns:
        `argparse.ArgumentParser`: To which a server adds its own options.
    """
    options = argparse.ArgumentParser(
        prog=f"python -m mcp_grpo.servers.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--transport", choices=("stdio", "http"), default="stdio", help="how clients reach it")
    options.add_argument("--host", default="127.0.0.1", help="address to listen on, with --transport http")
    options.add_argument(
        "--port", type=int, default=8000, help="port to listen on, with --transport http; 0 for a free one"
    )
    return options


def serve(server: MCPServer, options: argparse.Namespace) -> None:
    """
    Run a server until it is told to end: by SIGTERM, or by the end of stdin over stdio.

    Nothing but the protocol is written to stdout. Over HTTP the first line on stderr is the address.

    Args:
        server (`MCPServer`):
            The server.
        options (`argparse.Namespace`):
            What [`parser`] parsed.
    """
    if options.transport == "stdio":
        # At once: a thread that waits for a line of stdin cannot be interrupted. Without a handler, the first process of
        # a container would ignore the signal.
        signal.signal(signal.SIGTERM, _end)
        server.run("stdio")
    else:
        _serve_http(server, options.host, options.port)


def refuse(problem: str) -> NoReturn:
    """
    End a server that cannot start, with a sentence on stderr.

    Args:
        problem (`str`):
            What is missing, and what to do.
    """
    sys.exit(problem)


def _serve_http(server: MCPServer, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            refuse(f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --host or --port.")
        listener.listen(1024)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        sys.stderr.write(f"http://{shown}:{listener.getsockname()[1]}/mcp\n")
        sys.stderr.flush()
        app = server.streamable_http_app(json_response=True, host=host)
        config = uvicorn.Config(app, log_config=None, log_level=logging.WARNING, timeout_graceful_shutdown=1)
        uvicorn.Server(config).run(sockets=[listener])


def _end(*_: object) -> NoReturn:
    os._exit(0)


def _lean(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema without titles, but with arguments that are called `title`; what may be left out need not be null."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "properties":
            kept[key] = {name: _lean(one) for name, one in cast(dict[str, Any], value).items()}
        elif key != "title":
            kept[key] = _lean_value(value)
    choices = [one for one in kept.get("anyOf", ()) if one != {"type": "null"}]
    if len(choices) == 1 and "default" in kept and kept["default"] is None:
        kept = {key: value for key, value in kept.items() if key not in ("anyOf", "default")} | choices[0]
    return kept


def _lean_value(value: Any) -> Any:
    if isinstance(value, dict):
        return _lean(cast(dict[str, Any], value))
    if isinstance(value, list):
        return [_lean_value(one) for one in cast(list[Any], value)]
    return value
