"""The tools of all open servers: listed once, frozen for the run, and the names the prompt gives them."""

import difflib
import hashlib
import json
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import mcp.types as types
from jsonschema.protocols import Validator

from mcp_grpo.errors import CatalogError
from mcp_grpo.tools.arguments import SchemaError, compiled, problems, signature, unsendable
from mcp_grpo.types import Task


logger = logging.getLogger(__name__)

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
    """

    name: str
    server: str
    tool: str
    description: str
    input_schema: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as chat templates take it."""
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": self.input_schema},
        }

    def refusal(self, arguments: Mapping[str, Any]) -> str | None:
        """
        Why the tool cannot be called with these arguments.

        Args:
            arguments (`Mapping[str, Any]`):
                Arguments, as the policy wrote them.

        Returns:
            `str` or `None`: A sentence for the policy, or `None` if the arguments fit.
        """
        if (problem := unsendable(arguments)) is not None:
            found = [problem]
        elif self._validator is not None:
            found = problems(self._validator, arguments)
        else:
            found = []
        return f"{'; '.join(found)}; {self.usage}" if found else None

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
    def from_servers(cls, listed: Mapping[str, Sequence[types.Tool]]) -> "Catalog":
        """
        Name the tools of several servers.

        Args:
            listed (`Mapping[str, Sequence[mcp.types.Tool]]`):
                What each server offers.

        Returns:
            [`Catalog`]: The catalog.
        """
        bare = Counter(_prompt_name(tool.name) for tools in listed.values() for tool in tools)
        tools = tuple(
            Tool(
                name=_prompt_name(tool.name if bare[_prompt_name(tool.name)] == 1 else f"{server}__{tool.name}"),
                server=server,
                tool=tool.name,
                description=tool.description or "",
                input_schema=tool.input_schema,
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

    def check(self, task: Task) -> None:
        """
        Refuse a task that names what does not exist.

        Args:
            task ([`Task`]):
                Task to check. Raises [`CatalogError`], which lists what exists.
        """
        self.tools_for(task)


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
    ranked = sorted(names, key=lambda other: -difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio())
    shown = ", ".join(f"`{other}`" for other in ranked[:MAX_NAMES]) or "none"
    return shown + (f" and {len(ranked) - MAX_NAMES} more" if len(ranked) > MAX_NAMES else "")
