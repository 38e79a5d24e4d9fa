"""The user of a trajectory, who may say more once the policy has answered."""

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, cast

import anyio.to_thread

from mcp_grpo.errors import CatalogError, SettingsError, ToolServerError
from mcp_grpo.tools.catalog import Tool
from mcp_grpo.tools.secrets import shown_error, without_tokens
from mcp_grpo.tools.sessions.server import CallServer
from mcp_grpo.types import Exchange, Task, ToolCall, ToolResult, Trajectory, UserTurn


logger = logging.getLogger(__name__)

USER = "(user)"
"""Name that a recording has for the user; no server can have it."""

Said = str | UserTurn | Mapping[str, Any] | None
User = Callable[..., Said | Awaitable[Said]]
"""
Function that says what the user says next, given the trajectory so far; `None` ends it. A second parameter, if it has one, is the
[`UserTools`] of the trajectory.
"""

_SAY = Tool(name="say", server=USER, tool="say", description="", input_schema={"type": "object"}, is_read_only=True)


class UserTools:
    """
    The tools that the user of one trajectory may call: those that servers have as `user_tools`.

    Args:
        tools (`tuple[Tool, ...]`):
            The tools.
        call (`Callable[[ToolCall], Awaitable[ToolResult]]`):
            Calls one of them.

    Attributes:
        exchanges (`list[Exchange]`):
            The calls so far, with their results; their `turn` is the number of turns that the policy had had.
    """

    def __init__(self, tools: tuple[Tool, ...], call: Callable[[ToolCall], Awaitable[ToolResult]]) -> None:
        self.tools = tools
        self.exchanges: list[Exchange] = []
        self._call = call
        self._turn = 0

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """
        Call a tool as the user.

        Args:
            name (`str`):
                Name of the tool.
            arguments (`Mapping[str, Any]`):
                Arguments.

        Returns:
            [`ToolResult`]: The result; for a failure, its `kind` says who caused it.
        """
        call = ToolCall(name=name, arguments=arguments)
        result = await self._call(call)
        self.exchanges.append(Exchange(call=call, result=result, turn=self._turn))
        return result

    def follow(self, num_turns: int) -> None:
        """Note how many turns the policy has had."""
        self._turn = num_turns


class UserSide:
    """The user of one trajectory: says what the task has written, then what a function says."""

    def __init__(
        self,
        task: Task,
        tools: UserTools,
        user: User | None = None,
        record: Callable[[CallServer], CallServer] | None = None,
    ) -> None:
        self.tools = tools
        self._task = task
        self._written = iter(task.user_turns)
        self._user = user
        self._trajectory: Trajectory | None = None
        self._answer: CallServer = self._say if record is None or user is None else record(self._say)

    async def next_turn(self, so_far: Callable[[], Trajectory]) -> UserTurn | None:
        """
        Return what the user says next, `None` at the end. Raises [`ToolServerError`] if the user fails, which is not the policy's
        fault.
        """
        written = next(self._written, None)
        if written is not None or self._user is None:
            return written
        self._trajectory = so_far()
        self.tools.follow(self._trajectory.num_turns)
        result = await self._answer(_SAY, {"answer": self._trajectory.answer or ""})
        if result.is_error:  # a recording that has no answer
            raise ToolServerError(result.text)
        said = cast("Mapping[str, Any]", result.structured)
        return None if said["is_end"] else UserTurn(content=result.text, tools=tuple(said["tools"]))

    async def _say(self, tool: Tool, arguments: Mapping[str, Any]) -> ToolResult:
        assert self._user is not None
        assert self._trajectory is not None
        given = (self._trajectory, self.tools)[: num_parameters(self._user)]
        try:
            if _is_async(self._user):
                said = await cast("Awaitable[Said]", self._user(*given))
            else:  # it may wait for something, and must not hold up the other trajectories
                said = await anyio.to_thread.run_sync(self._user, *given, abandon_on_cancel=True)
                said = await said if inspect.isawaitable(said) else said
        except ToolServerError:
            raise
        except Exception as error:
            logger.error("The user of task %r failed.\n%s", self._task.task_id, shown_error(error))
            raise ToolServerError(
                without_tokens(f"The user of task {self._task.task_id!r} failed: {type(error).__name__}: {error}")
            ) from error
        turn = self._read(said)
        if turn is None:
            return ToolResult(text="", structured={"is_end": True, "tools": []}, server=USER)
        return ToolResult(text=turn.content, structured={"is_end": False, "tools": list(turn.tools)}, server=USER)

    def _read(self, said: Said) -> UserTurn | None:
        turn = UserTurn(content=said) if isinstance(said, str) else said
        if isinstance(turn, Mapping) and turn.keys() <= {"content", "tools"}:
            turn = UserTurn(content=turn.get("content", ""), tools=tuple(turn.get("tools") or ()))
        if turn is None or (
            isinstance(turn, UserTurn) and isinstance(cast("object", turn.content), str) and turn.content.strip()
        ):
            return turn
        raise ToolServerError(
            f"The user of task {self._task.task_id!r} must say a text, a `UserTurn` or `None` at the end, got {str(said)[:200]!r}."
        )


def check_user(user: Any) -> None:
    """Refuse what cannot be asked for the user's next message."""
    if user is None:
        return
    if not callable(user) or num_parameters(user) < 1:
        raise SettingsError(
            f"`user` must be a function of the trajectory so far that returns what the user says next, or `None` at the end; got "
            f"{user!r}."
        )


def num_parameters(user: Callable[..., Any]) -> int:
    """Return how many of the trajectory and the user's tools a function takes."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(user).parameters.values()
    if any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters):
        return 2
    return min(2, sum(parameter.kind in kinds for parameter in parameters))


def named_tools(names: Sequence[str], tools: Mapping[str, Tool]) -> tuple[Tool, ...]:
    """Return tools by their names, in the prompt or on their server. Raises [`CatalogError`] for one that does not exist."""
    by_name = {tool.tool: tool for tool in tools.values()} | dict(tools)
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise CatalogError(
            f"The user brings the tools {unknown}, which the task does not have. It has {', '.join(by_name)}."
        )
    return tuple(by_name[name] for name in names)


def _is_async(user: User) -> bool:
    return inspect.iscoroutinefunction(user) or inspect.iscoroutinefunction(getattr(user, "__call__", None))  # noqa: B004
