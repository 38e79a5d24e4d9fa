"""The tools of the Slack server."""

from typing import Annotated

from mcp.server.mcpserver import Context
from mcp.types import ToolAnnotations
from pydantic import Field

from mcp_grpo.desk.servers.serving import READ_ONLY, DeskServer, closing, compact, trajectory_id
from mcp_grpo.desk.servers.slack.backend import Ledgers, SlackBackend, SlackError


MAX_PAGE = 200
MAX_MESSAGES = 100

ChannelId = Annotated[str, Field(description="Id of the channel, such as C0ABCDEFGH2")]
ThreadTs = Annotated[str, Field(description="ts of the thread's first message, such as 1234567890.123456")]


def slack_server(backend: SlackBackend) -> DeskServer:
    """
    Make the Slack server, with the tools and parameters of the reference server.

    Configure `slack_reset` and `slack_state` as `reset_tool` and `state_tool`, so that the policy does not see them.
    """
    server, ledgers = DeskServer("slack", lifespan=closing(backend)), Ledgers()
    _add_reading_tools(server, backend, ledgers)
    _add_writing_tools(server, backend, ledgers)
    _add_hidden_tools(server, ledgers)
    return server


def _add_reading_tools(server: DeskServer, backend: SlackBackend, ledgers: Ledgers) -> None:
    @server.tool(structured_output=False, annotations=READ_ONLY)
    async def slack_list_channels(limit: float = 100, cursor: str | None = None) -> str:
        """List the channels: id, name, purpose, and whether one is archived or closed to you."""
        return compact(await backend.channels(_count(limit, MAX_PAGE), cursor))

    @server.tool(structured_output=False, annotations=READ_ONLY)
    async def slack_get_channel_history(channel_id: ChannelId, context: Context, limit: float = 10) -> str:
        """Latest messages of a channel, newest first, without replies."""
        ledger = ledgers.of(trajectory_id(context))
        return compact(await backend.history(ledger, channel_id, _count(limit, MAX_MESSAGES)))

    @server.tool(structured_output=False, annotations=READ_ONLY)
    async def slack_get_thread_replies(channel_id: ChannelId, thread_ts: ThreadTs, context: Context) -> str:
        """A message and the replies to it, oldest first."""
        return compact(await backend.replies(ledgers.of(trajectory_id(context)), channel_id, thread_ts))

    @server.tool(structured_output=False, annotations=READ_ONLY)
    async def slack_get_users(cursor: str | None = None, limit: float = 100) -> str:
        """List the users: id, name, title."""
        return compact(await backend.users(_count(limit, MAX_PAGE), cursor))


def _add_writing_tools(server: DeskServer, backend: SlackBackend, ledgers: Ledgers) -> None:
    @server.tool(structured_output=False)
    async def slack_post_message(channel_id: ChannelId, text: str, context: Context) -> str:
        """Post a new message to a channel."""
        ledger = ledgers.of(trajectory_id(context))
        return compact({"ok": True} | await backend.post(ledger, channel_id, text, None))

    @server.tool(structured_output=False)
    async def slack_reply_to_thread(channel_id: ChannelId, thread_ts: ThreadTs, text: str, context: Context) -> str:
        """Reply to a message, in its thread."""
        ledger = ledgers.of(trajectory_id(context))
        return compact({"ok": True} | await backend.post(ledger, channel_id, text, thread_ts))

    @server.tool(structured_output=False)
    async def slack_add_reaction(
        channel_id: ChannelId,
        timestamp: Annotated[str, Field(description="ts of the message")],
        reaction: Annotated[str, Field(description="Name of the emoji, without colons")],
        context: Context,
    ) -> str:
        """Add an emoji reaction to a message."""
        ledger = ledgers.of(trajectory_id(context))
        return compact({"ok": True} | await backend.react(ledger, channel_id, timestamp, reaction))


def _add_hidden_tools(server: DeskServer, ledgers: Ledgers) -> None:
    @server.tool(structured_output=False, annotations=ToolAnnotations(idempotent_hint=True))
    async def slack_reset(context: Context) -> str:
        """Forget what this trajectory added."""
        ledgers.forget(trajectory_id(context))
        return "{}"

    @server.tool(structured_output=False, annotations=READ_ONLY)
    async def slack_state(context: Context) -> str:
        """What this trajectory added, in order."""
        return compact(ledgers.of(trajectory_id(context)).state)


def _count(limit: float, most: int) -> int:
    if not limit >= 1:
        raise SlackError("invalid_limit", f"`limit` must be a number from 1 to {most}, got {limit:g}.")
    return int(min(limit, most))
