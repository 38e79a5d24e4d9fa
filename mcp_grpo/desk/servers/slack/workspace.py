"""An invented Slack workspace: the same channels, users and messages for the same seed, on every machine."""

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from mcp_grpo.desk.world.market import Market


NOW = int(datetime(2025, 6, 30, 17, tzinfo=UTC).timestamp())
"""Unix time at which a trajectory begins; all messages are older."""

# Name, purpose, whether it is archived, whether the bot is a member of it.
_CHANNELS = (
    ("general", "Announcements for everybody", False, True),
    ("random", "Anything but work", False, True),
    ("earnings", "Results and guidance of the companies we follow", False, True),
    ("earnings-eu", "Results of companies listed in Europe only", False, True),
    ("earnings-archive", "Old results; superseded by #earnings", True, True),
    ("research", "Finished notes and reports", False, True),
    ("research-requests", "Ask the research desk for a figure or a note", False, True),
    ("trading", "Orders, fills and the trading day", False, True),
    ("trading-alerts", "Price alerts and halts", False, True),
    ("compliance", "Restricted list and approvals", False, False),
    ("data-quality", "Wrong, missing or restated figures", False, True),
    ("deals", "Mergers and placements; by invitation", False, False),
    ("it-help", "Laptops, logins, printers", False, True),
)
_TALK_OF_COMPANIES = (
    "earnings", "earnings-eu", "earnings-archive", "research", "research-requests", "trading", "trading-alerts",
    "compliance", "data-quality", "deals",
)  # fmt: skip
_QUESTIONS_PER_CHANNEL = 8
_CHATTER_PER_CHANNEL = 8

_USERS = (
    ("anna.keller", "Anna Keller", "Equity analyst"),
    ("anna.kessler", "Anna Kessler", "Head of research"),
    ("ben.osei", "Ben Osei", "Trader"),
    ("carla.moreno", "Carla Moreno", "Portfolio manager"),
    ("david.lindqvist", "David Lindqvist", "Risk manager"),
    ("erin.doyle", "Erin Doyle", "Equity analyst"),
    ("farid.haddad", "Farid Haddad", "Data engineer"),
    ("grace.chen", "Grace Chen", "Portfolio manager"),
    ("hugo.martin", "Hugo Martin", "Compliance officer"),
    ("irene.costa", "Irene Costa", "Trader"),
    ("jonas.weber", "Jonas Weber", "IT support"),
    ("jon.webster", "Jon Webster", "Equity analyst"),
)
_DEPARTED = ("karl.brandt", "Karl Brandt", "Equity analyst")
_BOT = ("desk-bot", "Desk Bot", "")

QUESTIONS = {
    "revenue": "What was {company}'s revenue in fiscal 2024?",
    "net_income": "Does somebody have the net income of {company} for fiscal 2024?",
    "margin": "What gross margin did {company} have in fiscal 2024?",
    "eps": "Which diluted EPS did {company} report for fiscal 2024?",
    "price": "Where did {company} close on the last trading day?",
    "split": "Has {company} ever split its stock? I need the ratio.",
    "symbol": "Under which symbol does {company} trade now?",
    "ceo": "Who runs {company} these days?",
    "restated": "Were the figures of {company} restated? The numbers I have do not agree.",
    "filing": "When did {company} file its last annual report?",
}
"""Questions about companies, by topic."""

_REPLIES = (
    "No idea, sorry. Ask the bot?",
    "I had it somewhere, but do not rely on my notes.",
    "Please use the latest filing, not the news.",
    "I need this too, please post it here.",
    "Looking, but I am in meetings until five.",
    "Mind the share classes, there is another company with nearly this name.",
    "The old report had a different figure.",
)
_CHATTER = {
    "general": (
        "The office closes at four on Friday.",
        "Please badge in, also when the door is open.",
        "Town hall is on Thursday at ten.",
        "New coffee machine on the third floor.",
    ),
    "random": (
        "Who is in for lunch at the noodle place?",
        "Found a blue umbrella by the lift.",
        "My train stood still for an hour again.",
        "Five-a-side tonight, we need one more.",
    ),
    "it-help": (
        "The printer on the second floor is out of toner.",
        "VPN drops every ten minutes, anybody else?",
        "Password resets take a day this week.",
        "My second screen flickers since the update.",
    ),
}
_COMPANY_CHATTER = (
    "{company} is on the calendar for next week.",
    "Reading the transcript of {company}, nothing new so far.",
    "Somebody mixed up {company} and {other} in the last note, please be careful.",
    "I moved {company} to the watch list.",
    "Volume in {company} looks odd today.",
    "Meeting with {company} was moved to Wednesday.",
)
_REACTIONS = ("eyes", "thumbsup", "tada", "white_check_mark", "raised_hands")


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A public channel."""

    id: str
    name: str
    purpose: str
    is_archived: bool
    is_member: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A member of the workspace."""

    id: str
    name: str
    real_name: str
    title: str
    is_bot: bool = False
    is_deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reaction:
    """A reaction to a message."""

    name: str
    user_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message, which may open a thread or be a reply in one."""

    channel_id: str
    ts: str
    user_id: str
    text: str
    thread_ts: str | None = None
    reactions: tuple[Reaction, ...] = ()
    company: str | None = None
    topic: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Thread:
    """A message and the replies to it."""

    parent: Message
    replies: tuple[Message, ...]


class Workspace:
    """
    A workspace as a trajectory finds it.

    In a channel, no user asks twice about a company, and no company is asked about twice in the same way, so that "the
    thread in #earnings where Anna Keller asked about Kestrel Optics" is one thread. Another user asks about the same
    company there, and others do in other channels.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.companies = tuple(dict.fromkeys(company.short_name for company in Market(seed).companies()))
        self._random = random.Random(f"slack {seed}")
        self.users = tuple(self._make_users())
        self.bot = next(user for user in self.users if user.is_bot)
        self.channels = tuple(self._make_channels())
        self._channels = {channel.id: channel for channel in self.channels}
        self._names = {channel.name: channel for channel in self.channels}
        self._users = {user.id: user for user in self.users}
        self.messages = tuple(self._make_messages())
        self._by_channel: dict[str, dict[str, Message]] = {channel.id: {} for channel in self.channels}
        self._replies: dict[tuple[str, str], list[Message]] = {}
        for message in self.messages:
            self._by_channel[message.channel_id][message.ts] = message
            if message.thread_ts is not None:
                self._replies.setdefault((message.channel_id, message.thread_ts), []).append(message)

    def channel(self, name_or_id: str) -> Channel | None:
        """Find a channel by its id, or by its name without `#`."""
        return self._channels.get(name_or_id) or self._names.get(name_or_id)

    def user(self, user_id: str) -> User | None:
        """Find a user by id."""
        return self._users.get(user_id)

    def message(self, channel_id: str, ts: str) -> Message | None:
        """Find a message by its channel and timestamp."""
        return self._by_channel.get(channel_id, {}).get(ts)

    def history(self, channel_id: str) -> list[Message]:
        """Return the messages of a channel without replies, newest first."""
        messages = self._by_channel.get(channel_id, {}).values()
        return [message for message in reversed(messages) if message.thread_ts is None]

    def replies(self, channel_id: str, ts: str) -> list[Message]:
        """Return the replies to a message, oldest first."""
        return list(self._replies.get((channel_id, ts), ()))

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Return every question about a company with its replies, by channel, oldest first."""
        return tuple(
            Thread(parent=message, replies=tuple(self.replies(message.channel_id, message.ts)))
            for message in self.messages
            if message.topic is not None
        )

    def _make_users(self) -> Iterator[User]:
        for name, real_name, title in (*_USERS, _DEPARTED, _BOT):
            yield User(
                id=self._id("U", name),
                name=name,
                real_name=real_name,
                title=title,
                is_bot=name == _BOT[0],
                is_deleted=name == _DEPARTED[0],
            )

    def _make_channels(self) -> Iterator[Channel]:
        for name, purpose, is_archived, is_member in _CHANNELS:
            yield Channel(
                id=self._id("C", name), name=name, purpose=purpose, is_archived=is_archived, is_member=is_member
            )

    def _make_messages(self) -> Iterator[Message]:
        for channel in self.channels:
            openings = self._chatter(channel)
            if channel.name in _TALK_OF_COMPANIES:
                openings += self._questions(channel)
            self._shuffle(openings)
            end = NOW - (200 * 86_400 if channel.is_archived else 3_600)
            seconds = end - 86_400 * len(openings)
            for user, text, company, topic in openings:
                seconds += self._random.randrange(30_000, 86_000)
                yield from self._opened(channel, seconds, user, text, company, topic)

    def _opened(
        self, channel: Channel, seconds: int, user: User, text: str, company: str | None, topic: str | None
    ) -> Iterator[Message]:
        """Yield a message, then its replies."""
        parent = self._ts(seconds)
        yield Message(
            channel_id=channel.id,
            ts=parent,
            user_id=user.id,
            text=text,
            reactions=self._reactions(),
            company=company,
            topic=topic,
        )
        for _ in range(self._random.randrange(0, 3) if topic is not None else 0):
            seconds += self._random.randrange(60, 9_000)
            yield Message(
                channel_id=channel.id,
                ts=self._ts(seconds),
                user_id=self._random.choice(self._staff(but=user)).id,
                text=self._random.choice(_REPLIES),
                thread_ts=parent,
            )

    def _questions(self, channel: Channel) -> list[tuple[User, str, str | None, str | None]]:
        names = list(self.companies)
        self._shuffle(names)
        asked: list[tuple[User, str, str | None, str | None]] = []
        # Each is asked about twice: by another user, about another thing.
        for company in names[: _QUESTIONS_PER_CHANNEL // 2]:
            topics, users = [*QUESTIONS], self._staff()
            self._shuffle(topics)
            self._shuffle(users)
            for topic, user in zip(topics[:2], users[:2], strict=True):
                asked.append((user, QUESTIONS[topic].format(company=company), company, topic))
        return asked

    def _chatter(self, channel: Channel) -> list[tuple[User, str, str | None, str | None]]:
        said: list[tuple[User, str, str | None, str | None]] = []
        for index in range(_CHATTER_PER_CHANNEL):
            first = self._random.randrange(len(self.companies))
            second = (first + 1 + self._random.randrange(len(self.companies) - 1)) % len(self.companies)
            texts = _CHATTER.get(channel.name, _COMPANY_CHATTER)
            text = texts[index % len(texts)].format(company=self.companies[first], other=self.companies[second])
            said.append((self._random.choice(self._staff()), text, None, None))
        return said

    def _staff(self, but: User | None = None) -> list[User]:
        return [user for user in self.users if not user.is_bot and not user.is_deleted and user is not but]

    def _reactions(self) -> tuple[Reaction, ...]:
        if self._random.randrange(4):
            return ()
        return (Reaction(name=self._random.choice(_REACTIONS), user_ids=(self._random.choice(self._staff()).id,)),)

    def _ts(self, seconds: int) -> str:
        return f"{seconds}.{self._random.randrange(1_000_000):06d}"

    def _shuffle(self, values: list[Any]) -> None:  # `Random.shuffle` may differ between versions of Python
        for last in range(len(values) - 1, 0, -1):
            other = self._random.randrange(last + 1)
            values[last], values[other] = values[other], values[last]

    def _id(self, kind: str, name: str) -> str:
        digest = hashlib.sha256(f"{kind} {self.seed} {name}".encode()).digest()
        return kind + "0" + "".join("ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[byte % 32] for byte in digest[:9])
