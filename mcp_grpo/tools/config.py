"""Which servers to open: one frozen value per server, read from the files other MCP clients use."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, cast, get_args
from urllib.parse import urlsplit

from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools.secrets import hidden, private_values, secret_values, url_values, without_secrets


TransportKind = Literal["stdio", "http", "in_process"]
Isolation = Literal["shared", "exclusive", "meta"]
Protocol = Literal["auto", "legacy"]

DEFAULT_LEASES = 8


@dataclass(frozen=True, kw_only=True, repr=False)
class ServerConfig:
    """
    How to reach one MCP server, and how it may be used.

    Its `repr` and its error messages never show the values of `env` and `headers`.

    Args:
        name (`str`):
            Name of the server, as tasks name it.
        transport (`str`):
            `"stdio"` (a child process), `"http"` (streamable HTTP) or `"in_process"` (a server object of this process).
        command (`str`, *optional*):
            Program of a stdio server. It is looked up on `PATH` and run as written: for a server that lives in this
            Python environment, pass `sys.executable`, since `"python"` may be another one.
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
        server (`MCPServer` or `Server`, *optional*):
            The object of an in-process server. Its tools should be `async`: a plain function runs in a thread that
            nothing can interrupt, so a call returns at its deadline, but closing the pool waits for the thread.
        isolation (`str`, *optional*, defaults to `"shared"`):
            What trajectories share. `"shared"`: any call goes to the least loaded session; for tools that keep no state.
            `"exclusive"`: a trajectory has a session (for stdio, a process) to itself, which is then recycled. `"meta"`:
            sessions are shared, and every call carries the trajectory's id in `_meta` under
            `"mcp_grpo/trajectory_id"`; for servers that keep state by that id.
        pool_size (`int`, *optional*):
            How many sessions there are; with `"exclusive"`, how many trajectories may have one at a time. Defaults to 1,
            and to 8 with `"exclusive"`.
        spares (`int`, *optional*, defaults to `2`):
            With `"exclusive"`, how many sessions more are kept ready, so that the next trajectory need not wait for one to
            start.
        reset_tool (`str`, *optional*):
            A tool that makes the server forget the trajectory, called without arguments when it ends. With `"exclusive"`
            the session then serves the next one, instead of being ended. The policy is not offered it.
        state_tool (`str`, *optional*):
            A tool that changes nothing and says what a trajectory has left behind, as JSON. It is called without arguments
            when a trajectory has ended, before anything is reset, and what it says is in [`Trajectory.states`] for
            reward functions. The policy is not offered it. Not with `"shared"`.
        call_timeout (`float`, *optional*, defaults to `30.0`):
            Deadline of one tool call, in seconds. Waiting for one of the `max_inflight` places does not count.
        connect_timeout (`float`, *optional*, defaults to `60.0`):
            Deadline for starting the server and listing its tools, in seconds.
        max_inflight (`int`, *optional*, defaults to `8`):
            How many calls each session is given at a time.
        retries (`int`, *optional*, defaults to `2`):
            How often a call that a server failed is sent again, within the same deadline. Only a call that does no harm
            twice is: of a tool that says so itself (`readOnlyHint`, `idempotentHint`), or of one in `idempotent_tools`.
        idempotent_tools (`tuple[str, ...]`, *optional*):
            Tools that may be called twice, by their names on the server, beside those that say so themselves.
        allowed_tools (`tuple[str, ...]`, *optional*):
            The only tools that are offered, by their names on the server. `None` offers all.
        argument_aliases (`Mapping[str, str]`, *optional*):
            Names that are taken for an argument, such as `{"python_code": "code"}`, in every tool that has the argument
            and not the alias. The policy is told, and it is counted.
        coerce_arguments (`bool`, *optional*, defaults to `False`):
            Whether a text that plainly spells what the schema asks for (`"3"` for an integer) is taken for it. The policy
            is told, and it is counted.
        error_patterns (`tuple[str, ...]`, *optional*):
            Regular expressions. A result whose text one of them finds is an error of the tool, for servers that do not
            mark their errors.
        max_result_bytes (`int`, *optional*, defaults to `8000000`):
            Largest message accepted from the server. A larger one is dropped, and the call that asked for it fails.
        protocol (`str`, *optional*, defaults to `"auto"`):
            `"legacy"` skips the probe for the 2026-07-28 protocol, which costs 10 s on servers that ignore it.
    """

    name: str
    transport: TransportKind
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    server: MCPServer | Server[Any] | None = None
    isolation: Isolation = "shared"
    pool_size: int | None = None
    spares: int = 2
    reset_tool: str | None = None
    state_tool: str | None = None
    call_timeout: float = 30.0
    connect_timeout: float = 60.0
    max_inflight: int = 8
    retries: int = 2
    idempotent_tools: tuple[str, ...] = ()
    allowed_tools: tuple[str, ...] | None = None
    argument_aliases: Mapping[str, str] = field(default_factory=dict[str, str])
    coerce_arguments: bool = False
    error_patterns: tuple[str, ...] = ()
    max_result_bytes: int = 8_000_000
    protocol: Protocol = "auto"
    secrets: Mapping[str, str] = field(default_factory=dict[str, str])
    """Variables that the file asked for, and their values; hidden like those of `env`."""
    folder: str | None = None
    """Folder of the file that it was read from."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ServerConfigError("A server needs a name, got an empty one. Name it as tasks will name it.")
        self._check_target()
        self._check_options()

    def _check_target(self) -> None:
        if self.transport not in get_args(TransportKind):
            self._refuse("transport", f"must be one of {get_args(TransportKind)}", self.transport)
        if self.transport == "stdio" and not self.command:
            raise ServerConfigError(f"The stdio server {self.name!r} has no `command`. Say which program starts it.")
        if self.transport == "http" and not (self.url or "").startswith(("http://", "https://")):
            got = urlsplit(self.url).scheme if self.url else None
            raise ServerConfigError(
                f"The HTTP server {self.name!r} needs a `url` that starts with http:// or https://, "
                f"got {'none' if self.url is None else f'scheme {got!r}'}."
            )
        if self.transport == "in_process" and not isinstance(self.server, (MCPServer, Server)):
            self._refuse("server", "must be an `MCPServer` or a low-level `Server`", self.server)

    def _check_options(self) -> None:
        self._check_numbers()
        for option, choices in (("isolation", get_args(Isolation)), ("protocol", get_args(Protocol))):
            if (value := getattr(self, option)) not in choices:
                self._refuse(option, f"must be one of {choices}", value)
        for option in ("allowed_tools", "idempotent_tools", "error_patterns"):
            if (value := getattr(self, option)) is not None and not is_texts(value, tuple):
                self._refuse(option, "must be a list of texts", value)
        if not is_text_map(self.argument_aliases):
            rule = 'must map texts to texts, such as {"python_code": "code"}'
            self._refuse("argument_aliases", rule, self.argument_aliases)
        if type(self.coerce_arguments) is not bool:
            self._refuse("coerce_arguments", "must be true or false", self.coerce_arguments)
        self._check_patterns()
        for option in ("reset_tool", "state_tool"):
            self._check_hidden_tool(option, getattr(self, option))

    def _check_numbers(self) -> None:
        for option in ("call_timeout", "connect_timeout"):
            if not _is_number(value := getattr(self, option)) or not value > 0:
                self._refuse(option, "must be a positive number of seconds", value)
        sizes = ["max_inflight", "max_result_bytes"] + ["pool_size"] * (self.pool_size is not None)
        for option in sizes:
            if not _is_whole(value := getattr(self, option)) or value < 1:
                self._refuse(option, "must be a positive whole number", value)
        for option in ("spares", "retries"):
            if not _is_whole(value := getattr(self, option)) or value < 0:
                self._refuse(option, "must be a whole number, 0 or more", value)

    def _check_patterns(self) -> None:
        for pattern in self.error_patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ServerConfigError(
                    f"`error_patterns` of server {self.name!r} must be regular expressions, got {pattern!r}: {error}. "
                    f"Put a backslash before what is meant literally."
                ) from error

    def _check_hidden_tool(self, option: str, value: str | None) -> None:
        if value is None:
            return
        if not is_texts([value]) or not value:
            self._refuse(option, "must be the name of a tool", value)
        if self.isolation == "shared":
            raise ServerConfigError(
                f"`{option}` of server {self.name!r} is of no use with isolation 'shared': no session belongs to one "
                f"trajectory. Set `isolation` to 'exclusive' or 'meta', or leave `{option}` out."
            )

    def _refuse(self, option: str, rule: str, value: object) -> None:
        raise ServerConfigError(f"`{option}` of server {self.name!r} {rule}, got {value!r}.")

    def __repr__(self) -> str:
        return f"ServerConfig(name={self.name!r}, transport={self.transport!r}, target={self.target!r})"

    @property
    def num_sessions(self) -> int:
        """How many sessions are kept open, spares included."""
        if self.isolation == "exclusive":
            return self.num_leases + self.spares
        return self.pool_size or 1

    @property
    def num_leases(self) -> int:
        """How many trajectories may have an exclusive session at a time."""
        return self.pool_size or DEFAULT_LEASES

    @property
    def target(self) -> str:
        """The command line, the address or the object, fit to be shown: no secrets, no query string."""
        if self.transport == "stdio":
            return self.redact(" ".join([self.command or "", *without_secrets(self.args)]))
        if self.transport == "http":
            parts = urlsplit(self.url or "")
            return self.redact(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")
        return f"{type(self.server).__name__} object"

    def redact(self, text: str) -> str:
        """
        Hide this server's secrets in a text that comes from outside, such as its error output.

        Args:
            text (`str`):
                Any text.

        Returns:
            `str`: The text, with `***` in place of every value of `env` and `headers` and of every value that was
            taken from the environment. Short values and existing paths are no secrets and stay.
        """
        return hidden(self._private_values, text)

    def hide_secrets(self, value: Any) -> Any:
        """
        Hide this server's secrets in what a tool returned. Unlike [`redact`] it leaves what is probably none, so that
        `CITY=Amsterdam` in `env` does not take that city out of every result.

        Args:
            value (`Any`):
                A text, or JSON with texts in it.

        Returns:
            `Any`: The same, with `***` in place of the values of `headers`, and of those values of `env` and of the
            environment whose name speaks of a secret (`key`, `token`, `pass`, ...) or that hold a password.
        """
        return hidden(self.secret_values, value)

    @cached_property
    def error_regexes(self) -> tuple[re.Pattern[str], ...]:
        """The `error_patterns`, compiled."""
        return tuple(re.compile(pattern) for pattern in self.error_patterns)

    @cached_property
    def _private_values(self) -> tuple[str, ...]:
        return private_values([*self.env.items(), *self.secrets.items(), *url_values(self.url or "")], self.headers)

    @cached_property
    def secret_values(self) -> tuple[str, ...]:
        """What is probably a secret among `headers`, `env` and the values that were taken from the environment."""
        return secret_values([*self.env.items(), *self.secrets.items(), *url_values(self.url or "")], self.headers)


OPTIONS = (
    "isolation",
    "pool_size",
    "spares",
    "reset_tool",
    "state_tool",
    "call_timeout",
    "connect_timeout",
    "max_inflight",
    "retries",
    "idempotent_tools",
    "allowed_tools",
    "argument_aliases",
    "coerce_arguments",
    "error_patterns",
    "max_result_bytes",
    "protocol",
)
assert set(OPTIONS) <= {f.name for f in fields(ServerConfig)}


def is_texts(value: object, kind: type[Sequence[Any]] = Sequence) -> bool:
    """Whether a value is a sequence of strings, and not one string."""
    if isinstance(value, str) or not isinstance(value, kind):
        return False
    return all(isinstance(item, str) for item in cast(Sequence[Any], value))


def is_text_map(value: object) -> bool:
    """Whether a value maps strings to strings."""
    if not isinstance(value, Mapping):
        return False
    pairs = cast(Mapping[Any, Any], value)
    return is_texts([*pairs.keys(), *pairs.values()])


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def resolved_cwd(cwd: str | None, folder: Path | None) -> str | None:
    """The working directory; a relative one starts at the folder of the configuration file."""
    return cwd if cwd is None or folder is None else str(folder / cwd)
