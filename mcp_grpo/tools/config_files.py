"""Load server configurations: the `mcpServers` files of other MCP clients, dictionaries, and server objects."""

import difflib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dotenv import dotenv_values

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools.config import OPTIONS, SERVER_OBJECTS, ServerConfig, TransportKind, is_text_map, is_texts
from mcp_grpo.tools.secrets import is_secret_name


logger = logging.getLogger(__name__)

OPTIONS_KEY = "x-mcp-grpo"  # our options share one key, so that the same file works in other clients
ENV_FILE = ".env"

_TRANSPORTS: Mapping[str, TransportKind] = {
    "stdio": "stdio",
    "http": "http",
    "streamable-http": "http",
    "streamable_http": "http",
    "streamablehttp": "http",
}
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}|\$\{((?:command|config|input):[^}]*)\}")
_OPTIONAL = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*):-\}")
_FOLDER = "workspaceFolder"  # what editors call the folder a configuration belongs to

Servers = str | Path | Mapping[str, Any] | Sequence[ServerConfig]


def load_servers(servers: Servers) -> tuple[ServerConfig, ...]:
    """
    Load server configurations.

    Args:
        servers (`str`, `Path`, `Mapping[str, Any]` or `Sequence[ServerConfig]`):
            Path to a JSON file, or its content: `{"mcpServers": {name: entry}}`, VS Code's `{"servers": {...}}`, or a
            plain map from name to entry. An entry has `command`, `args`, `env` and `cwd`, or `url` and `headers`, and
            optionally `type` (or `transport`); it may also be an `MCPServer` object, to run in this process.
            `${VAR}`, `${VAR:-default}` and `${env:VAR}` are expanded in these fields: from the environment, then from
            `.env` files next to the JSON file, in the working directory and in its parents. A variable in `env` that is
            `${VAR:-}` is omitted where `VAR` is not set. `envFile` names a file with more variables for a stdio server;
            those in `env` take precedence. Options of this library are under the key `"x-mcp-grpo"`; other unknown keys
            are ignored. An entry with `"disabled": true` is skipped. [`ServerConfig`] objects pass through.

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


class UnsetVariableError(ServerConfigError):
    """A configuration that asks for variables that are not set."""


class Expander:
    """Expands variables in one server's entry; `values` holds those it used."""

    def __init__(self, server: str, variables: Mapping[str, str], folder: Path | None) -> None:
        self._server = server
        self._variables = variables
        self._folder = folder
        self._unset: dict[str, str] = {}  # name to the field that asks for it
        self.values: dict[str, str] = {}

    def __call__(self, text: str, where: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default, other = match.groups()
            if other is not None:
                raise ServerConfigError(
                    f"`{where}` of server {self._server!r} asks for `${{{other}}}`, which only editors can expand. "
                    f"Use an environment variable: `${{NAME}}`, `${{NAME:-default}}` or `${{env:NAME}}`."
                )
            if name == _FOLDER and self._folder is not None:
                return str(self._folder)
            found = self._variables.get(name)
            if default is not None and not found:  # as in a shell, an empty variable takes the default too
                return default
            if found is None:
                self._unset.setdefault(name, where)
                return ""
            self.values[name] = found
            return found

        return _VARIABLE.sub(value, text)

    def leaves_out(self, text: str) -> bool:
        """Return whether a value is just `${VAR:-}` with `VAR` unset. Setting it empty would override other variables."""
        match = _OPTIONAL.fullmatch(text)
        return match is not None and match[1] not in self._variables

    def check(self) -> None:
        """Raise [`UnsetVariableError`] if a variable without a default is not set."""
        if not self._unset:
            return
        file = (self._folder or Path.cwd()).resolve() / ENV_FILE
        raise UnsetVariableError(
            "\n".join(
                f"`{where}` of server {self._server!r} asks for the environment variable {name!r}, which is not set. "
                f"Export it (`export {name}=...`), or write it into {str(file)!r} as `{name}=...`"
                + ("." if is_secret_name(name) else f", or give a default: `${{{name}:-default}}`.")
                for name, where in self._unset.items()
            )
        )


def variables_for(folder: Path | None) -> dict[str, str]:
    """Collect the environment and, below it, the `.env` files of the folder, the working directory and its parents."""
    found = dict(os.environ)
    if folder is not None and (file := folder / ENV_FILE).is_file():
        found = _read_variables(file, "The file") | found
    for file in _env_files_here_and_above():
        try:
            found = _read_variables(file, "The file") | found
        except ServerConfigError as error:  # it may belong to another project
            logger.warning("%s Its variables are not used.", error)
    return found


def _env_files_here_and_above() -> Iterator[Path]:
    try:
        here = Path.cwd()
        owners = {os.getuid(), here.stat().st_uid}
    except OSError:  # it was removed
        return
    for place in (here, *here.parents):
        file = place / ENV_FILE
        try:
            # In a folder that many may write to, such as /tmp, do not trust another user's file.
            if file.is_file() and (place == here or file.stat().st_uid in owners):
                yield file
        except OSError:  # a parent that may not be read
            continue


def _read_variables(path: Path, what: str) -> dict[str, str]:
    try:
        with path.open(encoding="utf-8") as text:
            read = dotenv_values(stream=text, interpolate=False)
    except OSError as error:
        raise ServerConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise ServerConfigError(f"{what} {str(path)!r} is not text in UTF-8. Save it as such.") from error
    return {name: value for name, value in read.items() if value is not None}


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
    """Return the map from name to entry inside the outer form of the file."""
    entries, inner = content, cast(Any, content.get("servers"))
    if "mcpServers" in content:
        entries = content["mcpServers"]
    elif isinstance(inner, Mapping) and not {"command", "url"} & inner.keys():
        entries = cast(Any, inner)  # VS Code's form; with a command or a URL it is a server named "servers"
    if not isinstance(entries, Mapping):
        raise ServerConfigError(
            f"`mcpServers` of {where} must map names to servers, got {type(entries).__name__}. "
            f'Write {{"mcpServers": {{"name": {{"command": ...}}}}}}.'
        )
    return cast(Mapping[str, Any], entries)


def _read_entries(entries: Mapping[str, Any], folder: Path | None) -> tuple[ServerConfig, ...]:
    variables = variables_for(folder)
    configs: list[ServerConfig] = []
    unset: list[str] = []  # of all servers, to report them at once
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
    if isinstance(entry, SERVER_OBJECTS):
        return ServerConfig(name=name, transport="in_process", server=cast(Any, entry))
    if _is_factory(entry):
        return ServerConfig(name=name, transport="in_process", server=entry, isolation="exclusive")
    if not isinstance(entry, Mapping):
        raise ServerConfigError(
            f"The entry of server {name!r} must be an object, an `MCPServer` or a function that makes one, got {type(entry).__name__}. "
            f'Write {{"command": ...}} or {{"url": ...}}.'
        )
    fields = cast(Mapping[str, Any], entry)
    if fields.get("disabled") is True:
        return None
    options = _options(name, fields.get(OPTIONS_KEY, {}))
    if misplaced := [f"`{key}`" for key in fields if key in OPTIONS]:
        logger.warning(
            "%s of server %r has no effect there. Move it under `%s`, which other clients ignore.",
            ", ".join(misplaced),
            name,
            OPTIONS_KEY,
        )
    transport = _transport(name, fields)
    if transport == "in_process":
        server: Any = fields["server"]
        if _is_factory(server):
            options.setdefault("isolation", "exclusive")
        return ServerConfig(name=name, transport=transport, server=server, **options)
    expand = Expander(name, variables, folder)
    read = _read_address(name, fields, expand) if transport == "http" else _read_command(name, fields, expand, folder)
    return ServerConfig(name=name, transport=transport, secrets=expand.values, **read, **options)


def _is_factory(entry: Any) -> bool:
    """Return whether an entry is a function that makes a server."""
    return callable(entry) and not isinstance(entry, (*SERVER_OBJECTS, type))


def _read_address(name: str, fields: Mapping[str, Any], expand: Expander) -> dict[str, Any]:
    url = expand(_text(name, fields, "url"), "url")
    headers = {key: expand(value, "headers") for key, value in _texts(name, fields, "headers").items()}
    expand.check()
    return {"url": url, "headers": headers}


def _read_command(name: str, fields: Mapping[str, Any], expand: Expander, folder: Path | None) -> dict[str, Any]:
    args: Any = fields.get("args", [])
    if not is_texts(args):
        # Only what is wrong is shown: the rest may hold secrets.
        got = f"a {type(args).__name__}"
        if isinstance(args, list):
            got = f"{[arg for arg in cast('list[Any]', args) if not isinstance(arg, str)]} in it"
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
        env = _read_variables((folder or Path()) / env_file, f"`envFile` of server {name!r}") | env
    if folder is not None:  # which a relative `cwd` starts at
        cwd = cwd and str(folder / cwd)
    return {"command": command, "args": args, "env": env, "cwd": cwd, "folder": folder and str(folder)}


def _transport(name: str, fields: Mapping[str, Any]) -> TransportKind:
    """Return the declared transport, or else infer it from the keys."""
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
            f"Keep one, or choose with `type`."
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
        raise ServerConfigError(f"`{key}` of server {name!r} must be a non-empty string, got {value!r}.")
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
