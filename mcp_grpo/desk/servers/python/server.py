"""The tools of the Python server."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Annotated, cast

from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import ToolAnnotations
from pydantic import Field

from mcp_grpo.desk.servers.python.process import Reply
from mcp_grpo.desk.servers.python.sandbox import Sandbox
from mcp_grpo.desk.servers.python.states import MAX_LIVE, StateLostError, States
from mcp_grpo.desk.servers.serving import DeskServer, OutageError, trajectory_id
from mcp_grpo.errors import ToolServerError


_STATE_IS_GONE = "Variables, imports and files of earlier calls are gone; the next call starts anew."


def python_server(sandbox: Sandbox, *, max_live: int = MAX_LIVE, max_idle: float = 600.0) -> DeskServer:
    """
    Make the Python server.

    Configure `python_reset` as `reset_tool`, so that the policy does not see it.
    """
    limits = sandbox.limits

    @asynccontextmanager
    async def lifespan(_: MCPServer) -> AsyncGenerator[States, None]:
        async with States(sandbox, max_live=max_live, max_idle=max_idle) as states:
            yield states

    server = DeskServer("python", lifespan=lifespan)
    modules = ", ".join(("the standard library", *sandbox.packages))
    description = (
        "Run Python code. Returns what it prints and the value of its last line. "
        "Variables, imports and files are kept for the next call. "
        f"Has {modules}; no network. {limits.timeout:g} s and {limits.max_memory_mib} MiB at most."
    )

    @server.tool(structured_output=False, description=description)
    async def run_python(code: Annotated[str, Field(description="Python code")], context: Context) -> str:
        if len(code) > limits.max_code:
            raise ToolError(f"The code has {len(code):,} characters; {limits.max_code:,} are the limit. Send less.")
        states = cast(States, context.request_context.lifespan_context)
        try:
            reply = await states.run(trajectory_id(context), code)
        except StateLostError as error:
            raise OutageError(
                f"This code was not run, because the server has dropped what earlier calls left: {error}."
            ) from None
        except ToolServerError as error:  # not a mistake of the policy
            raise OutageError(str(error)) from None
        text = _text(reply, limits.max_output)
        if reply.ended is not None or reply.error is not None:
            raise ToolError(text)
        return text

    @server.tool(structured_output=False, annotations=ToolAnnotations(idempotent_hint=True))
    async def python_reset(context: Context) -> str:
        """Forget all variables, imports and files."""
        await cast(States, context.request_context.lifespan_context).reset(trajectory_id(context))
        return "Forgotten."

    return server


def _text(reply: Reply, max_output: int) -> str:
    """Return a reply as the policy reads it."""
    parts = [reply.stdout.rstrip("\n"), reply.value or "", _labelled("stderr:", reply.stderr), reply.error or ""]
    text = _cut("\n".join(part for part in parts if part), max_output)
    if reply.ended is not None:
        return "\n".join(part for part in (text, f"{reply.ended} {_STATE_IS_GONE}") if part)
    return text or "The code ran and printed nothing."


def _labelled(label: str, text: str) -> str:
    return f"{label}\n{text.rstrip()}" if text.strip() else ""


def _cut(text: str, size: int) -> str:
    if len(text) <= size:
        return text
    note = f"\n[{len(text) - size:,} characters left out; print less]\n"
    half = size // 2
    return text[:half] + note + text[len(text) - (size - half) :]
