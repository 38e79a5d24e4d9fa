"""The embedded workspace: the seed's messages, and what each trajectory added to them."""

from collections.abc import Sequence

from mcp_grpo.desk.servers.slack.backend import Added, Ledger, Record, SlackError
from mcp_grpo.desk.servers.slack.workspace import NOW, Channel, Message, Reaction, Workspace


MAX_TEXT_LENGTH = 4000
EMOJI = frozenset((
    "+1", "-1", "100", "alarm_clock", "arrow_down", "arrow_up", "bar_chart", "bell", "blush", "bookmark", "boom",
    "bow", "briefcase", "bug", "bulb", "calendar", "chart", "chart_with_downwards_trend",
    "chart_with_upwards_trend", "clap", "coffee", "collision", "construction", "crossed_fingers", "dart",
    "dollar", "email", "exclamation", "eyes", "fire", "grey_question", "grin", "hand", "handshake", "heart",
    "heart_eyes", "heavy_check_mark", "hourglass", "hugging_face", "hundred", "information_source", "joy", "key",
    "laughing", "link", "lock", "loudspeaker", "mag", "mega", "memo", "money_with_wings", "moneybag", "muscle",
    "neutral_face", "newspaper", "no_entry", "ok", "ok_hand", "pencil", "phone", "point_up", "pray", "pushpin",
    "question", "raised_hand", "raised_hands", "relaxed", "repeat", "rocket", "rotating_light", "sad", "salute",
    "scales", "scroll", "see_no_evil", "shrug", "simple_smile", "slightly_smiling_face", "smile", "smiley", "sob",
    "sparkles", "speech_balloon", "star", "stopwatch", "sunglasses", "sweat_smile", "tada", "thinking_face",
    "thumbsdown", "thumbsup", "trophy", "unlock", "v", "warning", "wave", "white_check_mark", "wink", "x", "zap",
))  # fmt: skip


class EmbeddedSlack:
    """
    A workspace in this process.

    Nothing is copied: a trajectory reads the seed's messages with its own ledger laid over them.
    """

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    async def channels(self, limit: int, cursor: str | None) -> Record:
        records: list[Record] = []
        for channel in self._workspace.channels:
            record: Record = {"id": channel.id, "name": channel.name, "purpose": channel.purpose}
            record |= {"is_archived": True} if channel.is_archived else {}
            records.append(record | ({} if channel.is_member else {"is_member": False}))
        return _page("channels", records, limit, cursor)

    async def users(self, limit: int, cursor: str | None) -> Record:
        records: list[Record] = []
        for user in self._workspace.users:
            record: Record = {"id": user.id, "name": user.name, "real_name": user.real_name, "title": user.title}
            record |= {"is_bot": True} if user.is_bot else {}
            records.append(record | ({"deleted": True} if user.is_deleted else {}))
        return _page("members", records, limit, cursor)

    async def history(self, ledger: Ledger, channel_id: str, limit: int) -> Record:
        channel = self._open_channel(channel_id)
        messages = [self._posted(added) for added in reversed(ledger.added) if _is_in(added, channel, "post")]
        messages += self._workspace.history(channel.id)
        return {
            "messages": [self._record(ledger, message) for message in messages[:limit]],
            "has_more": len(messages) > limit,
        }

    async def replies(self, ledger: Ledger, channel_id: str, thread_ts: str) -> Record:
        parent = self._parent(ledger, self._open_channel(channel_id), thread_ts)
        messages = [parent, *self._replies(ledger, parent)]
        return {"messages": [self._record(ledger, message) for message in messages]}

    async def post(self, ledger: Ledger, channel_id: str, text: str, thread_ts: str | None) -> Record:
        channel = self._open_channel(channel_id, to_write=True)
        if not text.strip():
            raise SlackError("no_text", "`text` is empty. Write the message in `text`.")
        if len(text) > MAX_TEXT_LENGTH:
            raise SlackError(
                "msg_too_long",
                f"A message may have {MAX_TEXT_LENGTH} characters, this one has {len(text)}. Make it shorter.",
            )
        if thread_ts is not None:
            self._parent(ledger, channel, thread_ts)
        ledger.check()
        number = len(ledger.added) + 1
        ts = f"{NOW + number}.{number:06d}"
        kind = "post" if thread_ts is None else "reply"
        ledger.added.append(
            Added(kind=kind, channel_id=channel.id, channel=channel.name, thread_ts=thread_ts, ts=ts, text=text)
        )
        return {"channel": channel.id, "ts": ts}

    async def react(self, ledger: Ledger, channel_id: str, timestamp: str, reaction: str) -> Record:
        channel = self._open_channel(channel_id, to_write=True)
        message = self._message(ledger, channel, timestamp)
        if message is None:
            raise SlackError(
                "message_not_found",
                f"#{channel.name} has no message {_short(timestamp)}. Copy `ts` from slack_get_channel_history.",
            )
        if reaction not in EMOJI:
            raise SlackError(
                "invalid_name",
                f"There is no emoji {_short(reaction)}. "
                "Use a name such as thumbsup or white_check_mark, without colons.",
            )
        if any(one.name == reaction and self._workspace.bot.id in one.user_ids for one in self._seen(ledger, message)):
            raise SlackError("already_reacted", f"You have reacted with {_short(reaction)} to this message. Go on.")
        ledger.check()
        ledger.added.append(
            Added(kind="reaction", channel_id=channel.id, channel=channel.name, ts=timestamp, reaction=reaction)
        )
        return {}

    async def close(self) -> None: ...

    def _open_channel(self, channel_id: str, to_write: bool = False) -> Channel:
        channel = self._workspace.channel(channel_id)
        if channel is None or channel.id != channel_id:
            raise SlackError(
                "channel_not_found",
                f"No channel has the id {_short(channel_id)}. `channel_id` takes an id such as C0ABCDEFGH2; "
                "slack_list_channels has them.",
            )
        if not channel.is_member:
            raise SlackError(
                "not_in_channel",
                f"You are not a member of #{channel.name} and cannot join it. Use another channel.",
            )
        if to_write and channel.is_archived:
            raise SlackError("is_archived", f"#{channel.name} is archived and can only be read. Use another channel.")
        return channel

    def _parent(self, ledger: Ledger, channel: Channel, ts: str) -> Message:
        message = self._message(ledger, channel, ts)
        if message is None:
            raise SlackError(
                "thread_not_found",
                f"#{channel.name} has no message {_short(ts)}. Copy `ts` of the first message of the thread from "
                "slack_get_channel_history.",
            )
        if message.thread_ts is not None:
            raise SlackError(
                "thread_not_found",
                f"The message {ts!r} is itself a reply. Use the `ts` of the message that it replies to, "
                f"{message.thread_ts!r}.",
            )
        return message

    def _message(self, ledger: Ledger, channel: Channel, ts: str) -> Message | None:
        for added in ledger.added:
            if added.ts == ts and _is_in(added, channel, "post", "reply"):
                return self._posted(added)
        return self._workspace.message(channel.id, ts)

    def _replies(self, ledger: Ledger, parent: Message) -> list[Message]:
        added = [
            self._posted(added)
            for added in ledger.added
            if added.channel_id == parent.channel_id and added.thread_ts == parent.ts
        ]
        return self._workspace.replies(parent.channel_id, parent.ts) + added

    def _posted(self, added: Added) -> Message:
        return Message(
            channel_id=added.channel_id,
            ts=added.ts,
            user_id=self._workspace.bot.id,
            text=added.text or "",
            thread_ts=added.thread_ts,
        )

    def _seen(self, ledger: Ledger, message: Message) -> list[Reaction]:
        """Return the reactions to a message, with the trajectory's own."""
        reactions = {reaction.name: reaction for reaction in message.reactions}
        for added in ledger.added:
            if added.reaction is not None and (added.channel_id, added.ts) == (message.channel_id, message.ts):
                before = reactions.get(added.reaction)
                users = (*(before.user_ids if before else ()), self._workspace.bot.id)
                reactions[added.reaction] = Reaction(name=added.reaction, user_ids=users)
        return list(reactions.values())

    def _record(self, ledger: Ledger, message: Message) -> Record:
        record: Record = {"ts": message.ts, "user": message.user_id, "text": message.text}
        if message.thread_ts is not None:
            record["thread_ts"] = message.thread_ts
        elif replies := self._replies(ledger, message):
            record["reply_count"] = len(replies)
        if reactions := self._seen(ledger, message):
            record["reactions"] = [{"name": one.name, "count": len(one.user_ids)} for one in reactions]
        return record


def _short(text: str) -> str:
    """Quote the policy's text, shortened for a message."""
    return repr(text if len(text) <= 40 else text[:40] + "...")


def _is_in(added: Added, channel: Channel, *kinds: str) -> bool:
    return added.channel_id == channel.id and added.kind in kinds


def _page(name: str, records: Sequence[Record], limit: int, cursor: str | None) -> Record:
    start = 0
    if cursor:
        is_number = cursor.isascii() and cursor.isdigit() and len(cursor) < 10
        if not is_number or int(cursor) >= len(records):
            raise SlackError("invalid_cursor", f"There is no page {_short(cursor)}. Leave `cursor` out to begin anew.")
        start = int(cursor)
    page: Record = {name: list(records[start : start + limit])}
    return page | ({"next_cursor": str(start + limit)} if start + limit < len(records) else {})
