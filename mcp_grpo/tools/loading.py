"""Reads server configurations: the `mcpServers` files of other MCP clients, dictionaries, and server objects."""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from mcp.server import Server
from mcp.server.mcpserver import MCPServer

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools.config import OPTIONS, ServerConfig, TransportKind, is_text_map, is_texts, resolved_cwd
from mcp_grpo.tools.variables import Expander, UnsetVariableError, read_variables, variables_for


logger = logging.getLogger(__name__)

OPTIONS_KEY = "x-mcp-grpo"  # our options share one key, so that the same file works in other clients

_TRANSPORTS: Mapping[str, TransportKind] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamablehttp": "http",
}

Servers = str | Path | Mapping[str, Any] | Sequence[ServerConfig]


def load_servers(servers: Servers) -> tuple[ServerConfig, ...]:
    """
    Read server configurations.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `Sequence[ServerConfig]`):
            Path to a JSON file, or its content: `{"mcpServers": {name: entry}}`, VS Code's `{"servers": {...}}`, or a
            bare map from name to entry. An entry has `command`, `args`, `env` and `cwd`, or `url` and `headers`, and
            optionally `type` (or `transport`); it may also be an `MCPServer` object, to be run in this process.
            `${VAR}`, `${VAR:-default}` and `${env:VAR}` are expanded in these fields, from the environment, then from files
            `.env` beside the JSON file, in the working directory and in the folders above that. A variable in `env` that
            is `${VAR:-}` is left out where `VAR` is not set. `envFile` names a file of more variables for a stdio server;
            those in `env` come first. Our own options are under the key `"x-mcp-grpo"`; other unknown keys are left to the
            clients they are meant for. An entry with `"disabled": true` is skipped. Configurations that are already read
            pass through.

    Returns:
        `tuple[ServerConfig, ...]`: One configuration per server, in the order of the file.

    Example:

    ```python
    load_servers(
        {
            "mcpServers": {
                "time": {"command": "uvx", "args": ["mcp-server-time"]},
                "web": {
                    "type": "http",
                    "url": "https://example.com/mcp",
                    "headers": {"Authorization": "Bearer ${TOKEN}"},
                    "x-mcp-grpo": {"call_timeout": 10, "allowed_tools": ["search"]},
                },
            }
        }
    )
    ```
    """
    if isinstance(servers, (str, Path)):
        path = Path(servers)
        configs = _read_entries(_entries(_read_json(path), str(path)), folder=path.absolute().parent)
    elif isinstance(servers, Mapping):
        configs = _read_entries(_entries(servers, "the configuration"), folder=None)
    else:
        configs = _checked_sequence(servers)
    if not configs:
        raise ServerConfigError("No server is configured: there is none, or all are disabled. Add or enable one.")
    return configs


def _checked_sequence(servers: Sequence[ServerConfig]) -> tuple[ServerConfig, ...]:
    items: tuple[Any, ...] = tuple(servers)
    for item in items:
        if not isinstance(item, ServerConfig):
            raise ServerConfigError(
                f"Servers must be a path, a dictionary or a list of `ServerConfig`, got a list with "
                f"{type(cast(object, item)).__name__}. "
                f"To name a server object, pass a dictionary: {{'name': server}}."
            )
    names = [config.name for config in items]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ServerConfigError(f"Server names must differ, got {repeated} more than once. Rename one of each.")
    return items


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ServerConfigError(
            f"The server configuration {str(path)!r} cannot be read: {error.strerror}. Check the path."
        ) from error
    except ValueError as error:
        raise ServerConfigError(
            f"The server configuration {str(path)!r} is not JSON: {error}. Comments and trailing commas are not allowed."
        ) from error
    if not isinstance(content, dict):
        raise ServerConfigError(
            f"The server configuration {str(path)!r} must hold an object, got {type(content).__name__}. "
            f'Write {{"mcpServers": {{...}}}}.'
        )
    return cast(dict[str, Any], content)


def _entries(content: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The map from name to entry inside the file's outer form."""
    entries, inner = content, cast(Any, content.get("servers"))
    if "mcpServers" in content:
        entries = content["mcpServers"]
    elif isinstance(inner, Mapping) and not {"command", "url"} & inner.keys():
        entries = cast(Any, inner)  # VS Code's form; with a command or a URL it is a server that is called "servers"
    if not isinstance(entries, Mapping):
        raise ServerConfigError(
            f"`mcpServers` of {where} must map names to servers, got {type(entries).__name__}. "
            f'Write {{"mcpServers": {{"name": {{"command": ...}}}}}}.'
        )
    return cast(Mapping[str, Any], entries)


def _read_entries(entries: Mapping[str, Any], folder: Path | None) -> tuple[ServerConfig, ...]:
    variables = variables_for(folder)
    configs: list[ServerConfig] = []
    unset: list[str] = []  # of all servers: one would not like to be told of one key after another
    for name, entry in entries.items():
        try:
            config = _read_entry(name, entry, variables, folder)
        except UnsetVariableError as error:
            unset.append(str(error))
        else:
            configs += [] if config is None else [config]
    if unset:
        raise UnsetVariableError("\n".join(unset))
    return tuple(configs)


def _read_entry(name: str, entry: Any, variables: Mapping[str, str], folder: Path | None) -> ServerConfig | None:
    if isinstance(entry, (MCPServer, Server)):
        return ServerConfig(name=name, transport="in_process", server=cast(Any, entry))
    if not isinstance(entry, Mapping):
        raise ServerConfigError(
            f"The entry of server {name!r} must be an object or an `MCPServer`, got {type(entry).__name__}. "
            f'Write {{"command": ...}} or {{"url": ...}}.'
        )
    fields = cast(Mapping[str, Any], entry)
    if fields.get("disabled") is True:
        return None
    options = _options(name, fields.get(OPTIONS_KEY, {}))
    if misplaced := [f"`{key}`" for key in fields if key in OPTIONS]:
        logger.warning(
            "%s of server %r has no effect where it stands. Our options are under `%s`, so that other clients can read the "
            "same file.",
            ", ".join(misplaced),
            name,
            OPTIONS_KEY,
        )
    transport = _transport(name, fields)
    if transport == "in_process":
        return ServerConfig(name=name, transport=transport, server=fields["server"], **options)
    expand = Expander(name, variables, folder)
    read = _read_address(name, fields, expand) if transport == "http" else _read_command(name, fields, expand, folder)
    return ServerConfig(name=name, transport=transport, secrets=expand.values, **read, **options)


def _read_address(name: str, fields: Mapping[str, Any], expand: Expander) -> dict[str, Any]:
    url = expand(_text(name, fields, "url"), "url")
    headers = {key: expand(value, "headers") for key, value in _texts(name, fields, "headers").items()}
    expand.check()
    return {"url": url, "headers": headers}


def _read_command(name: str, fields: Mapping[str, Any], expand: Expander, folder: Path | None) -> dict[str, Any]:
    args: Any = fields.get("args", [])
    if not is_texts(args):
        # Only what is wrong is shown: the rest may hold secrets.
        wrong = (
            [arg for arg in cast("list[Any]", args) if not isinstance(arg, str)] if isinstance(args, list) else None
        )
        got = f"a {type(cast(object, args)).__name__}" if wrong is None else f"{wrong} in it"
        raise ServerConfigError(f"`args` of server {name!r} must be a list of strings, got {got}. Quote numbers.")
    command = expand(_text(name, fields, "command"), "command")
    args = tuple(expand(arg, "args") for arg in args)
    given = _texts(name, fields, "env")
    env = {key: expand(value, "env") for key, value in given.items() if not expand.leaves_out(value)}
    cwd, env_file = (
        expand(_text(name, fields, key), key) if fields.get(key) is not None else None for key in ("cwd", "envFile")
    )
    expand.check()
    if env_file is not None:
        env = read_variables((folder or Path()) / env_file, f"`envFile` of server {name!r}") | env
    home = None if folder is None else str(folder)
    return {"command": command, "args": args, "env": env, "cwd": resolved_cwd(cwd, folder), "folder": home}


def _transport(name: str, fields: Mapping[str, Any]) -> TransportKind:
    """What the entry says it is, or else what it looks like."""
    given = fields.get("type", fields.get("transport"))
    if given is not None:
        kind = _TRANSPORTS.get(str(given).lower())
        if kind is None:
            hint = " The old SSE transport is not supported; most servers also offer `http`." if given == "sse" else ""
            raise ServerConfigError(
                f"`type` of server {name!r} must be one of {sorted(set(_TRANSPORTS))}, got {given!r}.{hint}"
            )
        return kind
    keys: Mapping[str, TransportKind] = {"command": "stdio", "url": "http", "server": "in_process"}
    present = [key for key in keys if key in fields]
    if len(present) != 1:
        raise ServerConfigError(
            f"The entry of server {name!r} needs either `command` or `url`, got {present or sorted(fields)}. "
            f"Keep the one that is meant, or say which with `type`."
        )
    return keys[present[0]]


def _options(name: str, options: Any) -> dict[str, Any]:
    if not isinstance(options, Mapping):
        raise ServerConfigError(f"`{OPTIONS_KEY}` of server {name!r} must be an object, got {options!r}.")
    read = dict(cast(Mapping[str, Any], options))
    for option in read:
        if option not in OPTIONS:
            near = difflib.get_close_matches(option, OPTIONS, n=1, cutoff=0.5)
            hint = f"Did you mean `{near[0]}`?" if near else f"The options are {list(OPTIONS)}."
            raise ServerConfigError(f"`{OPTIONS_KEY}` of server {name!r} has no option {option!r}. {hint}")
    return {option: tuple(cast("list[Any]", v)) if isinstance(v, list) else v for option, v in read.items()}


def _text(name: str, fields: Mapping[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value:
        raise ServerConfigError(f"`{key}` of server {name!r} must be a text that is not empty, got {value!r}.")
    return value


def _texts(name: str, fields: Mapping[str, Any], key: str) -> Mapping[str, str]:
    values: Any = fields.get(key) or {}
    if not is_text_map(values):
        # The values stay out of the message: they are often secrets.
        got = list(cast(Mapping[Any, Any], values)) if isinstance(values, Mapping) else type(values).__name__
        raise ServerConfigError(
            f"`{key}` of server {name!r} must map names to strings, got {got}. Quote numbers and booleans."
        )
    return cast(Mapping[str, str], values)
