"""Turn what a server sent back into what the policy reads."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from mcp import MCPError
from mcp.types import (
    CONNECTION_CLOSED,
    PARSE_ERROR,
    AudioContent,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.images import after_cut, between, image_of, joined
from mcp_grpo.tools.transports.framing import MALFORMED, OVERSIZED, TOO_MANY_VALUES
from mcp_grpo.tools.transports.http import TRANSPORT
from mcp_grpo.types import OUTAGE, Image, ResultKind, ToolResult


NO_MESSAGE = "The tool reported an error without saying which."
_DOCS_LINK = re.compile(r"\s*For further information visit https://errors\.pydantic\.dev/\S+")


def observed(result: CallToolResult, *, config: ServerConfig, tool: str, seconds: float) -> ToolResult:
    """
    Return the tool result in a server's reply. Its text holds the text parts and names the others, so that nothing is lost
    silently; pictures come with it. Structured content is used only without text, since servers send both and one repeats the other.
    """
    parts: list[str | Image] = [_as_part(part) for part in result.content]
    has_text = any(isinstance(part, TextContent) and part.text for part in result.content)
    if not has_text and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    whole, images = joined(between("\n", parts))
    text = whole
    kind = ResultKind.OK
    # A state may quote what the policy wrote, errors included.
    patterns = () if tool == config.state_tool else config.error_regexes
    if result.is_error or any(regex.search(text) for regex in patterns):
        kind = ResultKind.SERVER_ERROR if (result.meta or {}).get(OUTAGE) else ResultKind.TOOL_ERROR
        text = _DOCS_LINK.sub("", text) or NO_MESSAGE
    text = config.hide_secrets(text)
    return ToolResult(
        text=text,
        kind=kind,
        structured=config.hide_secrets(result.structured_content),
        server=config.name,
        seconds=seconds,
        images=after_cut(images, whole, text),
    )


def with_repairs(result: ToolResult, repairs: Sequence[str]) -> ToolResult:
    """Prepend a note for the policy about what was changed in its arguments."""
    if not repairs:
        return result
    return replace(result, text=f"Note: {'; '.join(repairs)}.\n{result.text}", repairs=tuple(repairs))


def observed_error(error: MCPError, config: ServerConfig) -> tuple[ResultKind | None, str]:
    """
    Classify an error reply, and return its text for the policy. It is the tool's answer unless a transport made it in place
    of a reply that did not come; `None` means that the session is over.
    """
    raw: Any = error.data
    data = cast("dict[str, Any]", raw) if isinstance(raw, dict) else {}
    is_http = config.transport == "http"
    if data.get(OVERSIZED) or (is_http and "byte limit" in error.message):
        # The policy can act on it, by asking for less; so it is the tool's answer.
        is_long = error.message != TOO_MANY_VALUES
        why = f"the result is larger than {config.max_result_bytes} bytes" if is_long else TOO_MANY_VALUES
        return ResultKind.TOOL_ERROR, f"T{why[1:]} and was dropped. Ask for less."
    if data.get(TRANSPORT) or data.get(MALFORMED) or (is_http and _is_broken_reply(error)):
        return ResultKind.SERVER_ERROR, f"The server {config.name!r} failed: {error.message}"
    if error.code == CONNECTION_CLOSED and error.message == "Connection closed":
        return None, ""
    return ResultKind.TOOL_ERROR, error.message or NO_MESSAGE


def _is_broken_reply(error: MCPError) -> bool:
    """Return whether the SDK made this error because an HTTP reply broke off or was not JSON."""
    return (
        error.code == PARSE_ERROR
        or (error.code == CONNECTION_CLOSED and error.message.startswith("SSE stream"))
        or error.message == "Server returned an error response"
    )


def _as_part(part: ContentBlock) -> str | Image:
    text = _as_text(part)
    image = image_of(part.data, part.mime_type, text) if isinstance(part, ImageContent) else None
    return text if image is None else image


def _as_text(part: ContentBlock) -> str:
    match part:
        case TextContent():
            return part.text
        case ImageContent() | AudioContent():
            return f"[{part.mime_type}, {_size(part.data)}]"
        case ResourceLink():
            return f"[{part.mime_type or 'resource'}, {part.name}: {part.uri}]"
        case EmbeddedResource():
            resource = part.resource
            if isinstance(resource, TextResourceContents):
                return resource.text
            return f"[{resource.mime_type or 'resource'}, {_size(resource.blob)}: {resource.uri}]"


def _size(base64: str) -> str:
    size = len(base64) * 3 // 4 - base64[-2:].count("=")
    return f"{size} B" if size < 1000 else f"{size / 1000:.0f} kB"
