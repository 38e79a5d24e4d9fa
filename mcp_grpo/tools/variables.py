"""Variables in server configurations: where they come from, and how they are filled in."""

import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from dotenv import dotenv_values

from mcp_grpo.errors import ServerConfigError
from mcp_grpo.tools.secrets import is_secret_name


logger = logging.getLogger(__name__)

FILE_NAME = ".env"
_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}|\$\{((?:command|config|input):[^}]*)\}")
_OPTIONAL = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*):-\}")
_FOLDER = "workspaceFolder"  # what editors call the folder that a configuration belongs to


class UnsetVariableError(ServerConfigError):
    """A configuration that asks for variables that are not set."""


class Expander:
    """
    Replaces `${VAR}`, `${VAR:-default}` and `${env:VAR}` by their values, and remembers which those were.

    Args:
        server (`str`):
            Name of the server, for messages.
        variables (`Mapping[str, str]`):
            The values, from [`variables_for`].
        folder (`Path`, *optional*):
            Folder of the configuration file, which `${workspaceFolder}` stands for.
    """

    def __init__(self, server: str, variables: Mapping[str, str], folder: Path | None) -> None:
        self._server = server
        self._variables = variables
        self._folder = folder
        self._unset: dict[str, str] = {}  # where each was asked for, by name
        self.values: dict[str, str] = {}

    def __call__(self, text: str, where: str) -> str:
        def value(match: re.Match[str]) -> str:
            name, default, other = match.groups()
            if other is not None:
                raise ServerConfigError(
                    f"`{where}` of server {self._server!r} asks for `${{{other}}}`, which only editors can fill in. "
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
        """
        Tell whether a variable of a server is not to be set at all.

        Args:
            text (`str`):
                Its value, before it is expanded.

        Returns:
            `bool`: Whether it is `${VAR:-}` and nothing else, and there is no such variable. An empty text is not the same:
            an empty `https_proxy` overrules `HTTPS_PROXY`.
        """
        match = _OPTIONAL.fullmatch(text)
        return match is not None and match[1] not in self._variables

    def check(self) -> None:
        """Raise [`UnsetVariableError`] if a variable without a default was asked for that is not set."""
        if self._unset:
            raise UnsetVariableError("\n".join(self._sentence(name, where) for name, where in self._unset.items()))

    def _sentence(self, name: str, where: str) -> str:
        file = (self._folder or Path.cwd()).resolve() / FILE_NAME
        default = "" if is_secret_name(name) else f", or give a default: `${{{name}:-default}}`"
        return (
            f"`{where}` of server {self._server!r} asks for the environment variable {name!r}, which is not set. "
            f"Export it (`export {name}=...`), or write it into {str(file)!r} as `{name}=...`{default}."
        )


def variables_for(folder: Path | None) -> dict[str, str]:
    """
    Collect the variables that a configuration may ask for.

    Args:
        folder (`Path`, *optional*):
            Folder of the configuration file.

    Returns:
        `dict[str, str]`: Those of this process, and below them those of files `.env`: in the folder, then in the working
        directory, then in the folders above that; the nearest comes first.
    """
    found = dict(os.environ)
    if folder is not None and (file := folder / FILE_NAME).is_file():
        found = read_variables(file, "The file") | found
    for file in _files_here_and_above():
        try:
            found = read_variables(file, "The file") | found
        except ServerConfigError as error:  # may be another's affair
            logger.warning("%s Its variables are not used.", error)
    return found


def _files_here_and_above() -> Iterator[Path]:
    try:
        here = Path.cwd()
        owners = {os.getuid(), here.stat().st_uid}
    except OSError:  # it was removed
        return
    for place in (here, *here.parents):
        file = place / FILE_NAME
        try:
            # In a folder that many may write to, such as /tmp, somebody else's file is not for us.
            if file.is_file() and (place == here or file.stat().st_uid in owners):
                yield file
        except OSError:  # a folder above that may not be looked into
            continue


def read_variables(path: Path, what: str) -> dict[str, str]:
    """
    Read a `.env` file.

    Args:
        path (`Path`):
            The file.
        what (`str`):
            What it is, as the start of a message: ``"`envFile` of server 'files'"``.

    Returns:
        `dict[str, str]`: Its variables. Raises [`ServerConfigError`] if it cannot be read.
    """
    try:
        with path.open(encoding="utf-8") as text:
            read = dotenv_values(stream=text, interpolate=False)
    except OSError as error:
        raise ServerConfigError(f"{what} {str(path)!r} cannot be read: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise ServerConfigError(f"{what} {str(path)!r} is not text in UTF-8. Save it as such.") from error
    return {name: value for name, value in read.items() if value is not None}
