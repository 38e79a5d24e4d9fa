"""Make tasks for servers: explore, propose, run twice, write questions, filter."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Endpoint
from mcp_grpo.synth.calling import NOT_ALLOWED, callable_tools, calling
from mcp_grpo.synth.chains import Chain
from mcp_grpo.synth.changes import make_changes
from mcp_grpo.synth.explore import Exploration, explore
from mcp_grpo.synth.filters import filtered
from mcp_grpo.synth.propose import propose
from mcp_grpo.synth.questions import question_of
from mcp_grpo.synth.run import Run, run_again, run_all
from mcp_grpo.synth.splits import split_by_chain
from mcp_grpo.synth.sql import Table, propose_queries, read_tables, sql_argument
from mcp_grpo.synth.tasks import Draft, draft_of, row_of
from mcp_grpo.synth.writer import rewrite
from mcp_grpo.tools import ToolPool
from mcp_grpo.tools.catalog import Tool


MAX_OFFERED = 24  # tools in the prompt of a task
MAX_DISTRACTORS = 6  # of them from other servers
NO_VALUE = "no value is known that it could be called with"
MAX_REASONS = 2  # why chains were left out, in a message
PER_TASK = 4  # chains that are run for each task that is wanted

T = TypeVar("T")
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class SynthSettings:
    """
    Settings of [`make_tasks`].

    Args:
        num_tasks (`int`, *optional*, defaults to `200`):
            Most tasks that are made.
        seed (`int`, *optional*, defaults to `0`):
            Seed of all choices.
        allow_writes (`bool`, *optional*, defaults to `False`):
            Whether tools that may change things are called, on servers of which each trajectory has one to itself.
        max_calls (`int`, *optional*, defaults to `2000`):
            Most calls while looking around, and again in each of the two runs.
        values (`Mapping[str, Sequence[Any]]`, *optional*):
            Values to try, by the names of arguments.
        writer ([`Endpoint`], *optional*):
            Model that words the questions, and is asked again, blind, whether they fit; templates alone if not given.
    """

    num_tasks: int = 200
    seed: int = 0
    allow_writes: bool = False
    max_calls: int = 2000
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    writer: Endpoint | None = None

    def __post_init__(self) -> None:
        for name in ("num_tasks", "max_calls"):
            if getattr(self, name) < 1:
                raise SettingsError(f"`{name}` must be at least 1, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class Made:
    """
    Tasks, and how they came about.

    Args:
        rows (`dict[str, list[dict[str, Any]]]`):
            The rows of each split.
        dropped (`dict[str, int]`):
            How many chains were dropped, by reason.
        examples (`dict[str, str]`):
            A dropped chain for each reason.
        uncalled (`dict[str, str]`):
            Tools that were not called, or never worked, and why.
        servers (`dict[str, int]`):
            Tools of each server.
        num_calls (`int`):
            Calls that were made.
        num_chains (`int`):
            Chains that were run.
        settings ([`SynthSettings`]):
            The settings.
    """

    rows: dict[str, list[dict[str, Any]]]
    dropped: dict[str, int]
    examples: dict[str, str]
    uncalled: dict[str, str]
    servers: dict[str, int]
    num_calls: int
    num_chains: int
    settings: SynthSettings

    @property
    def tasks(self) -> list[dict[str, Any]]:
        """Return the rows of all splits."""
        return [row for rows in self.rows.values() for row in rows]

    @property
    def remedy(self) -> str:
        """Say why there are no tasks, and what to do."""
        said = ["Nothing was found that could be asked."]
        if NOT_ALLOWED in self.uncalled.values():
            said.append(
                'Servers often do not say which of their tools only read: say it for them with `"x-mcp-grpo": {"read_only_tools": ["*"]}` '
                "in their entries of the mcpServers file, or name single tools there. `--allow-writes` also calls tools that change things."
            )
        if NO_VALUE in self.uncalled.values():
            said.append("`mcp-grpo tasks synth --values FILE` takes values to call tools with.")
        if self.dropped:
            reasons = [f"{why} ({number} times)" for why, number in list(self.dropped.items())[:MAX_REASONS]]
            said.append(f"What was tried was left out: {'; '.join(reasons)}.")
        return " ".join([*said, "Or write tasks of your own, one JSON object a line."])


async def make_tasks(servers: Any, settings: SynthSettings, say: Say = lambda text: None) -> Made:
    """
    Make tasks for servers, by calling their tools.

    Args:
        servers (`Any`):
            What [`~mcp_grpo.tools.ToolPool`] takes.
        settings ([`SynthSettings`]):
            The settings.
        say (`Callable[[str], None]`, *optional*):
            Is told what is going on.

    Returns:
        [`Made`]: The tasks. None where nothing stable could be asked; `dropped` and `uncalled` say why.
    """
    async with ToolPool(servers) as pool:
        return await _Synthesis(pool, settings, say).run()


class _Synthesis:
    """One run of the pipeline."""

    def __init__(self, pool: ToolPool, settings: SynthSettings, say: Say) -> None:
        self._pool = pool
        self._settings = settings
        self._say = say
        self._dropped: Counter[str] = Counter()
        self._examples: dict[str, str] = {}
        self._num_calls = 0
        self._by_name = {tool.name: tool for tool in pool.catalog.tools}

    async def run(self) -> Made:
        settings = self._settings
        tools, uncalled = callable_tools(self._pool, allow_writes=settings.allow_writes)
        reading = [tool for tool in tools if tool.is_read_only]
        known, queries, tables = await self._look_around(reading)
        proposed = self._chosen([*propose(known, self._pool.catalog.tools, settings.seed), *queries])
        stable = await self._twice(proposed, reading)
        if settings.allow_writes:
            writing = [tool for tool in tools if not tool.is_read_only]
            changes = await make_changes(
                self._pool, known, (reading, writing), tables, settings.seed, self._note, self._say
            )
            stable += changes.made
            self._num_calls += changes.num_calls
            uncalled |= changes.refused
        drafts = [draft_of(one, question_of(one, self._by_name)) for one in stable]
        if settings.writer is not None:
            drafts = await rewrite(drafts, self._by_name, settings.writer, self._note_draft, self._say)
        drafts = filtered(drafts, self._note_draft, settings.num_tasks)
        drafts = _balanced(
            drafts, lambda one: one.made.chain.family, lambda one: one.made.chain.shape, settings.num_tasks
        )
        chance = random.Random(f"{settings.seed} offer")
        rows = [row_of(draft, self._offered(draft, tools, chance), self._by_name) for draft in drafts]
        uncalled |= {name: f"it never worked: {text}" for name, text in known.failed.items() if name not in uncalled}
        never = {tool.name for tool in reading} - {one.tool.name for one in known.seen} - uncalled.keys()
        spoken = {tool.name for tool in reading if sql_argument(tool) is not None}
        uncalled |= dict.fromkeys(sorted(never - spoken), NO_VALUE)
        return Made(
            rows=split_by_chain(rows, settings.seed),
            dropped=dict(self._dropped.most_common()),
            examples=self._examples,
            uncalled=uncalled,
            servers=dict(Counter(tool.server for tool in self._pool.catalog.tools)),
            num_calls=self._num_calls,
            num_chains=len(proposed),
            settings=settings,
        )

    async def _look_around(self, tools: Sequence[Tool]) -> tuple[Exploration, list[Chain], dict[str, list[Table]]]:
        known, queries, found = Exploration(), list[Chain](), dict[str, list[Table]]()
        known.book.add_given(self._settings.values)
        for config in self._pool.configs:
            known.book.add_settings(config)
        async with calling(self._pool, tools, self._settings.max_calls) as caller:
            spoken = {tool.name: name for tool in tools if (name := sql_argument(tool)) is not None}
            for tool in (tool for tool in tools if tool.name in spoken):
                self._say(f"reading the tables behind `{tool.name}` ...")
                found[tool.name] = tables = await read_tables(tool, spoken[tool.name], caller.call)
                queries += propose_queries(tool, spoken[tool.name], tables, self._settings.seed)
            await explore(
                caller, [tool for tool in tools if tool.name not in spoken], known, self._settings.seed, self._say
            )
            self._num_calls += caller.num_calls
        return known, queries, found

    def _chosen(self, chains: Sequence[Chain]) -> list[Chain]:
        """Choose the chains that are run: of each family and shape in turn."""
        number = PER_TASK * self._settings.num_tasks
        shuffled = list(chains)
        random.Random(f"{self._settings.seed} choose").shuffle(shuffled)
        return _balanced(shuffled, lambda one: one.family, lambda one: one.shape, number)

    async def _twice(self, chains: Sequence[Chain], tools: Sequence[Tool]) -> list[Run]:
        """Run chains in two sessions, which share nothing."""
        limit = 4 * self._settings.max_calls
        async with calling(self._pool, tools, limit) as caller:
            made = await run_all(chains, caller.call, self._note, self._say)
            self._num_calls += caller.num_calls
        async with calling(self._pool, tools, limit) as caller:
            made = await run_again(made, caller.call, self._note, self._say)
            self._num_calls += caller.num_calls
        return made

    def _offered(self, draft: Draft, tools: Sequence[Tool], chance: random.Random) -> list[Tool]:
        """Return the tools in the prompt of a task: those it needs, others of their servers, and some of other servers."""
        needed = {call.tool for call in draft.made.calls}
        servers = {self._by_name[name].server for name in needed}
        is_change = draft.made.chain.outcome == "state"
        usable = [tool for tool in tools if tool.is_read_only or is_change]
        own = [tool for tool in usable if tool.server in servers and tool.name not in needed]
        others = [tool for tool in usable if tool.server not in servers and tool.is_read_only]
        for some in (own, others):
            chance.shuffle(some)
        room = MAX_OFFERED - len(needed) - min(MAX_DISTRACTORS, len(others))
        chosen = needed | {tool.name for tool in [*own[: max(0, room)], *others[:MAX_DISTRACTORS]]}
        return [tool for tool in self._pool.catalog.tools if tool.name in chosen]

    def _note(self, chain: Chain, why: str) -> None:
        self._dropped[why] += 1
        self._examples.setdefault(why, chain.shape)

    def _note_draft(self, draft: Draft, why: str) -> None:
        self._dropped[why] += 1
        self._examples.setdefault(why, draft.question)


def _balanced(items: Iterable[T], outer: Callable[[T], str], inner: Callable[[T], str], number: int) -> list[T]:
    """Take items of each outer group in turn, and in each of its inner groups in turn."""
    groups: dict[str, dict[str, list[T]]] = {}
    for item in items:
        groups.setdefault(outer(item), {}).setdefault(inner(item), []).append(item)
    queues = {name: _in_turn(list(inside.values())) for name, inside in groups.items()}
    return _in_turn(list(queues.values()))[:number]


def _in_turn(queues: Sequence[Sequence[T]]) -> list[T]:
    """Merge lists, one item of each at a time."""
    longest = max(map(len, queues), default=0)
    return [queue[number] for number in range(longest) for queue in queues if number < len(queue)]
