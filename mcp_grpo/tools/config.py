"""The configuration of one MCP server."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

import httpx2
from mcp.server import Server
from mcp.server.mcpserver import MCPServer
from mcp.types import Tool

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools.functions import FunctionServer
from mcp_grpo.tools.secrets import (
    described_without_secrets,
    hidden,
    private_values,
    secret_values,
    shown_address,
    shown_error,
    without_secrets,
    without_tokens,
)


SERVER_OBJECTS = (MCPServer, Server, FunctionServer)
"""Kinds of objects in this process that are servers."""
TransportKind = Literal["stdio", "http", "in_process"]
Isolation = Literal["shared", "exclusive", "meta"]
Protocol = Literal["auto", "legacy"]

DEFAULT_LEASES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerConfig:
    """
    How to reach one MCP server, and how it may be used.

    Neither its `repr` nor its error messages show the values of `env` and `headers`, or secrets in `args` and `url`.

    Args:
        name (`str`):
            Name of the server, as tasks refer to it.
        transport (`str`):
            `"stdio"` (a child process), `"http"` (streamable HTTP) or `"in_process"` (a server object in this process).
        command (`str`, *optional*):
            Program of a stdio server. It is looked up on `PATH` and run as written: for a server in this Python
            environment pass `sys.executable`, since `"python"` may be a different one.
        args (`tuple[str, ...]`, *optional*):
            Arguments of `command`.
        env (`Mapping[str, str]`, *optional*):
            Variables added to the few a stdio server inherits (`HOME`, `LOGNAME`, `PATH`, `SHELL`, `TERM`, `USER`).
        cwd (`str`, *optional*):
            Working directory of a stdio server.
        url (`str`, *optional*):
            Address of an HTTP server.
        headers (`Mapping[str, str]`, *optional*):
            Headers sent with every request to an HTTP server.
        server (`MCPServer`, `Server` or `Callable[[Task | None], MCPServer]`, *optional*):
            Object of an in-process server, or a function that makes one for each trajectory, given its task: an environment of
            one's own, with the start state in its variables. The function is called once without a task (`None`), to list the
            tools. Objects' tools should be `async`: a plain function runs in a thread that cannot be
            interrupted, so a call returns at its deadline but closing the pool waits for the thread.
        isolation (`str`, *optional*, defaults to `"shared"`):
            What trajectories share. `"shared"`: each call goes to the least loaded session; for stateless tools.
            `"exclusive"`: each trajectory gets a session (for stdio, a process) of its own, which is recycled afterwards.
            `"meta"`: sessions are shared, and every call carries the trajectory's id in `_meta` under
            `"mcp_grpo/trajectory_id"`; for servers that keep state by that id.
        pool_size (`int`, *optional*):
            Number of sessions; with `"exclusive"`, how many trajectories can hold one at a time. Defaults to 1, and to 8
            with `"exclusive"`.
        max_trajectories (`int`, *optional*):
            With `"meta"`, how many trajectories may use a session at a time. Others wait for one of them to end, which counts
            as no call's time. Set it where a server keeps only so many states. `None` is no limit.
        spares (`int`, *optional*, defaults to `2`):
            With `"exclusive"`, how many extra sessions are kept ready, so that the next trajectory does not wait for one
            to start.
        reset_tool (`str`, *optional*):
            Tool that makes the server forget the trajectory, called without arguments when it ends. With `"exclusive"`
            the session then serves the next trajectory instead of being closed. It is hidden from the policy.
        state_tool (`str`, *optional*):
            Read-only tool that returns, as JSON, what a trajectory has left behind. It is called without arguments when a
            trajectory has ended, before any reset, and its answer is in [`Trajectory.states`] for reward functions. It is
            hidden from the policy. Not allowed with `"shared"`.
        setup_tool (`str`, *optional*):
            Tool that brings the server into the state in which a task begins. It is called when a trajectory gets its session,
            with the arguments that the task's column `setup` has for this server, if it has any. It is hidden from the policy.
            If it fails, the trajectory does, for no fault of the policy. Not allowed with `"shared"`. With `"meta"` a server
            can do without: every call then carries them in `_meta` under `"mcp_grpo/setup"`.
        user_tools (`tuple[str, ...]`, *optional*):
            Tools that only the user of a conversation may call, by their names on the server. They are hidden from the policy.
        call_timeout (`float`, *optional*, defaults to `30.0`):
            Deadline of one tool call, in seconds. Waiting for one of the `max_inflight` places does not count.
        connect_timeout (`float`, *optional*, defaults to `60.0`):
            Deadline for starting the server and listing its tools, in seconds.
        max_inflight (`int`, *optional*, defaults to `8`):
            Maximum number of concurrent calls per session.
        retries (`int`, *optional*, defaults to `2`):
            How often a call that failed because of the server is retried, within the same deadline. Only idempotent calls
            are retried: those of tools that declare `readOnlyHint` or `idempotentHint`, or are in `idempotent_tools`.
        idempotent_tools (`tuple[str, ...]`, *optional*):
            Further tools that are safe to call twice, by their names on the server.
        read_only_tools (`tuple[str, ...]`, *optional*):
            Further tools that change nothing, by their names on the server, or `("*",)` for all. Calls of one turn run in the
            order in which they are written; those of tools that declare `readOnlyHint`, or are named here, run side by side.
        allowed_tools (`tuple[str, ...]`, *optional*):
            The only tools to offer, by their names on the server. `None` offers all.
        argument_aliases (`Mapping[str, str]`, *optional*):
            Alternative names of arguments, such as `{"python_code": "code"}`, accepted by every tool that has the argument
            and not the alias. The policy is told, and each use is counted.
        coerce_arguments (`bool`, *optional*, defaults to `False`):
            Accept text that clearly spells what the schema asks for (`"3"` for an integer). The policy is told, and each
            use is counted.
        error_patterns (`tuple[str, ...]`, *optional*):
            Regular expressions. A result whose text matches one is a tool error; for servers that do not mark their
            errors.
        max_result_bytes (`int`, *optional*, defaults to `8000000`):
            Largest message accepted from the server. A larger one is dropped, and its call fails.
        protocol (`str`, *optional*, defaults to `"auto"`):
            `"legacy"` skips the probe for the 2026-07-28 protocol, which costs 10 s on servers that ignore it.
        sandbox (`Mapping[str, Any]`, *optional*):
            Runs a stdio server behind walls: it sees the system's programs, itself, its working directory and a home of its
            own, which is empty, and has no network. `{"read": [...], "write": [...]}` shows it more files or folders, and
            `"network"` allows it all (`true`), or TCP to some ports (`[443]`). It needs Linux 6.7 with Landlock; where that
            is missing, the server is not started.
        scratch (`str`, *optional*):
            Folder that a stdio server works on a copy of: each trajectory its own, made when its process starts and removed
            when that ends, so that nothing it writes there stays. A path in `args`, `env` and `cwd` that is this folder, or
            in it, is that of the copy; without `cwd` the copy is the working directory. Policy and server do not notice:
            the copy goes by the folder's own path in calls and results. A relative path starts at the file that
            the server is configured in. Needs isolation `"exclusive"`, without a `reset_tool`.
    """

    name: str
    transport: TransportKind
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    server: MCPServer | Server[Any] | FunctionServer | Callable[..., Any] | None = None
    isolation: Isolation = "shared"
    pool_size: int | None = None
    max_trajectories: int | None = None
    spares: int = 2
    reset_tool: str | None = None
    state_tool: str | None = None
    setup_tool: str | None = None
    user_tools: tuple[str, ...] = ()
    call_timeout: float = 30.0
    connect_timeout: float = 60.0
    max_inflight: int = 8
    retries: int = 2
    idempotent_tools: tuple[str, ...] = ()
    read_only_tools: tuple[str, ...] = ()
    allowed_tools: tuple[str, ...] | None = None
    argument_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    coerce_arguments: bool = False
    error_patterns: tuple[str, ...] = ()
    max_result_bytes: int = 8_000_000
    protocol: Protocol = "auto"
    sandbox: Mapping[str, Any] | None = None
    scratch: str | None = None
    secrets: Mapping[str, str] = field(
        default_factory=dict[str, str]
    )  # variables the file asked for; hidden like `env`
    folder: str | None = None  # of the file it was read from

    def __post_init__(self) -> None:
        if not self.name:
            raise ServerConfigError("A server needs a name, got an empty one. Name it as tasks will refer to it.")
        for option, (rule, is_valid) in _RULES.items():
            if not is_valid(value := getattr(self, option)):
                raise ServerConfigError(f"`{option}` of server {self.name!r} {rule}, got {value!r}.")
        self._check_target()
        for pattern in self.error_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ServerConfigError(
                    f"`error_patterns` of server {self.name!r} must be regular expressions, got {pattern!r}: {error}. "
                    f"Put a backslash before literal characters."
                ) from error
        for option in ("reset_tool", "state_tool", "setup_tool"):
            if getattr(self, option) is not None and self.isolation == "shared":
                raise ServerConfigError(
                    f"`{option}` of server {self.name!r} has no effect with isolation 'shared': no session belongs to one "
                    f"trajectory. Set `isolation` to 'exclusive' or 'meta', or remove `{option}`."
                )
        if self.max_trajectories is not None and self.isolation != "meta":
            raise ServerConfigError(
                f"`max_trajectories` of server {self.name!r} has no effect with isolation {self.isolation!r}. Remove it; with "
                f"'exclusive', `pool_size` is the limit."
            )

    def _check_target(self) -> None:
        if self.transport == "stdio" and not self.command:
            raise ServerConfigError(
                f"The stdio server {self.name!r} has no `command`. Set the program that starts it."
            )
        if self.transport == "http" and not (self.url or "").startswith(("http://", "https://")):
            got = "none" if self.url is None else f"{self.url.partition(':')[0][:20]!r} before the colon"
            raise ServerConfigError(
                f"The HTTP server {self.name!r} needs a `url` that starts with http:// or https://, got {got}."
            )
        if self.transport == "http" and (problem := _url_problem(self.url or "")) is not None:
            raise ServerConfigError(
                f"The `url` of server {self.name!r} is not an address: {problem}. Write it as https://host:port/path."
            )
        if self.sandbox is not None and self.transport != "stdio":
            raise ServerConfigError(
                f"`sandbox` of server {self.name!r} has no effect on one that is not started here. Remove it."
            )
        if self.scratch is not None and self.transport != "stdio":
            raise ServerConfigError(
                f"`scratch` of server {self.name!r} has no effect on one that is not started here. Remove it."
            )
        if self.scratch is not None and (self.isolation != "exclusive" or self.reset_tool is not None):
            raise ServerConfigError(
                f"`scratch` of server {self.name!r} is a copy for each trajectory, which needs `isolation` 'exclusive' and no "
                f"`reset_tool`, got {self.isolation!r} and {self.reset_tool!r}. Set `isolation`, or remove `scratch`."
            )
        if self.transport == "in_process" and not isinstance(self.server, SERVER_OBJECTS):
            if not callable(self.server):
                raise ServerConfigError(
                    f"`server` of server {self.name!r} must be an `MCPServer`, a low-level `Server`, or a function that makes "
                    f"one for a task, got {self.server!r}."
                )
            if self.isolation != "exclusive":
                raise ServerConfigError(
                    f"Server {self.name!r} is made for each trajectory, so its `isolation` must be 'exclusive', got "
                    f"{self.isolation!r}. Leave it out."
                )

    @property
    def is_made_per_task(self) -> bool:
        """Return whether `server` makes an object for each trajectory."""
        return callable(self.server) and not isinstance(self.server, SERVER_OBJECTS)

    def __repr__(self) -> str:
        return f"ServerConfig(name={self.name!r}, transport={self.transport!r}, target={self.target!r})"

    @property
    def num_sessions(self) -> int:
        """Number of sessions kept open, spares included."""
        return self.num_leases + self.spares if self.isolation == "exclusive" else self.pool_size or 1

    @property
    def num_leases(self) -> int:
        """Number of trajectories that can hold an exclusive session at a time."""
        return self.pool_size or DEFAULT_LEASES

    @property
    def target(self) -> str:
        """Command line, address or kind of object for messages: without secrets or query string."""
        if self.transport == "stdio":
            return self.redact(" ".join([self.command or "", *without_secrets(self.args)]))
        if self.transport == "http":
            return self.redact(shown_address(self.url or ""))
        return (
            f"{type(self.server).__name__} object" if not self.is_made_per_task else "object made for each trajectory"
        )

    def redact(self, text: str) -> str:
        """
        Replace every private value in a text for logs and errors: all of `env`, `headers` and expanded variables, the
        secrets in arguments and address, and whatever has the form of a token.
        """
        return without_tokens(hidden(self._private_values, text))

    def shown_error(self, error: BaseException) -> str:
        """Return an error with its traceback for a log, without private values and control characters."""
        return shown_error(error, self._private_values)

    def hide_secrets(self, value: Any) -> Any:
        """
        Replace likely secrets in what a tool returned. Unlike [`redact`] it keeps other values, so that `CITY=Amsterdam` in
        `env` does not remove that city from every result.
        """
        return hidden(self.secret_values, value)

    def without_secrets_in(self, tool: Tool) -> Tool:
        """Return a tool whose description and schema hold no secret; the prompt, files and uploads show them."""
        listed = tool.model_dump(mode="json", by_alias=True, exclude_unset=True)
        cleaned = described_without_secrets(self.secret_values, listed)
        return tool if cleaned == listed else Tool.model_validate(cleaned)

    @cached_property
    def error_regexes(self) -> tuple[re.Pattern[str], ...]:
        """Return the compiled `error_patterns`."""
        return tuple(re.compile(pattern) for pattern in self.error_patterns)

    @cached_property
    def secret_values(self) -> tuple[str, ...]:
        """Likely secrets among headers, `env`, expanded variables, arguments, and in the address."""
        return secret_values(self._variables, self.headers, self.args, self.url or "")

    @cached_property
    def _private_values(self) -> tuple[str, ...]:
        return private_values(self._variables, self.headers, self.args, self.url or "")

    @property
    def _variables(self) -> list[tuple[str, str]]:
        return [*self.env.items(), *self.secrets.items()]


_TARGET = ("name", "transport", "command", "args", "env", "cwd", "url", "headers", "server", "secrets", "folder")
OPTIONS = tuple(field.name for field in fields(ServerConfig) if field.name not in _TARGET)


def _url_problem(url: str) -> str | None:
    """Return what is wrong with an address, without repeating it, since it may hold a secret."""
    try:
        parts = urlsplit(url)
        if not parts.hostname:
            return "it has no host"
        if any(character.isspace() or not character.isprintable() for character in url):
            return "it has a space or a character that cannot be printed"
        if parts.port == 0:
            return "its port is 0"
        httpx2.URL(url)
    except (ValueError, httpx2.InvalidURL):
        return "its host or port cannot be read"
    return None


def is_texts(value: object) -> bool:
    """Return whether a value is a list or tuple of strings."""
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in cast("list[Any]", value))


def is_text_map(value: object) -> bool:
    """Return whether a value maps strings to strings."""
    return isinstance(value, Mapping) and is_texts([*cast("Any", value).keys(), *cast("Any", value).values()])


_Rule = tuple[str, Callable[[Any], bool]]
_SECONDS: _Rule = ("must be a positive number of seconds", lambda value: type(value) in (int, float) and value > 0)
_SIZE: _Rule = ("must be a positive whole number", lambda value: type(value) is int and value >= 1)
_COUNT: _Rule = ("must be a whole number, 0 or more", lambda value: type(value) is int and value >= 0)
_TEXTS: _Rule = (
    "must be a list of strings",
    lambda value: isinstance(value, tuple) and is_texts(cast("object", value)),
)
_TOOL: _Rule = ("must be the name of a tool", lambda value: value is None or (isinstance(value, str) and value != ""))


def _is_sandbox(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    options = cast("Mapping[str, Any]", value)
    network: Any = options.get("network", False)
    is_ports = isinstance(network, (list, tuple)) and all(
        type(port) is int and 0 < port < 1 << 16 for port in cast("list[Any]", network)
    )
    return (
        options.keys() <= {"read", "write", "network"}
        and all(is_texts(options.get(kind, ())) for kind in ("read", "write"))
        and (isinstance(network, bool) or is_ports)
    )


def _or_none(rule: _Rule) -> _Rule:
    return rule[0], lambda value: value is None or rule[1](value)


def _one_of(choices: Any) -> _Rule:
    return f"must be one of {get_args(choices)}", lambda value: value in get_args(choices)


_RULES: dict[str, _Rule] = {
    "transport": _one_of(TransportKind),
    "isolation": _one_of(Isolation),
    "protocol": _one_of(Protocol),
    "call_timeout": _SECONDS,
    "connect_timeout": _SECONDS,
    "max_inflight": _SIZE,
    "max_result_bytes": _SIZE,
    "pool_size": _or_none(_SIZE),
    "max_trajectories": _or_none(_SIZE),
    "spares": _COUNT,
    "retries": _COUNT,
    "idempotent_tools": _TEXTS,
    "read_only_tools": _TEXTS,
    "allowed_tools": _or_none(_TEXTS),
    "error_patterns": _TEXTS,
    "argument_aliases": ('must map strings to strings, such as {"python_code": "code"}', is_text_map),
    "coerce_arguments": ("must be true or false", lambda value: type(value) is bool),
    "reset_tool": _TOOL,
    "state_tool": _TOOL,
    "setup_tool": _TOOL,
    "user_tools": _TEXTS,
    "scratch": (
        "must be the path of a folder",
        lambda value: value is None or (isinstance(value, str) and value != ""),
    ),
    "sandbox": _or_none(
        (
            'must be an object with `"read"` and `"write"`, lists of paths, and `"network"`, true, false or a list of ports',
            _is_sandbox,
        )
    ),
}
