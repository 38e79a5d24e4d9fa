"""
The error model: one base, one type per boundary.

Each type also inherits the builtin it replaces, so that `except ValueError` still works. A message says what happened,
what was got, and what to do. What goes wrong *inside* a rollout is data ([`ToolResult`], [`StopReason`]), not an
exception: a failing tool is an observation for the policy, and a failing server ends one trajectory.
"""

from collections.abc import Generator
from contextlib import contextmanager


class MCPGRPOError(Exception):
    """Base of every error this library raises on purpose."""


class SettingsError(MCPGRPOError, ValueError):
    """A setting, or a combination of settings, that cannot train correctly."""


class TaskFormatError(MCPGRPOError, ValueError):
    """A dataset row that is not a task."""


class ServerConfigError(MCPGRPOError, ValueError):
    """A server configuration that cannot be read."""


class CatalogError(MCPGRPOError, ValueError):
    """A server or tool that is named but does not exist, or a name that means two tools."""


class TemplateError(MCPGRPOError, ValueError):
    """A chat template that cannot carry a multi-turn tool conversation token by token."""


class ToolServerError(MCPGRPOError, ConnectionError):
    """An MCP server that cannot be started, reached or understood."""


class CassetteError(MCPGRPOError, ValueError):
    """A recording of tool calls that cannot be read, does not fit the servers, or would be overwritten."""


class RolloutError(MCPGRPOError, RuntimeError):
    """Rollouts that cannot be trained on, such as too many failed by their servers."""


@contextmanager
def boundary(error_type: type[MCPGRPOError], what: str) -> Generator[None]:
    """
    Turn whatever goes wrong inside into `error_type`, keeping the cause.

    Args:
        error_type (`type[MCPGRPOError]`):
            The type of the boundary that is crossed.
        what (`str`):
            What was being done, as the start of a sentence: `"listing the tools of 'files'"`.

    Example:

    ```python
    with boundary(ToolServerError, f"listing the tools of {name!r}"):
        tools = await client.list_tools()
    ```
    """
    try:
        yield
    except MCPGRPOError:
        raise
    except Exception as error:
        raise error_type(f"{what} failed: {type(error).__name__}: {error}") from error
