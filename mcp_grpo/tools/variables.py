"""Variables in server configurations: where they come from, and how they are filled in."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from dotenv import dotenv_values

from mcp_grpo.errors import ServerConfigError


_VARIABLE = re.compile(r"\$\{(?:env:)?([A-Za-z_]\w*)(?::-([^}]*))?\}|\$\{((?:command|config|input):[^}]*)\}")
_FOLDER = "workspaceFolder"  # what editors call the folder that a configuration belongs to


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
                file = "" if self._folder is None else f"write it into {str(self._folder / '.env')!r}, "
                raise ServerConfigError(
                    f"`{where}` of server {self._server!r} asks for the environment variable {name!r}, which is not "
                    f"set. Set it, {file}or give a default: `${{{name}:-default}}`."
                )
            self.values[name] = found
            return found

        return _VARIABLE.sub(value, text)


def variables_for(folder: Path | None) -> dict[str, str]:
    """
    The variables that a configuration may ask for.

    Args:
        folder (`Path`, *optional*):
            Folder of the configuration file.

    Returns:
        `dict[str, str]`: Those of this process, and below them those of a file `.env` in the folder.
    """
    file = None if folder is None else folder / ".env"
    beside = read_variables(file, "The file") if file is not None and file.is_file() else {}
    return {**beside, **os.environ}


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
