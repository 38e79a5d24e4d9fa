"""
The error model: one base, one type per boundary.

Each type also inherits the builtin it replaces, so that `except ValueError` still works. A message says what happened,
what was got, and what to do. What goes wrong *inside* a rollout is data ([`ToolResult`], [`StopReason`]), not an
exception: a failing tool is an observation for the policy, and a failing server ends one trajectory.
"""

from mcp_grpo.inert import inert


class MCPGRPOError(Exception):
    """
    Base of every error this library raises on purpose.

    A message may quote a server, a file or a policy. Control characters in it are shown, so that a terminal does not obey them.
    """

    def __str__(self) -> str:
        return inert(super().__str__())


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


class RewardError(MCPGRPOError, RuntimeError):
    """A reward function that raised, for a trajectory that the message names."""


class SamplerError(MCPGRPOError, RuntimeError):
    """A sampler that has failed, or that samples from other weights than those that are trained."""


class HealthError(MCPGRPOError, RuntimeError):
    """A run that cannot learn any more, and was stopped for it."""


class OutOfMemoryError(MCPGRPOError, RuntimeError):
    """A GPU without room for a phase of a training step."""


class PublishingError(MCPGRPOError, ValueError):
    """Files that were not uploaded, because something private is in them."""
