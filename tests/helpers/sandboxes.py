"""Levels of the sandbox for Python code: which of them a test takes, on this machine."""

from typing import Any

import pytest

from mcp_grpo.desk.servers.python.process import Limits
from mcp_grpo.desk.servers.python.sandbox import Sandbox, open_sandbox
from mcp_grpo.errors import SettingsError, ToolServerError


WALLED = ("bubblewrap", "landlock")


def sandbox_of(level: str, limits: Limits) -> Sandbox:
    """Open a sandbox of one level, or skip the test where the machine has none."""
    try:
        return open_sandbox(level, limits)  # type: ignore[arg-type]  # one of the levels
    except ToolServerError as error:
        pytest.skip(str(error))


def _strongest() -> str | None:
    try:
        sandbox = open_sandbox("auto", Limits())
    except (SettingsError, ToolServerError):
        return None
    sandbox.close()
    return sandbox.level


STRONGEST = _strongest()
"""The level that the server takes on this machine."""


def each(levels: tuple[str, ...]) -> list[Any]:
    """Levels to test: `make test` is content with the strongest that this machine has."""
    return [level if level == STRONGEST else pytest.param(level, marks=pytest.mark.full) for level in levels]
