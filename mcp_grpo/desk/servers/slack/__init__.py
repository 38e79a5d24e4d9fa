"""MCP server `slack`: read channels and threads, post, reply, react."""

from mcp_grpo.desk.servers.slack.workspace import Channel, Message, Thread, User, Workspace


__all__ = ["Channel", "Message", "Thread", "User", "Workspace"]
