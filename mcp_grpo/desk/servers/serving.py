"""What the desk's servers share: lean tool schemas, error reporting, options, start and stop."""

import argparse
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from datetime import date
from typing import Any, NoReturn, Protocol, cast

import mcp.types as types
import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError, UnexpectedToolError

from mcp_grpo.desk.servers.vendor import VendorError
from mcp_grpo.types import OUTAGE, TRAJECTORY_ID


logger = logging.getLogger(__name__)

READ_ONLY = types.ToolAnnotations(read_only_hint=True)


Lifespan = Callable[[MCPServer], AbstractAsyncContextManager[Any]]


class Backend(Protocol):
    """A source of answers that may hold connections."""

    async def close(self) -> None:
        """Close the connections. Called once, when the server ends."""
        ...


class OutageError(ToolError):
    """Something that a tool relies on has failed, which is not the policy's fault."""


class DeskServer(MCPServer):
    """An MCP server with short tool schemas, whose errors are the tools' own words."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, log_level="WARNING", **options)

    async def list_tools(self) -> list[types.Tool]:
        """List the tools with lean schemas that refuse unknown arguments."""
        tools = await super().list_tools()
        schemas = [_lean(tool.input_schema) | {"additionalProperties": False} for tool in tools]
        return [tool.model_copy(update={"input_schema": schema}) for tool, schema in zip(tools, schemas, strict=True)]

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Context | None = None) -> Any:
        """Call a tool. Pass a `ToolError` on as raised, and mark failures that are not the policy's fault."""
        try:
            return await super().call_tool(name, arguments, context)
        except UnexpectedToolError as error:  # a mistake of ours
            from mcp_grpo.tools.secrets import secret_values, shown_error  # a server starts sooner without it

            trace = shown_error(error.__cause__ or error, secret_values(os.environ.items(), {}))
            logger.error("The tool %r failed.\n%s", name, trace)
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
    """Return JSON without unneeded spaces."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def words_of(value: str, name: str) -> str:
    """Return an argument that must hold at least one word."""
    if not value.strip():
        raise ToolError(f"`{name}` is empty. Give at least one word.")
    return value.strip()


def iso_day(value: str, name: str) -> date:
    """Return an argument that must be a date."""
    try:
        return date.fromisoformat(value.strip())
    except ValueError:
        raise ToolError(f"`{name}` must be a date like 2024-03-28, got {value!r}.") from None


def trajectory_id(context: Context) -> str:
    """Return the id of the trajectory that a call belongs to, `""` if the client sent none."""
    return str((context.request_context.meta or {}).get(TRAJECTORY_ID, ""))


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Make the parser of the options that every server has."""
    options = argparse.ArgumentParser(
        prog=f"python -m mcp_grpo.desk.servers.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    options.add_argument("--transport", choices=("stdio", "http"), default="stdio", help="how clients reach it")
    options.add_argument("--host", default="127.0.0.1", help="address to listen on, with --transport http")
    options.add_argument(
        "--port", type=int, default=8000, help="port to listen on, with --transport http; 0 for a free one"
    )
    return options


def closing(backend: Backend) -> Lifespan:
    """Return a `lifespan` that closes a backend when its server ends."""

    @asynccontextmanager
    async def lifespan(_: MCPServer) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            await backend.close()

    return lifespan


def run_server(
    name: str,
    description: str,
    backends: Mapping[str, Callable[[int], Any]],
    make_server: Callable[[Any], MCPServer],
) -> None:
    """Read the options of a server and run it. A backend is made from the seed; the first one is the default."""
    options = parser(name, description)
    default = next(iter(backends))
    options.add_argument(
        "--backend",
        choices=tuple(backends),
        default=default,
        help=f"source of its data: {default} is invented, others are live, with a key from the environment",
    )
    options.add_argument("--seed", type=int, default=0, help=f"which invented world, with --backend {default}")
    chosen = options.parse_args()
    try:
        backend = backends[chosen.backend](chosen.seed)
    except ValueError as error:  # such as a missing key
        sys.exit(str(error))
    serve(make_server(backend), chosen)


def serve(server: MCPServer, options: argparse.Namespace) -> None:
    """
    Run a server until it is told to end: by SIGTERM, or by the end of stdin over stdio.

    Nothing but the protocol is written to stdout. Over HTTP the first line on stderr is the address.
    """
    if options.transport == "stdio":
        # At once: a thread that waits for a line of stdin cannot be interrupted. Without a handler, the first process of
        # a container would ignore the signal.
        signal.signal(signal.SIGTERM, _end)
        server.run("stdio")
    else:
        _serve_http(server, options.host, options.port)


def _serve_http(server: MCPServer, host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            sys.exit(f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another --host or --port.")
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
    """Remove titles from a schema (not arguments called `title`), and `null` from optional values."""
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
