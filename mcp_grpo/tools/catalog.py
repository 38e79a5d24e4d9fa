"""The tools of all open servers, listed once and frozen for the run, and their names in the prompt."""

import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import mcp.types as types

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
from mcp_grpo.tools.schema_checks import Checker
from mcp_grpo.types import Task


logger = logging.getLogger(__name__)

ALL = "*"  # in `read_only_tools`
_MAX_COMPILED = (
    100  # schemas when servers are opened; others when their tool is called, since each takes a millisecond
)
_MAX_NEAREST = 3  # suggestions for a wrong name
_MAX_TASKS = 3  # listed per mismatch
_MAX_MISMATCHES = 50  # in one message
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_-]")  # of functions in prompts


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
            Arguments by their alternative names.
        coerces (`bool`, *optional*, defaults to `False`):
            Whether values of a wrong type are converted to what they clearly spell.
        is_read_only (`bool`, *optional*, defaults to `False`):
            Whether it declares that it changes nothing.
        is_repeatable (`bool`, *optional*, defaults to `False`):
            Whether calling it twice is the same as calling it once.
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
        """Return the tool in the form that chat templates take."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.input_schema},
        }

    def prepare(self, arguments: Mapping[str, Any]) -> Prepared:
        """
        Prepare arguments to be sent, or explain why they cannot be.

        Args:
            arguments (`Mapping[str, Any]`):
                Arguments, as the policy wrote them.

        Returns:
            [`Prepared`]: The arguments, what was changed in them, and what is still wrong with them.
        """
        if (problem := unsendable(arguments)) is not None:
            return Prepared(arguments=arguments, refusal=f"{problem}; {self.usage}")
        repairs: list[str] = []
        if self.aliases and not self.aliases.keys().isdisjoint(arguments):
            arguments, repairs = renamed(arguments, self.aliases)
        checker = self._checker
        found = problems(checker, arguments) if checker is not None else None
        if found and checker is not None and self.coerces:
            arguments, read = coerced(checker, arguments)
            repairs += read
            found = problems(checker, arguments) if read else found
        refusal = f"{'; '.join(found)}; {self.usage}" if found else None
        return Prepared(arguments=arguments, repairs=tuple(repairs), refusal=refusal)

    @cached_property
    def usage(self) -> str:
        """Description of its arguments."""
        arguments = signature(self.input_schema)
        return f"the arguments of `{self.name}` are: {arguments}" if arguments else f"`{self.name}` takes no arguments"

    @property
    def is_checked(self) -> bool:
        """Return whether arguments are checked before they are sent, which needs a valid schema."""
        return self._checker is not None

    @cached_property
    def _checker(self) -> Checker | None:
        try:
            return compiled(self.input_schema)
        except SchemaError:
            # The server checks too, so nothing wrong gets through. Refusing would blame the policy for the server's
            # schema, or stop a run for a tool that no task may use.
            logger.warning(
                "The input schema of tool %r of server %r is not valid; only the server checks its arguments.",
                self.tool,
                self.server,
            )
            return None


@dataclass(frozen=True, kw_only=True)
class Catalog:
    """
    All tools of a pool.

    A tool is called by its own name if no other server has a tool of that name, and by `server__tool` otherwise.

    Args:
        servers (`tuple[str, ...]`):
            Names of the servers.
        tools (`tuple[Tool, ...]`):
            Their tools, in the order of the servers.
        user_tools (`tuple[Tool, ...]`, *optional*):
            Tools that only users may call.
    """

    servers: tuple[str, ...]
    tools: tuple[Tool, ...]
    user_tools: tuple[Tool, ...] = ()

    @classmethod
    def from_servers(
        cls,
        listed: Mapping[str, Sequence[types.Tool]],
        configs: Iterable[ServerConfig] = (),
        user_tools: Mapping[str, Collection[str]] | None = None,
    ) -> "Catalog":
        """Make the catalog of what each server offers, with the options of its configuration; `user_tools` are by server."""
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
                    f"Rename a server, or exclude one of them with `allowed_tools`."
                )
        for tool in tools[:_MAX_COMPILED]:
            _ = tool.is_checked  # reports it now
        is_of_user = [tool.tool in (user_tools or {}).get(tool.server, ()) for tool in tools]
        return cls(
            servers=tuple(listed),
            tools=tuple(tool for tool, is_hidden in zip(tools, is_of_user, strict=True) if not is_hidden),
            user_tools=tuple(tool for tool, is_hidden in zip(tools, is_of_user, strict=True) if is_hidden),
        )

    @cached_property
    def hash(self) -> str:
        """SHA-256 of what a prompt shows: names, descriptions and schemas."""
        shown = [tool.schema for tool in self.tools]
        return hashlib.sha256(json.dumps(shown, sort_keys=True).encode()).hexdigest()

    def tools_for(self, task: Task) -> tuple[Tool, ...]:
        """
        Return the tools a task may use at first: without those that a later message of the user brings.

        Args:
            task ([`Task`]):
                Names its servers and tools; a tool by its name in the prompt, or by its name on the server where only one
                of the task's servers has it.

        Returns:
            `tuple[Tool, ...]`: In the order of the catalog.
        """
        later = set(self.later_tools(task))
        return tuple(tool for tool in self._chosen(task) if tool.name not in later)

    def later_tools(self, task: Task) -> dict[str, Tool]:
        """Return the tools that messages of the user bring, by their names in the prompt."""
        self.check(task)
        offered, names = self._offered(task), dict.fromkeys(name for turn in task.user_turns for name in turn.tools)
        return {tool.name: tool for name in names for tool in _found(name, offered)}

    def all_tools_for(self, task: Task) -> tuple[Tool, ...]:
        """Return the tools a task may use at any time, in the order of the catalog."""
        chosen = {tool.name for tool in self._chosen(task)} | set(self.later_tools(task))
        return tuple(tool for tool in self.tools if tool.name in chosen)

    def _chosen(self, task: Task) -> tuple[Tool, ...]:
        offered = self._offered(task)
        if task.tools is None:
            return offered
        chosen = {tool.name for name in task.tools for tool in _found(name, offered)}
        return tuple(tool for tool in offered if tool.name in chosen)

    def check(self, *tasks: Task) -> None:
        """
        Refuse tasks that name servers or tools that do not exist.

        Args:
            tasks ([`Task`]):
                Tasks to check.

        Raises:
            [`CatalogError`]: If there is such a task.
        """
        if found := self.mismatches(tasks):
            raise CatalogError(self.describe(found))

    def mismatches(self, tasks: Iterable[Task], calls: Callable[[Task], Iterable[str]] | None = None) -> list[str]:
        """
        Find the names in tasks that do not exist.

        Args:
            tasks (`Iterable[Task]`):
                Tasks to check.
            calls (`Callable[[Task], Iterable[str]]`, *optional*):
                Returns the tools that a task's own script calls, which must be among those it may use.

        Returns:
            `list[str]`: One clause for each wrong name, with the number of tasks that have it, the first of them, and the
            nearest existing names.
        """
        tasks_of: dict[_WrongName, list[str]] = {}
        for task in tasks:
            for wrong in self._wrong_names(task, () if calls is None else calls(task)):
                tasks_of.setdefault(wrong, []).append(task.task_id)
        return [self._describe(wrong, task_ids) for wrong, task_ids in tasks_of.items()]

    def describe(self, mismatches: Sequence[str]) -> str:
        """Write what [`mismatches`] found as one message, with the names that exist."""
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

    def _wrong_names(self, task: Task, calls: Iterable[str]) -> Iterator["_WrongName"]:
        """Yield the names of one task that do not exist or are ambiguous."""
        unknown = [server for server in dict.fromkeys(task.servers or ()) if server not in self.servers]
        yield from (_WrongName("server", server) for server in unknown)
        if unknown and not any(server in self.servers for server in task.servers or ()):
            task = replace(task, servers=None)  # at least its tools must exist somewhere
        offered = self._offered(task)
        usable = offered if task.tools is None else [t for name in task.tools for t in _found(name, offered)]
        later = [name for turn in task.user_turns for name in turn.tools]
        usable = [*usable, *(tool for name in later for tool in _found(name, offered))]
        for name in dict.fromkeys([*(task.tools or ()), *later]):
            if len(_found(name, offered)) != 1:
                yield _WrongName("tool", name, task.servers)
        for name in dict.fromkeys(calls):
            # A wrong name in `tools` was reported above.
            if name not in {tool.name for tool in usable} and name not in (*(task.tools or ()), *later):
                yield _WrongName("solution", name, task.servers)

    def _describe(self, wrong: "_WrongName", task_ids: Sequence[str]) -> str:
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
class _WrongName:
    """A name that does not exist where it is used."""

    what: Literal["server", "tool", "solution"]
    name: str
    servers: tuple[str, ...] | None = None


def offered_tools(config: ServerConfig, listed: Sequence[types.Tool]) -> tuple[types.Tool, ...]:
    """
    Return the tools of a server to offer to policies and users. Raises [`CatalogError`] if its options name a tool or an argument that
    does not exist.
    """
    names = [tool.name for tool in listed]
    named = {
        "allowed_tools": config.allowed_tools or (),
        "idempotent_tools": config.idempotent_tools,
        "read_only_tools": tuple(name for name in config.read_only_tools if name != ALL),
        "reset_tool": () if config.reset_tool is None else (config.reset_tool,),
        "state_tool": () if config.state_tool is None else (config.state_tool,),
        "setup_tool": () if config.setup_tool is None else (config.setup_tool,),
        "user_tools": config.user_tools,
    }
    wrong = [
        f"`{option}` of server {config.name!r} names {name!r}, which it does not offer. Its tools are "
        f"{nearest_first(name, names)}."
        for option, wanted in named.items()
        for name in wanted
        if name not in names
    ]
    allowed = frozenset(names if config.allowed_tools is None else config.allowed_tools)
    hidden = (config.reset_tool, config.state_tool, config.setup_tool)
    offered = tuple(
        tool for tool in listed if (tool.name in allowed or tool.name in config.user_tools) and tool.name not in hidden
    )
    arguments = dict.fromkeys(argument for tool in offered for argument in properties(tool.input_schema))
    wrong += [
        f"`argument_aliases` of server {config.name!r} maps {alias!r} to {argument!r}, which none of its tools has. Their "
        f"arguments are {nearest_first(argument, arguments)}."
        for alias, argument in config.argument_aliases.items()
        if argument not in arguments
    ]
    if wrong:
        raise CatalogError("\n".join(wrong))
    return offered


def catalog_changes(before: Sequence[types.Tool], after: Sequence[types.Tool]) -> list[str]:
    """Return one clause per tool that was removed, added or changed in what a prompt shows."""
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
    is_read_only = bool(hints.read_only_hint) or (
        config is not None and not {tool.name, ALL}.isdisjoint(config.read_only_tools)
    )
    has = properties(tool.input_schema)
    return Tool(
        name=name,
        server=server,
        tool=tool.name,
        description=tool.description or "",
        input_schema=tool.input_schema,
        aliases={alias: argument for alias, argument in aliases.items() if argument in has and alias not in has},
        coerces=config is not None and config.coerce_arguments,
        is_read_only=is_read_only,
        is_repeatable=bool(is_read_only or hints.idempotent_hint or is_declared),
    )


def _prompt_name(name: str) -> str:
    return _NOT_IN_NAMES.sub("_", name)


def _found(name: str, tools: Iterable[Tool]) -> list[Tool]:
    """Return the tool with this name in the prompt, or else those with this name on their server."""
    tools = list(tools)
    return [tool for tool in tools if tool.name == name] or [tool for tool in tools if tool.tool == name]


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(names))


def _nearest(name: str, names: Iterable[str]) -> str:
    return _names(ranked(name, names)[:_MAX_NEAREST]) or "none"
