"""The tools of all open servers: listed once, frozen for the run, and the names the prompt gives them."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import mcp.types as types
from jsonschema.protocols import Validator

from mcp_grpo.errors import CatalogError
from mcp_grpo.tools.arguments import (
    Prepared,
    SchemaError,
    coerced,
    compiled,
    problems,
    properties,
    renamed,
    signature,
    unsendable,
)
from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.names import MAX_NAMES, nearest_first, ranked, shortlist
from mcp_grpo.types import Task


logger = logging.getLogger(__name__)

_MAX_NEAREST = 3  # names that may have been meant by another
_MAX_TASKS = 3  # named for one mismatch
_MAX_MISMATCHES = 50  # in one message
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # what function names in prompts are made of


@dataclass(frozen=True, kw_only=True)
class Tool:
    """
    One tool, as the prompt shows it.

    Args:
        name (`str`):
            Name in the prompt and in the policy's calls.
        server (`str`):
            Name of the server that offers it.
        tool (`str`):
            Name on that server.
        description (`str`):
            What the server says it does.
        input_schema (`dict[str, Any]`):
            JSON schema of its arguments.
        aliases (`Mapping[str, str]`, *optional*):
            Its arguments by the other names that are taken for them.
        coerces (`bool`, *optional*, defaults to `False`):
            Whether a value of a wrong type is read as what it plainly spells.
        is_read_only (`bool`, *optional*, defaults to `False`):
            Whether it says that it changes nothing.
        is_repeatable (`bool`, *optional*, defaults to `False`):
            Whether calling it twice does no more than calling it once.
    """

    name: str
    server: str
    tool: str
    description: str
    input_schema: dict[str, Any]
    aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    coerces: bool = False
    is_read_only: bool = False
    is_repeatable: bool = False

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.input_schema},
        }

    def prepare(self, arguments: Mapping[str, Any]) -> Prepared:
        """
        Make arguments ready to be sent, or say why they cannot be.

        Args:
            arguments (`Mapping[str, Any]`):
                Arguments, as the policy wrote them.

        Returns:
            [`Prepared`]: The arguments, what was mended in them, and what is still wrong with them.
        """
        if (problem := unsendable(arguments)) is not None:
            return Prepared(arguments=arguments, refusal=f"{problem}; {self.usage}")
        repairs: list[str] = []
        if self.aliases and not self.aliases.keys().isdisjoint(arguments):
            arguments, repairs = renamed(arguments, self.aliases)
        validator = self._validator
        found = problems(validator, arguments) if validator is not None else None
        if found and validator is not None and self.coerces:
            arguments, read = coerced(validator, arguments)
            repairs += read
            found = problems(validator, arguments) if read else found
        refusal = f"{'; '.join(found)}; {self.usage}" if found else None
        return Prepared(arguments=arguments, repairs=tuple(repairs), refusal=refusal)

    @cached_property
    def usage(self) -> str:
        """The arguments it takes, in words."""
        arguments = signature(self.input_schema)
        return f"the arguments of `{self.name}` are: {arguments}" if arguments else f"`{self.name}` takes no arguments"

    @property
    def is_checked(self) -> bool:
        """Whether arguments are checked before they are sent, which takes a valid schema."""
        return self._validator is not None

    @cached_property
    def _validator(self) -> Validator | None:
        try:
            return compiled(self.input_schema)
        except SchemaError:
            # Going on without the check is the safe side: the server checks by itself, so nothing wrong gets through.
            # Refusing would blame the policy for the server's schema, or stop a run for a tool that no task may use.
            return None


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """
    All tools of a pool.

    A tool is called by its bare name where no other server has one of that name, and by `server__tool` where one has.

    Args:
        servers (`tuple[str, ...]`):
            Names of the servers.
        tools (`tuple[Tool, ...]`):
            Their tools, in the order of the servers.
    """

    servers: tuple[str, ...]
    tools: tuple[Tool, ...]

    @classmethod
    def from_servers(
        cls, listed: Mapping[str, Sequence[types.Tool]], configs: Iterable[ServerConfig] = ()
    ) -> "Catalog":
        """
        Name the tools of several servers.

        Args:
            listed (`Mapping[str, Sequence[mcp.types.Tool]]`):
                What each server offers, from [`offered_tools`].
            configs (`Iterable[ServerConfig]`, *optional*):
                The servers, for how their tools may be used.

        Returns:
            [`Catalog`]: The catalog.
        """
        by_name = {config.name: config for config in configs}
        bare = Counter(_prompt_name(tool.name) for tools in listed.values() for tool in tools)
        tools = tuple(
            _tool(
                tool,
                name=_prompt_name(tool.name if bare[_prompt_name(tool.name)] == 1 else f"{server}__{tool.name}"),
                server=server,
                config=by_name.get(server),
            )
            for server, offered in listed.items()
            for tool in offered
        )
        names = Counter(tool.name for tool in tools)
        for tool in tools:
            if names[tool.name] > 1:
                owners = [f"{other.server}: {other.tool}" for other in tools if other.name == tool.name]
                raise CatalogError(
                    f"The name {tool.name!r} would mean {len(owners)} tools: {owners}. "
                    f"Rename a server, or leave one of them out with `allowed_tools`."
                )
            if not tool.is_checked:
                logger.warning(
                    "The input schema of tool %r of server %r is not valid; its arguments are left to the server to check.",
                    tool.tool,
                    tool.server,
                )
        return cls(servers=tuple(listed), tools=tools)

    @cached_property
    def hash(self) -> str:
        """SHA-256 of all that a prompt shows: names, descriptions and schemas."""
        shown = [tool.schema for tool in self.tools]
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()

    def tools_for(self, task: Task) -> tuple[Tool, ...]:
        """
        The tools a task may use.

        Args:
            task ([`Task`]):
                Names its servers and tools; a tool by its name in the prompt, or by its bare name where only one of
                the task's servers has it.

        Returns:
            `tuple[Tool, ...]`: In the order of the catalog.
        """
        self.check(task)
        offered = self._offered(task)
        if task.tools is None:
            return offered
        chosen = {tool.name for name in task.tools for tool in _found(name, offered)}
        return tuple(tool for tool in offered if tool.name in chosen)

    def check(self, *tasks: Task) -> None:
        """
        Refuse tasks that name what does not exist.

        Args:
            tasks ([`Task`]):
                Tasks to check.

        Raises:
            [`CatalogError`]: If there is such a task; the message is that of [`mismatches`], and lists what exists.
        """
        if found := self.mismatches(tasks):
            raise CatalogError(self.told(found))

    def mismatches(self, tasks: Iterable[Task], calls: Callable[[Task], Iterable[str]] | None = None) -> list[str]:
        """
        Compare all that tasks name with what exists.

        Args:
            tasks (`Iterable[Task]`):
                Tasks to check.
            calls (`Callable[[Task], Iterable[str]]`, *optional*):
                Gives the tools that a task's own script calls, which must be among those it may use.

        Returns:
            `list[str]`: One clause for each name that means nothing, with the number of tasks that have it, the first of
            them, and the nearest names that exist.
        """
        tasks_of: dict[_Wrong, list[str]] = {}
        for task in tasks:
            for wrong in self._wrong(task, () if calls is None else calls(task)):
                tasks_of.setdefault(wrong, []).append(task.task_id)
        return [self._told(wrong, task_ids) for wrong, task_ids in tasks_of.items()]

    def told(self, mismatches: Sequence[str]) -> str:
        """
        Tell of mismatches in one message.

        Args:
            mismatches (`Sequence[str]`):
                What [`mismatches`] has found.

        Returns:
            `str`: A line for each, and what exists.
        """
        count = "1 name in the tasks does" if len(mismatches) == 1 else f"{len(mismatches)} names in the tasks do"
        lines = "".join(f"\n  - {mismatch}" for mismatch in mismatches[:_MAX_MISMATCHES])
        more = len(mismatches) - _MAX_MISMATCHES
        lines += f"\n  and {more} more" if more > 0 else ""
        tools = shortlist([f"`{tool.name}`" for tool in self.tools], MAX_NAMES) or "none"
        servers = ", ".join(f"`{server}`" for server in self.servers) or "none"
        return f"{count} not fit the servers:{lines}\n  The servers are {servers}; their tools are {tools}."

    def _offered(self, task: Task) -> tuple[Tool, ...]:
        servers = self.servers if task.servers is None else task.servers
        return tuple(tool for tool in self.tools if tool.server in servers)

    def _wrong(self, task: Task, calls: Iterable[str]) -> Iterator["_Wrong"]:
        """All names of one task that mean nothing, or more than one thing."""
        unknown = [server for server in dict.fromkeys(task.servers or ()) if server not in self.servers]
        yield from (_Wrong("server", server) for server in unknown)
        if unknown and not any(server in self.servers for server in task.servers or ()):
            task = replace(task, servers=None)  # what its tools could be is not known; that they exist can be
        offered = self._offered(task)
        usable = offered if task.tools is None else [t for name in task.tools for t in _found(name, offered)]
        for name in dict.fromkeys(task.tools or ()):
            if len(_found(name, offered)) != 1:
                yield _Wrong("tool", name, task.servers)
        for name in dict.fromkeys(calls):
            # What is wrong in `tools` has been said, and a script may well call it.
            if name not in {tool.name for tool in usable} and name not in (task.tools or ()):
                yield _Wrong("solution", name, task.servers)

    def _told(self, wrong: "_Wrong", task_ids: Sequence[str]) -> str:
        number = "1 task" if len(task_ids) == 1 else f"{len(task_ids)} tasks"
        who = f"({number}: {shortlist([repr(task_id) for task_id in task_ids], _MAX_TASKS)})"
        if wrong.what == "server":
            return (
                f"server {wrong.name!r} {who} is not configured. The nearest names are "
                f"{_nearest(wrong.name, self.servers)}."
            )
        what = f"tool {wrong.name!r} {who}" if wrong.what == "tool" else f"tool {wrong.name!r} in a `solution` {who}"
        everywhere = _found(wrong.name, self.tools)
        here = [tool for tool in everywhere if wrong.servers is None or tool.server in wrong.servers]
        if not everywhere:
            nearest = _nearest(wrong.name, [tool.name for tool in self.tools])
            return f"{what} does not exist. The nearest names are {nearest}."
        if not here:
            return (
                f"{what} is offered by {_names(tool.server for tool in everywhere)}, which is not among the task's `servers`: "
                f"{_names(wrong.servers or ())}. Add it there, or leave `servers` out."
            )
        if wrong.what == "solution" and wrong.name in {tool.name for tool in here}:
            return f"{what} is not among the task's `tools`. Add it there."
        return f"{what} could be any of {_names(tool.name for tool in here)}. Use one of these names."


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A name that means nothing where it stands."""

    what: Literal["server", "tool", "solution"]
    name: str
    servers: tuple[str, ...] | None = None


def offered_tools(config: ServerConfig, listed: Sequence[types.Tool]) -> tuple[types.Tool, ...]:
    """
    The tools of a server that policies are offered.

    Args:
        config ([`ServerConfig`]):
            The server. Raises [`CatalogError`] if its options name a tool or an argument that does not exist.
        listed (`Sequence[mcp.types.Tool]`):
            All tools it has.

    Returns:
        `tuple[mcp.types.Tool, ...]`: Those in `allowed_tools`, without the `reset_tool` and the `state_tool`.
    """
    names = [tool.name for tool in listed]
    named = {
        "allowed_tools": config.allowed_tools or (),
        "idempotent_tools": config.idempotent_tools,
        "reset_tool": () if config.reset_tool is None else (config.reset_tool,),
        "state_tool": () if config.state_tool is None else (config.state_tool,),
    }
    wrong = [
        f"`{option}` of server {config.name!r} names {name!r}, which it does not offer. Its tools are "
        f"{nearest_first(name, names)}."
        for option, wanted in named.items()
        for name in wanted
        if name not in names
    ]
    allowed = names if config.allowed_tools is None else config.allowed_tools
    hidden = (config.reset_tool, config.state_tool)
    offered = tuple(tool for tool in listed if tool.name in allowed and tool.name not in hidden)
    arguments = dict.fromkeys(argument for tool in offered for argument in properties(tool.input_schema))
    wrong += [
        f"`argument_aliases` of server {config.name!r} takes {alias!r} for {argument!r}, which no tool of it has. Their "
        f"arguments are {nearest_first(argument, arguments)}."
        for alias, argument in config.argument_aliases.items()
        if argument not in arguments
    ]
    if wrong:
        raise CatalogError("\n".join(wrong))
    return offered


def catalog_changes(before: Sequence[types.Tool], after: Sequence[types.Tool]) -> list[str]:
    """
    How two listings of a server differ in what a prompt shows.

    Args:
        before (`Sequence[mcp.types.Tool]`):
            The earlier listing.
        after (`Sequence[mcp.types.Tool]`):
            The later one.

    Returns:
        `list[str]`: One clause per tool that was removed, added or changed; empty if there is none.
    """
    old, new = {tool.name: tool for tool in before}, {tool.name: tool for tool in after}
    changes = [f"`{name}` was removed" for name in old if name not in new]
    changes += [f"`{name}` was added" for name in new if name not in old]
    parts = {"description": "the description", "input_schema": "the schema"}
    for name in [name for name in old if name in new]:
        changed = [words for part, words in parts.items() if getattr(old[name], part) != getattr(new[name], part)]
        if changed:
            changes.append(f"{' and '.join(changed)} of `{name}` changed")
    return changes


def _tool(tool: types.Tool, *, name: str, server: str, config: ServerConfig | None) -> Tool:
    hints = tool.annotations or types.ToolAnnotations()
    aliases: Mapping[str, str] = config.argument_aliases if config else {}
    is_declared = config is not None and tool.name in config.idempotent_tools
    has = properties(tool.input_schema)
    return Tool(
        name=name,
        server=server,
        tool=tool.name,
        description=tool.description or "",
        input_schema=tool.input_schema,
        aliases={alias: argument for alias, argument in aliases.items() if argument in has and alias not in has},
        coerces=config is not None and config.coerce_arguments,
        is_read_only=bool(hints.read_only_hint),
        is_repeatable=bool(hints.read_only_hint or hints.idempotent_hint or is_declared),
    )


def _prompt_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _found(name: str, tools: Iterable[Tool]) -> list[Tool]:
    """The tools that a name may stand for: that of this name in the prompt, or those of this bare name."""
    tools = list(tools)
    return [tool for tool in tools if tool.name == name] or [tool for tool in tools if tool.tool == name]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _nearest(name: str, names: Iterable[str]) -> str:
    return _names(ranked(name, names)[:_MAX_NEAREST]) or "none"
