"""The face of a source of Slack data, and the record of what each trajectory did."""

import logging
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mcp.server.mcpserver.exceptions import ToolError


logger = logging.getLogger(__name__)

Record = dict[str, Any]

MAX_LEDGERS = 4096
MAX_ADDED = 200


class SlackError(ToolError):
    """A request that Slack refuses."""

    def __init__(self, code: str, advice: str) -> None:
        super().__init__(f"{code}: {advice}")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """One thing that a trajectory added to the workspace."""

    kind: Literal["post", "reply", "reaction"]
    channel_id: str
    ts: str
    channel: str | None = None
    thread_ts: str | None = None
    text: str | None = None
    reaction: str | None = None

    @property
    def record(self) -> Record:
        """Return it as JSON, without empty fields."""
        fields = ("kind", "channel", "channel_id", "thread_ts", "ts", "text", "reaction")
        return {name: getattr(self, name) for name in fields if getattr(self, name) is not None}


class Ledger:
    """Everything that one trajectory added, in order."""

    def __init__(self) -> None:
        self.added: list[Added] = []

    def check(self) -> None:
        """Refuse a trajectory that adds without end."""
        if len(self.added) >= MAX_ADDED:
            raise SlackError("ratelimited", f"You have added {MAX_ADDED} messages and reactions. Add no more.")

    @property
    def state(self) -> Record:
        """Return it as JSON: `{"added": [{"kind": "post", "channel_id": ..., "ts": ..., "text": ...}, ...]}`."""
        return {"added": [added.record for added in self.added]}


class Ledgers:
    """The ledgers of all trajectories; beyond the limit, the least recently used is dropped."""

    def __init__(self, max_ledgers: int = MAX_LEDGERS) -> None:
        self._max_ledgers = max_ledgers
        self._ledgers: OrderedDict[str, Ledger] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ledgers)

    def of(self, trajectory_id: str) -> Ledger:
        """Return the ledger of a trajectory, empty at first."""
        ledger = self._ledgers.setdefault(trajectory_id, Ledger())
        self._ledgers.move_to_end(trajectory_id)
        if len(self._ledgers) > self._max_ledgers:
            forgotten, _ = self._ledgers.popitem(last=False)
            logger.warning("More than %d trajectories: %r is forgotten.", self._max_ledgers, forgotten)
        return ledger

    def forget(self, trajectory_id: str) -> None:
        """Let a trajectory begin anew."""
        self._ledgers.pop(trajectory_id, None)


class SlackBackend(Protocol):
    """
    Source of the Slack server's messages.

    Records have the field names of Slack's Web API. Errors that the caller can correct are raised as [`SlackError`].
    What a trajectory adds is recorded in its ledger.
    """

    async def channels(self, limit: int, cursor: str | None) -> Record:
        """
        Return `channels` (`id`, `name`, `purpose`, `is_archived` if true, `is_member` if false) and `next_cursor`, if any.
        """
        ...

    async def users(self, limit: int, cursor: str | None) -> Record:
        """Return `members` (`id`, `name`, `real_name`, `title`, `is_bot` or `deleted` if true) and `next_cursor`."""
        ...

    async def history(self, ledger: Ledger, channel_id: str, limit: int) -> Record:
        """Return `messages`, newest first (`ts`, `user`, `text`, `reply_count`, `reactions`), and `has_more`."""
        ...

    async def replies(self, ledger: Ledger, channel_id: str, thread_ts: str) -> Record:
        """Return `messages`: the parent, then its replies, oldest first."""
        ...

    async def post(self, ledger: Ledger, channel_id: str, text: str, thread_ts: str | None) -> Record:
        """Post, or reply if there is a `thread_ts`: `channel`, `ts`."""
        ...

    async def react(self, ledger: Ledger, channel_id: str, timestamp: str, reaction: str) -> Record:
        """Add a reaction to a message."""
        ...

    async def close(self) -> None:
        """Close the connections. Called once, when the server ends."""
        ...
