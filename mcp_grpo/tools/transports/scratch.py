"""A copy of a folder for each process of a server, under the folder's own name."""

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

from mcp_grpo.errors import ToolServerError
from mcp_grpo.tools.config import ServerConfig


_PLAIN = re.compile(r"/[\x20-\x7e]+")


class Scratch:
    """
    The copy of a folder that one process works on, and the translation of its path.

    The process is given the copy wherever its settings name the folder. What is said to it has the copy's path in place of the
    folder's, and what it says the other way round: prompts, calls and results are the same for every copy.
    """

    def __init__(self, config: ServerConfig, home: str) -> None:
        given = Path(config.folder or "", cast("str", config.scratch)).expanduser()
        self._folder = os.path.realpath(given)
        self._copy = os.path.join(os.path.realpath(home), os.path.basename(self._folder) or "scratch")
        self._config = config
        names = dict.fromkeys([self._folder, os.path.abspath(given), str(config.scratch)])
        self._names = [name for name in names if os.path.isabs(name)]
        if not all(_PLAIN.fullmatch(name) and not re.search(r'["\\]', name) for name in (*self._names, self._copy)):
            raise ToolServerError(
                f"`scratch` of server {config.name!r} needs a path of plain letters, without quotes and backslashes, got "
                f"{self._folder!r}. Rename the folder."
            )

    def make(self) -> ServerConfig:
        """Copy the folder, and return the configuration of a server that works on the copy."""
        try:
            shutil.copytree(self._folder, self._copy, symlinks=True)
        except (OSError, shutil.Error) as error:
            raise ToolServerError(
                f"The folder {self._folder!r}, the `scratch` of server {self._config.name!r}, could not be copied: {str(error)[:300]}. Check "
                "that it is there and can be read."
            ) from error
        config = self._config
        sandbox = None
        if config.sandbox is not None:
            sandbox = {
                key: [self._inside(path) for path in value] if key in ("read", "write") else value
                for key, value in config.sandbox.items()
            }
        return replace(
            config,
            args=tuple(map(self._inside, config.args)),
            env={name: self._inside(value) for name, value in config.env.items()},
            cwd=self._copy if config.cwd is None else self._inside(os.path.realpath(config.cwd)),
            sandbox=sandbox,
        )

    def to_server(self, line: bytes) -> bytes:
        """Return a message with the copy's path in place of the folder's."""
        for name in self._names:
            line = re.sub(_path(name), self._copy.encode().replace(b"\\", b"\\\\"), line)
        return line

    def from_server(self, line: bytes) -> bytes:
        """Return a message with the folder's path in place of the copy's."""
        return re.sub(_path(self._copy), self._folder.encode().replace(b"\\", b"\\\\"), line)

    def _inside(self, text: str) -> str:
        return self.to_server(text.encode()).decode()


def _path(name: str) -> bytes:
    """Match a path, but not the beginning of another folder's name."""
    return re.escape(name.encode()) + rb"(?![\w.-])"
