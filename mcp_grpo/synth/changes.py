"""Make tasks that change something: call a tool on a server of its own, and look with the reading tools what came of it."""

import random
import re
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, cast

from mcp_grpo.synth.calling import Caller, calling
from mcp_grpo.synth.chains import Chain, Ref, Step, call_key
from mcp_grpo.synth.explore import Exploration
from mcp_grpo.synth.propose import is_sayable
from mcp_grpo.synth.readings import read
from mcp_grpo.synth.run import DroppedError, Run, is_same, run_chain, tells_present
from mcp_grpo.synth.selectors import selectors_of
from mcp_grpo.synth.sql import Table, propose_statements, sql_argument, sql_write_argument
from mcp_grpo.synth.tame import words_of
from mcp_grpo.synth.values import Observation, ValueBook, fits, is_listed, required
from mcp_grpo.tools import ToolPool
from mcp_grpo.tools.arguments import properties
from mcp_grpo.tools.catalog import Tool


MAX_READS = 16  # calls that show the state of a server
MAX_LOOKS = 6  # calls that read what a change names
MAX_WITNESSES = 2  # of them that a task checks
MAX_TRIES, MAX_CHANGES = 16, 8  # of one tool
MAX_CALLS = 200  # in one trajectory
LEAKS = (
    "what it changes is still there for the next trajectory: its server is not isolated. Give it a `scratch` folder, or another "
    "`isolation`"
)

_NEW = words_of(
    "content contents text message description note body observation observations comment title insight new destination newText"
)
_SENTENCES = (
    "The harbour lamp was lit at dusk",
    "Two crates of oranges arrived",
    "The north gate stays closed",
    "Repaint the green bench",
    "Water level was normal",
    "The ferry runs every hour",
)
_NAMES = ("winter_archive", "blue_folder", "tide_notes", "field_log", "spare_parts", "north_gate")


@dataclass
class Changes:
    """Changes that came out the same twice, and tools that are not to be used for them."""

    made: list[Run] = field(default_factory=list[Run])
    num_calls: int = 0
    refused: dict[str, str] = field(default_factory=dict[str, str])


async def make_changes(
    pool: ToolPool,
    known: Exploration,
    tools: tuple[Sequence[Tool], Sequence[Tool]],
    tables: Mapping[str, Sequence[Table]],
    seed: int,
    note: Callable[[Chain, str], None],
    say: Callable[[str], None],
) -> Changes:
    """Try the writing tools of each server, given the reading and the writing tools."""
    changes = Changes()
    reading, writing = tools
    for server in dict.fromkeys(tool.server for tool in writing):
        own = [tool for tool in writing if tool.server == server]
        readers = [tool for tool in reading if tool.server == server]
        await _Changing(pool, known, (readers, own), seed, note, say, changes).run(tables)
    return changes


class _Changing:
    """The changes of one server."""

    def __init__(
        self,
        pool: ToolPool,
        known: Exploration,
        tools: tuple[Sequence[Tool], Sequence[Tool]],
        seed: int,
        note: Callable[[Chain, str], None],
        say: Callable[[str], None],
        changes: Changes,
    ) -> None:
        self._pool, self._known, self._seed = pool, known, seed
        self._reading, self._writing = tools
        self._note, self._say, self._changes = note, say, changes
        self._before: dict[str, str] = {}
        self._is_leaking: bool | None = None  # not known yet
        self._failed: set[str] = set()  # reads that are errors on a fresh server
        self._general: set[str] = set()  # reads that every change is looked at with
        self._steady: set[str] = set()  # tools that say the same on two servers of their own

    async def run(self, tables: Mapping[str, Sequence[Table]]) -> None:
        reads = await self._stable_reads()
        for tool in self._writing:
            if (argument := sql_write_argument(tool)) is not None:
                chains = self._statements(tool, argument, tables)
            elif sql_argument(tool) is not None or not reads:
                continue
            else:
                chains = self._proposals(tool, reads)
            num_made = 0
            for chain in chains:
                if self._is_leaking or num_made >= MAX_CHANGES:
                    break
                num_made += await self._try(chain)
        if self._is_leaking:
            names = [tool.name for tool in self._writing]
            self._changes.refused |= dict.fromkeys(names, LEAKS)
            self._changes.made = [one for one in self._changes.made if one.calls[-1].tool not in names]

    async def _try(self, chain: Chain) -> bool:
        """Run a change twice, each time on a server of its own, and keep it if it shows and is the same."""
        self._say(f"{len(self._changes.made)} changes made; trying `{chain.steps[-1].tool}` ...")
        try:
            unknown = [one for one in chain.reads if call_key(one.tool, one.arguments) not in self._before]
            if unknown:
                await self._look(unknown)
            async with self._fresh() as caller:
                first = await run_chain(chain, caller.call_anew)
            if self._is_leaking is None:
                await self._check_leak(chain.reads)
            if self._is_leaking:
                raise DroppedError("what it changes stays for the next trajectory")
            numbers = self._witnesses(first)
            chain = replace(chain, reads=tuple(chain.reads[number] for number in numbers))
            async with self._fresh() as caller:
                second = await run_chain(chain, caller.call_anew)
            first = replace(first, chain=chain, value=[first.value[number] for number in numbers], errors=())
            if not is_same(first, second):
                raise DroppedError("it came to something else the second time")
        except DroppedError as error:
            self._note(chain, str(error))
            return False
        self._changes.made.append(first)
        return True

    async def _stable_reads(self) -> list[Step]:
        """Choose calls that show the server's state, and are the same on two servers of their own."""
        chosen: list[Observation] = []
        for most in (1, 3):  # of each tool: first one, then more
            for seen in sorted(self._known.seen, key=lambda one: len(one.arguments)):
                is_own = any(tool.name == seen.tool.name for tool in self._reading)
                same = sum(one.tool.name == seen.tool.name for one in chosen)
                if is_own and seen not in chosen and same < most and len(chosen) < MAX_READS:
                    chosen.append(seen)
        steps = [Step(tool=one.tool.name, arguments=one.arguments) for one in chosen]
        first = await self._look(steps)
        second = await self._look(steps)
        now = datetime.now(UTC)
        stable = {key for key in first if first[key] == second.get(key) and not _is_present(first[key], now)}
        unsteady = {step.tool for step in steps if call_key(step.tool, step.arguments) not in stable}
        self._steady = {step.tool for step in steps} - unsteady
        chosen_steps = [step for step in steps if step.tool in self._steady]
        self._general = {call_key(step.tool, step.arguments) for step in chosen_steps}
        return chosen_steps

    async def _look(self, steps: Sequence[Step]) -> dict[str, str]:
        """Return what calls say on a fresh server, and remember it."""
        found: dict[str, str] = {}
        async with self._fresh() as caller:
            for step in steps:
                result = await caller.call_anew(step.tool, step.arguments)
                if result is not None and not result.kind.is_server_fault:
                    found[call_key(step.tool, step.arguments)] = result.text
                    if result.is_error:
                        self._failed.add(call_key(step.tool, step.arguments))
        self._before |= found
        return found

    def _witnesses(self, run: Run) -> list[int]:
        """Return which reads show a change: of the very thing and of others, and one that shows what did not change."""
        keys = [call_key(one.tool, one.arguments) for one in run.chain.reads]
        now = datetime.now(UTC)
        telling = [
            number
            for number, key in enumerate(keys)
            if not (run.errors[number] and key in self._failed) and not _is_present(run.value[number], now)
        ]
        changed = [number for number in telling if run.value[number] != self._before.get(keys[number])]
        if not changed:
            raise DroppedError("it changes nothing that the reading tools show")
        near = [number for number in changed if keys[number] not in self._general]
        far = [number for number in changed if keys[number] in self._general]
        same = [number for number in telling if number not in changed]
        return sorted([*near[:MAX_WITNESSES], *far[:MAX_WITNESSES], *same[:1]])

    async def _check_leak(self, steps: Sequence[Step]) -> None:
        before = dict(self._before)
        after = await self._look(steps)
        self._before = before
        self._is_leaking = any(before.get(key) != text for key, text in after.items())

    @asynccontextmanager
    async def _fresh(self) -> AsyncGenerator[Caller, None]:
        async with calling(self._pool, [*self._reading, *self._writing], MAX_CALLS) as caller:
            yield caller
            self._changes.num_calls += caller.num_calls

    def _statements(self, tool: Tool, argument: str, tables: Mapping[str, Sequence[Table]]) -> list[Chain]:
        for reader in self._reading:
            if (query := sql_argument(reader)) is not None and tables.get(reader.name):
                return propose_statements(tool, argument, reader, query, tables[reader.name], self._seed)
        return []

    def _proposals(self, tool: Tool, reads: Sequence[Step]) -> Iterator[Chain]:
        chance = random.Random(f"{self._seed} {tool.name} changes")
        seen: set[str] = set()
        names = ",".join(required(tool))
        for number in range(MAX_TRIES):
            builder = _Builder(tool, self._known.book, chance)
            arguments = {name: builder.value(schema, name) for name, schema in required(tool).items()}
            key = call_key(tool.name, arguments)
            if builder.is_stuck or key in seen or not all(_is_writable(value) for value in arguments.values()):
                continue
            seen.add(key)
            step, looks = Step(tool=tool.name, arguments=arguments), (*self._close_looks(arguments), *reads)
            yield Chain(
                family="change", steps=(step,), shape=f"change {tool.name}({names})", outcome="state", reads=looks
            )
            if number % 2 and (linked := self._linked(tool, arguments, chance)) is not None:
                first, name, ref = linked
                steps = (first, Step(tool=tool.name, arguments={**arguments, name: ref}))
                shape = f"change {first.tool} {ref.selector.shape} > {tool.name}({name})"
                yield Chain(family="change", steps=steps, shape=shape, outcome="state", reads=looks)

    def _close_looks(self, arguments: Mapping[str, Any]) -> list[Step]:
        """Return calls of tools that read the very things that a change names."""
        looks: list[Step] = []
        for reader in self._reading:
            needed = list(required(reader).items())
            if len(needed) != 1 or reader.name not in self._steady:
                continue
            ((name, schema),) = needed
            for given, value in arguments.items():
                is_path = isinstance(value, str) and value.startswith("/") and words_of(name) & words_of("path file")
                if (given == name or is_path) and isinstance(value, str) and fits(value, schema):
                    looks.append(Step(tool=reader.name, arguments={name: [value] if is_listed(schema) else value}))
        # Those whose results have the most to say, of which a file's content is more than its length.
        length = {
            tool.name: max(len(one.text) for one in self._known.of(tool.name))
            for tool in self._reading
            if self._known.of(tool.name)
        }
        return sorted(looks, key=lambda look: -length[look.tool])[:MAX_LOOKS]

    def _linked(self, tool: Tool, arguments: Mapping[str, Any], chance: random.Random) -> tuple[Step, str, Ref] | None:
        """Replace a text that was made up by one that a reading tool returns."""
        names = [name for name, value in arguments.items() if value in _SENTENCES]
        found = [
            (one, selector)
            for one in self._known.seen
            if any(reader.name == one.tool.name for reader in self._reading)
            and all(map(is_sayable, one.arguments.values()))
            for selector in selectors_of(one.reading)
            if selector.kind in ("field", "where", "pair", "most", "least")
            and isinstance(selector.value_in(one.reading), str)
        ]
        if not names or not found:
            return None
        one, selector = found[chance.randrange(len(found))]
        return Step(tool=one.tool.name, arguments=one.arguments), names[0], Ref(0, selector)


class _Builder:
    """Arguments for a writing tool: things that exist, and texts and names that do not."""

    def __init__(self, tool: Tool, book: ValueBook, chance: random.Random) -> None:
        self.is_stuck = False
        self._tool, self._book, self._chance = tool, book, chance

    def value(self, schema: Any, name: str) -> Any:
        """Return a value for an argument or a field."""
        fields = cast("Mapping[str, Any]", schema) if isinstance(schema, Mapping) else {}
        kind: Any = fields.get("type")
        kind = kind[0] if isinstance(kind, list) and kind else kind
        if isinstance(choices := fields.get("enum"), list) and choices:
            return choices[self._chance.randrange(len(choices))]
        match kind:
            case "array":
                return [self.value(fields.get("items"), name)]
            case "object":
                inner = properties(dict(fields))
                needed = fields.get("required")
                wanted = [key for key in inner if not isinstance(needed, list) or key in needed]
                return {key: self.value(inner[key], key) for key in wanted}
            case "integer" | "number":
                return self._chance.randrange(2, 60)
            case "boolean":
                return True
            case "string" | None:
                return self._text(fields, name)
            case _:
                self.is_stuck = True
                return None

    def _text(self, schema: Mapping[str, Any], name: str) -> str:
        words = words_of(name)
        known = [group for group in self._book.candidates(self._tool, name, schema) if isinstance(group[0].value, str)]
        scored = [group for group in known if words & group[0].words]
        is_new = bool(words & _NEW)
        if is_new and not words & words_of("destination path name"):
            return self._one(_SENTENCES)
        if scored and not is_new and self._chance.random() < 0.6:
            group = scored[self._chance.randrange(min(2, len(scored)))]
            return str(group[self._chance.randrange(len(group))].value)
        paths = [str(one.value) for group in scored or known for one in group if str(one.value).startswith("/")]
        if paths and words & words_of("path destination file directory"):
            near = paths[self._chance.randrange(len(paths))]
            folder = near.rsplit("/", 1)[0] if re.search(r"\.\w{1,5}$", near) else near
            ending = ".txt" if "file" in self._tool.name and "director" not in self._tool.name else ""
            return f"{folder}/{self._one(_NAMES)}{ending}"
        return self._one(_NAMES)

    def _one(self, values: Sequence[str]) -> str:
        return values[self._chance.randrange(len(values))]


def _is_present(text: str, now: datetime) -> bool:
    return any(tells_present(leaf, now) for leaf in _leaves(read(text).value))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _leaves(inner)
    else:
        yield value


def _is_writable(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_writable(inner) for inner in value.values())
    return all(_is_writable(inner) for inner in value) if isinstance(value, list) else is_sayable(value)
