"""Call tools with values that may fit, and note what comes back."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mcp_grpo.synth.calling import Caller
from mcp_grpo.synth.chains import call_key
from mcp_grpo.synth.readings import read
from mcp_grpo.synth.values import Found, Observation, ValueBook, is_listed, optional, required
from mcp_grpo.tools.catalog import Tool


ROUNDS = 4
MAX_TRIES = 30  # combinations of values that a tool is first tried with
MAX_GROUPS = 8  # of values for one argument
MAX_SEEN = 14  # results of one tool
MAX_EMPTY = 6


@dataclass
class Exploration:
    """The knowledge about servers: calls that worked, and values."""

    book: ValueBook = field(default_factory=ValueBook)
    seen: list[Observation] = field(default_factory=list[Observation])
    failed: dict[str, str] = field(default_factory=dict[str, str])  # the last error of a tool that never worked

    def of(self, tool: str) -> list[Observation]:
        """Return what was seen of a tool."""
        return [one for one in self.seen if one.tool.name == tool]


async def explore(
    caller: Caller, tools: Sequence[Tool], known: Exploration, seed: int, say: Callable[[str], None]
) -> Exploration:
    """Call each of the tools, again and again with what the others returned, until nothing new comes."""
    explorer = _Explorer(caller, known, seed)
    for number in range(ROUNDS):
        before = len(known.seen)
        for tool in tools:
            say(f"round {number + 1}: calling `{tool.name}` ({caller.num_calls} calls, {len(known.seen)} results) ...")
            await explorer.visit(tool)
        if len(known.seen) == before or caller.is_spent:
            break
    return known


class _Explorer:
    def __init__(self, caller: Caller, known: Exploration, seed: int) -> None:
        self._caller = caller
        self._known = known
        self._seed = seed
        self._tried: set[str] = set()
        self._num_seen: Counter[str] = Counter()
        self._num_empty: Counter[str] = Counter()

    async def visit(self, tool: Tool) -> None:
        """Try a tool with the values that are known now."""
        needed = required(tool)
        groups = {
            name: self._known.book.candidates(tool, name, schema)[:MAX_GROUPS] for name, schema in needed.items()
        }
        if any(not found for found in groups.values()):
            return
        if not self._num_seen[tool.name] and not await self._first(tool, needed, groups):
            return
        await self._more(tool, needed, groups)

    async def _first(self, tool: Tool, needed: Mapping[str, Any], groups: Mapping[str, list[list[Found]]]) -> bool:
        """Look for values that work, the likeliest together first."""
        orders = [range(len(groups[name])) for name in needed]
        combinations = sorted(
            itertools.islice(itertools.product(*orders), 5000), key=lambda ranks: (sum(ranks), ranks)
        )
        for ranks in combinations[:MAX_TRIES]:
            firsts = {name: groups[name][rank][0].value for name, rank in zip(needed, ranks, strict=True)}
            if await self._try(tool, _arguments(needed, firsts)):
                return True
        return False

    async def _more(self, tool: Tool, needed: Mapping[str, Any], groups: Mapping[str, list[list[Found]]]) -> None:
        """Vary one argument at a time, and choices among those that are optional."""
        chance = random.Random(f"{self._seed} {tool.name}")
        base = dict(self._known.of(tool.name)[0].arguments) if self._known.of(tool.name) else {}
        for name, schema in needed.items():
            for group in groups[name]:
                values = [one.value for one in group]
                head, rest = values[:1], values[1:]
                chance.shuffle(rest)
                for number, value in enumerate([*head, *rest]):
                    works = await self._try(tool, {**base, **_arguments({name: schema}, {name: value})})
                    if number == 0 and not works:
                        break  # values from this place are not what the tool takes
        for name, schema in optional(tool).items():
            choices = schema.get("enum") if isinstance(schema, Mapping) else None
            for value in choices[:3] if isinstance(choices, list) else ():
                if value != schema.get("default"):
                    await self._try(tool, {**base, name: value})

    async def _try(self, tool: Tool, arguments: dict[str, Any]) -> bool:
        """Call a tool once with these arguments, and tell whether it worked."""
        key = call_key(tool.name, arguments)
        if key in self._tried:
            return any(one.arguments == arguments for one in self._known.of(tool.name))
        if self._num_seen[tool.name] >= MAX_SEEN or self._num_empty[tool.name] >= MAX_EMPTY:
            return False
        self._tried.add(key)
        result = await self._caller.call(tool.name, arguments)
        if result is None:
            return False
        if result.is_error:
            if not self._num_seen[tool.name]:
                self._known.failed[tool.name] = result.text
            return False
        self._known.failed.pop(tool.name, None)
        reading = read(result.text)
        if reading.is_empty:
            self._num_empty[tool.name] += 1
            return False
        seen = Observation(len(self._known.seen), tool, arguments, result.text, reading)
        self._known.seen.append(seen)
        self._num_seen[tool.name] += 1
        self._known.book.add_result(seen)
        return True


def _arguments(schemas: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: [values[name]] if is_listed(schema) and not isinstance(values[name], list) else values[name]
        for name, schema in schemas.items()
    }
