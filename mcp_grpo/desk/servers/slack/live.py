"""Slack's Web API."""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import anyio

from mcp_grpo.desk.servers.slack.backend import Added, Ledger, Record, SlackError
from mcp_grpo.desk.servers.vendor import Limits, VendorClient, VendorError, required_key
from mcp_grpo.errors import SettingsError


KEY = "SLACK_BOT_TOKEN"
NAME_TIMEOUT = 3.0  # seconds to wait for the name of a channel
ADVICE = {
    "already_reacted": "You have reacted with it to this message. Go on.",
    "bad_timestamp": "Copy `ts` of the message from slack_get_channel_history.",
    "channel_not_found": "`channel_id` takes an id such as C0ABCDEFGH2; slack_list_channels has them.",
    "invalid_cursor": "Leave `cursor` out to begin anew.",
    "invalid_name": "Use the name of an emoji such as thumbsup or white_check_mark, without colons.",
    "invalid_ts_latest": "Copy `ts` of the message from slack_get_channel_history.",
    "is_archived": "The channel is archived and can only be read. Use another channel.",
    "message_not_found": "Copy `ts` of the message from slack_get_channel_history.",
    "msg_too_long": "Make the text shorter.",
    "no_reaction": "Name an emoji.",
    "no_text": "`text` is empty. Write the message in `text`.",
    "not_in_channel": "You are not a member of the channel and cannot join it. Use another channel.",
    "restricted_action": "You may not post in this channel. Use another channel.",
    "thread_not_found": "Copy `ts` of the first message of the thread from slack_get_channel_history.",
}
_OUTAGES = frozenset((
    "access_denied", "accesslimited", "account_inactive", "ekm_access_denied", "fatal_error", "internal_error",
    "invalid_auth", "missing_scope", "no_permission", "not_allowed_token_type", "not_authed", "ratelimited",
    "request_timeout", "service_unavailable", "team_access_not_granted", "team_added_to_org", "token_expired",
    "token_revoked",
))  # fmt: skip


class LiveSlack:
    """
    A real workspace, as the bot sees it whose token is in `SLACK_BOT_TOKEN`.

    `SLACK_TEAM_ID` names the workspace of an organisation, `SLACK_CHANNEL_IDS` (with commas) the only channels that may be
    used, and `SLACK_API_URL` another address than Slack's. What was posted stays there: forgetting a trajectory only
    forgets the record of it.
    """

    def __init__(self, limits: Limits | None = None) -> None:
        key = required_key(KEY, "embedded")
        if not key.startswith(("xoxb-", "xoxp-", "xoxe")):
            raise SettingsError(f"{KEY} must hold the token of a bot, which begins with xoxb-.")
        self._team = os.environ.get("SLACK_TEAM_ID") or None
        self._allowed = tuple(one.strip() for one in os.environ.get("SLACK_CHANNEL_IDS", "").split(",") if one.strip())
        self._names: dict[str, str] = {}  # of channels, by id
        url = os.environ.get("SLACK_API_URL") or "https://slack.com/api"
        headers = {"Authorization": f"Bearer {key}"}
        self._client = VendorClient("Slack", url, KEY, key, headers, limits or Limits(rate=1.0, burst=20))

    async def channels(self, limit: int, cursor: str | None) -> Record:
        if self._allowed:
            infos = [await self._get("conversations.info", {"channel": channel}) for channel in self._allowed]
            return {"channels": [self._channel(self._dict(info, "channel")) for info in infos]}
        params = {"types": "public_channel", "limit": limit, "cursor": cursor or None, "team_id": self._team}
        answer = await self._get("conversations.list", params)
        return {"channels": [self._channel(one) for one in self._client.records(answer, "channels")]} | _more(answer)

    async def users(self, limit: int, cursor: str | None) -> Record:
        answer = await self._get("users.list", {"limit": limit, "cursor": cursor or None, "team_id": self._team})
        return {"members": [_user(one) for one in self._client.records(answer, "members")]} | _more(answer)

    async def history(self, ledger: Ledger, channel_id: str, limit: int) -> Record:
        self._check(channel_id)
        answer = await self._get("conversations.history", {"channel": channel_id, "limit": limit})
        messages = [_message(one) for one in self._client.records(answer, "messages")]
        return {"messages": messages, "has_more": bool(answer.get("has_more"))}

    async def replies(self, ledger: Ledger, channel_id: str, thread_ts: str) -> Record:
        self._check(channel_id)
        answer = await self._get("conversations.replies", {"channel": channel_id, "ts": thread_ts, "limit": 200})
        return {"messages": [_message(one) for one in self._client.records(answer, "messages")]}

    async def post(self, ledger: Ledger, channel_id: str, text: str, thread_ts: str | None) -> Record:
        self._check(channel_id)
        ledger.check()
        answer = await self._post("chat.postMessage", {"channel": channel_id, "text": text, "thread_ts": thread_ts})
        ts = answer.get("ts")
        if not isinstance(ts, str):
            raise self._client.unexpected(answer)
        kind = "post" if thread_ts is None else "reply"
        added = Added(kind=kind, channel_id=channel_id, thread_ts=thread_ts, ts=ts, text=text)
        await self._note(ledger, added)
        return {"channel": channel_id, "ts": ts}

    async def react(self, ledger: Ledger, channel_id: str, timestamp: str, reaction: str) -> Record:
        self._check(channel_id)
        ledger.check()
        await self._post("reactions.add", {"channel": channel_id, "timestamp": timestamp, "name": reaction})
        await self._note(ledger, Added(kind="reaction", channel_id=channel_id, ts=timestamp, reaction=reaction))
        return {}

    async def close(self) -> None:
        await self._client.close()

    async def _note(self, ledger: Ledger, added: Added) -> None:
        """Record what was done, with the channel's name where Slack tells it."""
        index = len(ledger.added)
        ledger.added.append(added)
        if added.channel_id not in self._names:
            with suppress(SlackError, VendorError), anyio.move_on_after(NAME_TIMEOUT):
                info = await self._get("conversations.info", {"channel": added.channel_id})
                self._channel(self._dict(info, "channel"))
        ledger.added[index] = replace(added, channel=self._names.get(added.channel_id))

    def _check(self, channel_id: str) -> None:
        if self._allowed and channel_id not in self._allowed:
            raise SlackError("channel_not_found", ADVICE["channel_not_found"])

    async def _get(self, method: str, params: Mapping[str, Any]) -> Record:
        return self._checked(await self._client.get(method, params))

    async def _post(self, method: str, body: Mapping[str, Any]) -> Record:
        return self._checked(await self._client.post(method, body, is_read=False))

    def _checked(self, answer: Any) -> Record:
        if not isinstance(answer, dict) or not isinstance(answer.get("ok"), bool):
            raise self._client.unexpected(answer)
        record = cast(Record, answer)
        if record["ok"]:
            return record
        code = str(record.get("error", "unknown_error"))
        if code in _OUTAGES:
            needed = f" It needs the scope {record['needed']}." if record.get("needed") else ""
            raise self._client.error(
                f"Slack refused the request ({code}).{needed} Check the token in {KEY}.", is_outage=True
            )
        raise SlackError(code, ADVICE.get(code, "Slack refused the request. Check the arguments."))

    def _dict(self, answer: Record, name: str) -> Record:
        value = answer.get(name)
        if not isinstance(value, dict):
            raise self._client.unexpected(answer)
        return cast(Record, value)

    def _channel(self, channel: Record) -> Record:
        purpose = channel.get("purpose")
        text = cast(Record, purpose).get("value", "") if isinstance(purpose, dict) else ""
        if channel.get("id") and channel.get("name"):
            self._names[str(channel["id"])] = str(channel["name"])
        record = {"id": channel.get("id"), "name": channel.get("name"), "purpose": text}
        record |= {"is_archived": True} if channel.get("is_archived") else {}
        return record | ({} if channel.get("is_member", True) else {"is_member": False})


def _user(user: Record) -> Record:
    profile = user.get("profile")
    title = cast(Record, profile).get("title", "") if isinstance(profile, dict) else ""
    record = {"id": user.get("id"), "name": user.get("name"), "real_name": user.get("real_name", ""), "title": title}
    record |= {"is_bot": True} if user.get("is_bot") else {}
    return record | ({"deleted": True} if user.get("deleted") else {})


def _message(message: Record) -> Record:
    record = {
        "ts": message.get("ts"),
        "user": message.get("user") or message.get("bot_id"),
        "text": message.get("text"),
    }
    if message.get("thread_ts") not in (None, message.get("ts")):
        record["thread_ts"] = message["thread_ts"]
    elif message.get("reply_count"):
        record["reply_count"] = message["reply_count"]
    reactions = cast(list[Record], message.get("reactions") or [])
    if reactions:
        record["reactions"] = [{"name": one.get("name"), "count": one.get("count")} for one in reactions]
    return record


def _more(answer: Record) -> Record:
    metadata = answer.get("response_metadata")
    cursor = cast(Record, metadata).get("next_cursor") if isinstance(metadata, dict) else None
    return {"next_cursor": cursor} if cursor else {}
