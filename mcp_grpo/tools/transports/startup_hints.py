"""Explain why a stdio server does not start, from its configuration and what it wrote to stderr."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from mcp.client.stdio import get_default_environment

from mcp_grpo.tools.config import ServerConfig
from mcp_grpo.tools.config_files import ENV_FILE, variables_for


OWN_ENVIRONMENT = (
    "Give the server an environment of its own: let `uvx` or `npx` start it, or give the full path of the `python` of a "
    "virtual environment as its `command`."
)

_SCRIPTS = (".py", ".pyz", ".js", ".mjs", ".cjs", ".ts", ".mts", ".sh", ".rb", ".php", ".jar")
_WANTED = re.compile(
    "not set|unset|n't set|must be set|must set|please set|set the|missing|required|not provided|not defined|undefined|"
    "is empty|environment variable|env var",
    re.IGNORECASE,
)
_NAME = re.compile(r"\b[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*\b")
_NO_VARIABLE = re.compile("^ERR_|ERROR|_NOT_|FAILED|INVALID")  # error codes, which look like variables
_KEY_ERROR = re.compile(r"^KeyError: '(\w+)'$", re.MULTILINE)
_REQUIRED_FIELD = re.compile(r"^(\w+)\n +Field required", re.MULTILINE)  # of settings that pydantic reads
_READS_ENVIRONMENT = re.compile(r"<frozen os>|environ")
_NO_MODULE = re.compile(r"No module named '?([\w.]+\w)")
_OLD_SERVERS = "mcp_grpo.servers"  # where the desk's servers were
_OLD_MCP = re.compile(
    r"No module named 'mcp\.server\.fastmcp|cannot import name '\w+' from 'mcp\b|"
    r"'Server' object has no attribute '(?:list|call|get|read|set|subscribe|unsubscribe)_?\w*'"
)


def start_hints(config: ServerConfig, stderr: str) -> list[str]:
    """Return what to change for each cause that the error output of a server shows."""
    hints = [*_variable_hints(config, stderr)]
    for arg in config.args:
        # Not `@scope/package@1.0` or `module.name`, and only what the server complains about.
        is_script = arg.endswith(_SCRIPTS) or arg.startswith(("./", "../"))
        if is_script and "://" not in arg and os.path.basename(arg) in stderr:
            hint = missing_file_hint(config, arg)
            hints += [hint] if hint else []
    return [*hints, *_module_hints(config, stderr)]


def missing_file_hint(config: ServerConfig, path: str) -> str | None:
    """Return where a relative path was looked for and what to write instead, if there is no such file."""
    searched = Path(config.cwd or os.getcwd()).absolute()
    if os.path.isabs(path) or (searched / path).exists():
        return None
    which = "the working directory of this process" if config.cwd is None else "the `cwd` of its entry"
    hint = f"{path!r} was looked for in {str(searched)!r}, {which}, and is not there."
    home = None if config.folder is None else Path(config.folder).resolve()
    if home is not None and (home / path).exists():
        return (
            f'{hint} It is next to the configuration file: write `"cwd": "."` into the entry, which stands for the '
            f"folder of the file ({str(home)!r})."
        )
    if (here := Path.cwd() / path).exists():
        return f"{hint} It is in the working directory of this process: give its full path, {str(here)!r}."
    start = "" if home is None else f" (a relative one starts at {str(home)!r}, where the configuration file is)"
    return f"{hint} Give its full path, or its folder as `cwd`{start}."


def _variable_hints(config: ServerConfig, stderr: str) -> Iterator[str]:
    ours = variables_for(None if config.folder is None else Path(config.folder))
    theirs = get_default_environment() | dict(config.env)
    passed_on: list[str] = []
    for name in dict.fromkeys(_wanted_names(stderr, ours)):
        if theirs.get(name):
            continue
        if ours.get(name):
            passed_on.append(name)
        elif name in config.env:
            yield f"Its entry gives it the environment variable {name}, but that is empty. Set it to a value."
        else:
            yield (
                f"It seems to need the environment variable {name}, which is not set. Export it (`export {name}=...`) or "
                f"write it into a file `{ENV_FILE}`, and pass it on in its entry: {_env_line([name])}"
            )
    if passed_on:
        is_one = len(passed_on) == 1
        yield (
            f"The environment variable{'' if is_one else 's'} {' and '.join(passed_on)} {'is' if is_one else 'are'} set, but "
            f"a server only gets what its entry names. Add to the entry: {_env_line(passed_on)}"
        )


def _wanted_names(stderr: str, ours: Mapping[str, str]) -> Iterator[str]:
    """Yield the likely names of variables that the server misses; unknown ones must look like a variable."""
    for line in filter(_WANTED.search, stderr.splitlines()):
        for name in _NAME.findall(line):
            if name in ours or ("_" in name and not _NO_VARIABLE.search(name)):
                yield name
    for name in _KEY_ERROR.findall(stderr):
        if name in ours or _READS_ENVIRONMENT.search(stderr):
            yield name
    for field in _REQUIRED_FIELD.findall(stderr):
        if field.upper() in ours:
            yield field.upper()


def _env_line(names: list[str]) -> str:
    return f'`"env": {json.dumps({name: f"${{{name}}}" for name in names})}`'


def _module_hints(config: ServerConfig, stderr: str) -> Iterator[str]:
    if _OLD_MCP.search(stderr):
        yield (
            f"It is written for version 1 of the package `mcp`, and the Python that runs it has version 2, which this library "
            f"needs: do not install `mcp<2` here. {OWN_ENVIRONMENT}"
        )
    elif found := _NO_MODULE.search(stderr):
        module = found[1].partition(".")[0]
        if found[1].startswith(_OLD_SERVERS):
            old = next((arg for arg in config.args if arg.startswith(_OLD_SERVERS)), found[1])
            yield f"The module has moved: write `{old.replace(_OLD_SERVERS, 'mcp_grpo.desk.servers', 1)}` for `{old}`."
        elif module == "mcp_grpo":
            yield "Its Python does not have this library. Write the file again, with `mcp-grpo desk`, where you train."
        else:
            yield f"The Python that runs it has no module {module!r}. {OWN_ENVIRONMENT}"
