"""The tools of all open servers: listed once, frozen for the run, and the names the prompt gives them."""

import difflib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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
from mcp_grpo.types import Task


logger = logging.getLogger(__name__)

MAX_NAME_LENGTH = 100  # of a name that does not exist, in a message
MAX_NAMES = 30  # of the names listed in a message; some servers have hundreds of tools

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
        servers = self.servers if task.servers is None else task.servers
        for server in servers:
            if server not in self.servers:
                raise CatalogError(
                    f"Task {task.task_id!r} names the server {server!r}, which is not configured. "
                    f"The servers are {nearest_first(server, self.servers)}."
                )
        offered = tuple(tool for tool in self.tools if tool.server in servers)
        if task.tools is None:
            return offered
        chosen = {_find(name, offered, task).name for name in task.tools}
        return tuple(tool for tool in offered if tool.name in chosen)

    def check(self, *tasks: Task) -> None:
        """
        Refuse tasks that name what does not exist.

        Args:
            tasks ([`Task`]):
                Tasks to check. Raises [`CatalogError`], which lists what exists.
        """
        for task in tasks:
            self.tools_for(task)


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
    for option, wanted in named.items():
        for name in wanted:
            if name not in names:
                raise CatalogError(
                    f"`{option}` of server {config.name!r} names {name!r}, which it does not offer. "
                    f"Its tools are {nearest_first(name, names)}."
                )
    allowed = names if config.allowed_tools is None else config.allowed_tools
    hidden = (config.reset_tool, config.state_tool)
    offered = tuple(tool for tool in listed if tool.name in allowed and tool.name not in hidden)
    arguments = dict.fromkeys(argument for tool in offered for argument in properties(tool.input_schema))
    for alias, argument in config.argument_aliases.items():
        if argument not in arguments:
            raise CatalogError(
                f"`argument_aliases` of server {config.name!r} takes {alias!r} for {argument!r}, which no tool of it has. "
                f"Their arguments are {nearest_first(argument, arguments)}."
            )
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


def _find(name: str, offered: Sequence[Tool], task: Task) -> Tool:
    found = [tool for tool in offered if tool.name == name] or [tool for tool in offered if tool.tool == name]
    if not found:
        raise CatalogError(
            f"Task {task.task_id!r} names the tool {name!r}, which its servers do not offer. "
            f"The tools are {nearest_first(name, [tool.name for tool in offered])}."
        )
    if len(found) > 1:
        raise CatalogError(
            f"Task {task.task_id!r} names the tool {name!r}, which could be any of {[tool.name for tool in found]}. "
            f"Use one of these names."
        )
    return found[0]


def nearest_first(name: str, names: Iterable[str]) -> str:
    """
    A list of names for a message, the likeliest meant first.

    Args:
        name (`str`):
            What was written.
        names (`Iterable[str]`):
            What could have been meant.

    Returns:
        `str`: Such as `` `read`, `write` and 200 more ``.
    """
    name = name[:MAX_NAME_LENGTH]  # a policy may well write the same letters thousands of times
    ranked = sorted(names, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())
    shown = ", ".join(f"`{other}`" for other in ranked[:MAX_NAMES]) or "none"
    return shown + (f" and {len(ranked) - MAX_NAMES} more" if len(ranked) > MAX_NAMES else "")
