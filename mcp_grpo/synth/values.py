"""Values that may be given to tools: what schemas, descriptions and settings name, and what tools have returned."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from mcp_grpo.synth.readings import Reading, is_scalar
from mcp_grpo.synth.tame import is_tame, words_of
from mcp_grpo.tools.arguments import properties
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.tools.config import ServerConfig


MAX_PER_GROUP = 40  # values from one place of one tool
MAX_ITEMS = 60  # of a list that are looked at
_QUOTED = re.compile(r"'([^'\s]{1,60})'|\"([^\"\s]{1,60})\"|`([^`\s]{1,60})`")
_FORMATS = {r"\bHH:MM\b": ("16:30", "07:45", "23:10"), r"\bYYYY-MM-DD\b": ("2024-03-15", "2023-11-02")}
_PATHS = words_of("path file files dir directory folder root repo repository source location")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a value: the call whose result has it, and the path in it."""

    observation: int
    path: tuple[str, ...]
    index: int | None
    field: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A value, the words of what it is called, and where it was found if a tool returned it."""

    value: Any
    words: frozenset[str]
    group: str
    server: str | None = None  # the only server that it means something to
    place: Place | None = None
    prefix: str = ""  # that the value has before what was found


@dataclass(slots=True)
class Observation:
    """A call that worked, and what came back."""

    number: int
    tool: Tool
    arguments: Mapping[str, Any]
    text: str
    reading: Reading


@dataclass
class ValueBook:
    """All values that are known so far, in groups: those of one place of one tool."""

    groups: dict[str, list[Found]] = field(default_factory=dict[str, list[Found]])

    def add(self, found: Found) -> None:
        """Note a value that its group does not have yet."""
        group = self.groups.setdefault(found.group, [])
        if len(group) < MAX_PER_GROUP and all(found.value != known.value for known in group):
            group.append(found)

    def add_settings(self, config: ServerConfig) -> None:
        """Note the paths in the command of a server: it was started to work on them."""
        texts = [text.partition("=")[2] if text.startswith("--") and "=" in text else text for text in config.args]
        for text in [*texts, *([config.cwd] if config.cwd else [])]:
            is_path = (
                text.startswith(("/", "./", "~/")) and "node_modules" not in text and text not in config.secret_values
            )
            if is_path and is_tame(text) and not text.endswith((".py", ".js", ".mjs", ".ts")) and Path(text).exists():
                self.add(Found(value=text, words=_PATHS, group=f"settings of {config.name}", server=config.name))

    def add_given(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Note values that the user gives, by the names of arguments."""
        for name, known in values.items():
            for value in known:
                self.add(Found(value=value, words=words_of(name), group=f"given {name}"))

    def add_result(self, seen: Observation) -> None:
        """Note the values in a result, and the paths that its names make with a path that was asked for."""
        tool = seen.tool
        for path, index, key, value in _scalars(seen.reading.value, (), None):
            named = [*path[-1:], *([] if key is None else [key])]
            group = f"{tool.name} {'.'.join(path)}:{key or ''}"
            place = Place(observation=seen.number, path=path, index=index, field=key)
            words = words_of(*named, tool.tool)
            self.add(
                Found(value=value, words=words, group=group, place=place, server=tool.server if not named else None)
            )
            self._add_paths(seen, value, key, place)
            if seen.reading.form == "text" and isinstance(value, str) and value.startswith("/"):
                self.add(Found(value=value, words=_PATHS, group=f"{tool.name} paths", server=tool.server))

    def _add_paths(self, seen: Observation, value: Any, key: str | None, place: Place) -> None:
        for argument in seen.arguments.values():
            is_folder = (
                isinstance(argument, str) and argument.startswith("/") and key in ("name", "path", "file", None)
            )
            if (
                is_folder
                and isinstance(value, str)
                and re.fullmatch(r"[\w][\w .-]{0,60}", value)
                and seen.reading.form != "text"
            ):
                joined = f"{argument.rstrip('/')}/{value}"
                kind = "files" if re.search(r"\.\w{1,5}$", value) else "folders"
                group = f"{kind} that {seen.tool.name} lists"
                self.add(
                    Found(
                        value=joined,
                        words=_PATHS | words_of(kind),
                        group=group,
                        server=seen.tool.server,
                        place=place,
                        prefix=joined[: -len(value)],
                    )
                )

    def candidates(self, tool: Tool, name: str, schema: Any) -> list[list[Found]]:
        """Return the groups of values that an argument may take, the likeliest first."""
        own = list(named_by(schema, name))
        if own and isinstance(schema, Mapping) and ("enum" in schema or "const" in schema):
            return [own]
        wanted = words_of(name)
        ranked: list[tuple[tuple[int, int], list[Found]]] = [((-3, -1), own)] if own else []
        for number, group in enumerate(self.groups.values()):
            usable = [one for one in group if one.server in (None, tool.server) and fits(one.value, schema)]
            if usable:
                generic = wanted & {"name", "id"}
                score = 2 * len((wanted - generic) & usable[0].words) + len(generic & usable[0].words)
                ranked.append(((-score, number), usable))
        return [group for _, group in sorted(ranked, key=lambda one: one[0])]

    def places_of(self, value: Any) -> list[tuple[Place, str]]:
        """Return where a value was found, and what it has before that."""
        return [
            (one.place, one.prefix)
            for group in self.groups.values()
            for one in group
            if one.place is not None and type(one.value) is type(value) and one.value == value
        ]


def fits(value: Any, schema: Any) -> bool:
    """Tell whether a value has the type that a schema asks for, or that of its items."""
    kinds = _kinds(schema)
    if "array" in kinds:
        inner = cast("Mapping[str, Any]", schema).get("items")
        return _kinds(inner) != {"object"} and not isinstance(inner, list) and fits(value, inner)
    if isinstance(value, bool):
        return "boolean" in kinds
    if isinstance(value, int):
        return bool(kinds & {"integer", "number"})
    if isinstance(value, float):
        return "number" in kinds
    return isinstance(value, str) and ("string" in kinds or not kinds)


def is_listed(schema: Any) -> bool:
    """Tell whether an argument is a list."""
    return "array" in _kinds(schema)


def required(tool: Tool) -> dict[str, Any]:
    """Return the schemas of the arguments that a tool needs."""
    needed = tool.input_schema.get("required")
    known = properties(tool.input_schema)
    return {name: known.get(name, {}) for name in needed if isinstance(name, str)} if isinstance(needed, list) else {}


def optional(tool: Tool) -> dict[str, Any]:
    """Return the schemas of the arguments that a tool can do without."""
    needed = required(tool)
    return {name: schema for name, schema in properties(tool.input_schema).items() if name not in needed}


def _kinds(schema: Any) -> set[str]:
    if not isinstance(schema, Mapping):
        return set()
    fields = cast("Mapping[str, Any]", schema)
    kind: Any = fields.get("type")
    if isinstance(kind, str):
        return {kind}
    if isinstance(kind, list):
        return {str(one) for one in cast("list[Any]", kind)}
    options: Any = fields.get("anyOf") or fields.get("oneOf") or []
    return {one for option in options for one in _kinds(option)} if isinstance(options, list) else set()


def named_by(schema: Any, name: str) -> Iterator[Found]:
    """Yield the values that a schema names itself: choices, examples, its default, what its description quotes."""
    if not isinstance(schema, Mapping):
        return
    fields = cast("Mapping[str, Any]", schema)
    inner: Any = fields.get("items") if is_listed(fields) else fields
    values: list[Any] = []
    for source in (fields, inner if isinstance(inner, Mapping) else {}):
        for key in ("enum", "examples"):
            listed: Any = cast("Mapping[str, Any]", source).get(key)
            values += cast("list[Any]", listed) if isinstance(listed, list) else []
        values += [
            cast("Mapping[str, Any]", source)[key]
            for key in ("const", "example", "default")
            if source.get(key) is not None
        ]
    text = str(fields.get("description") or "")
    values += [match[1] or match[2] or match[3] for match in _QUOTED.finditer(text)]
    for pattern, known in _FORMATS.items():
        values += known if re.search(pattern, text) else ()
    if "boolean" in _kinds(fields):
        values += [True, False]
    for value in values:
        if fits(value, fields) and (not isinstance(value, str) or is_tame(value)):
            yield Found(value=value, words=words_of(name), group=f"schema of {name}")


def _scalars(
    value: Any, path: tuple[str, ...], index: int | None
) -> Iterator[tuple[tuple[str, ...], int | None, str | None, Any]]:
    """Yield every scalar with its place: the path to its object or list, its index there, its field."""
    if isinstance(value, dict) and len(path) < 3:
        for key, inner in cast("dict[Any, Any]", value).items():
            if is_scalar(inner):
                yield path, index, str(key), inner
            elif index is None:
                yield from _scalars(inner, (*path, str(key)), None)
    elif isinstance(value, list) and index is None:
        for number, item in enumerate(cast("list[Any]", value)[:MAX_ITEMS]):
            if is_scalar(item):
                yield path, number, None, item
            elif isinstance(item, dict):
                yield from _scalars(item, path, number)
    elif not path and index is None and is_scalar(value):
        yield path, None, None, value
