"""A boundary around reward functions: one that raises ends a run in an orderly way, or not at all."""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from mcp_grpo.errors import MCPGRPOError, RewardError
from mcp_grpo.rewards.checks import is_computed_early
from mcp_grpo.rewards.shape import without_logging
from mcp_grpo.trl_compat import is_async_callable
from mcp_grpo.types import Trajectory


logger = logging.getLogger(__name__)

MAX_SHOWN = 300  # characters of a final message in an error


class RewardBoundary:
    """
    Lets reward functions fail without raising where other ranks wait for their rewards.

    A function of this library that raises is a bug here: the trajectory is named in the log and gets no reward, so that it is left
    out. One that a user wrote has failed: its trajectories get no reward, and [`check`] raises once all ranks have come so far.

    Attributes:
        problem (`Exception`, *optional*):
            What was raised since the last check, with the trajectory in its message.
    """

    def __init__(self) -> None:
        self.problem: Exception | None = None

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function that never raises."""
        if is_async_callable(function):

            async def tried_later(**kwargs: Any) -> list[Any]:
                try:
                    return list(await function(**kwargs))
                except Exception as error:
                    return self._settled(
                        function, name, error, kwargs, [await _later(function, r) for r in _rows(kwargs)]
                    )

            return functools.update_wrapper(tried_later, function)

        def tried(**kwargs: Any) -> list[Any]:
            try:
                return list(function(**kwargs))
            except Exception as error:
                return self._settled(function, name, error, kwargs, [_at_once(function, row) for row in _rows(kwargs)])

        return functools.update_wrapper(tried, function)

    def _settled(
        self, function: Any, name: str, error: Exception, kwargs: Mapping[str, Any], found: Sequence[Any]
    ) -> list[Any]:
        """Return the rewards after an error, given the reward of each trajectory by itself, or what it raises."""
        pairs = zip(found, cast("list[Trajectory]", kwargs["trajectory"]), strict=True)
        told = [_told(name, error, trajectory) for one, trajectory in pairs if type(one) is type(error)]
        if told and is_computed_early(function) and not isinstance(error, MCPGRPOError):
            for sentence in told:
                logger.error(
                    "%s It is left out. This is a bug in mcp_grpo: please report it with this line.", sentence
                )
            return [None if isinstance(one, Exception) else one for one in found]
        self.problem = error
        if not isinstance(error, MCPGRPOError):
            self.problem = RewardError(told[0] if told else f"The reward function `{name}` raised {_named(error)}.")
            self.problem.__cause__ = error
        return [None] * len(found)

    def check(self, gather: Callable[[list[Any]], list[Any]], before: Callable[[], str]) -> None:
        """
        Raise what a function has raised, on every rank, after calling `before` on all of them, which says where to go on from.
        """
        problem, self.problem = self.problem, None
        found = [one for one in gather([None if problem is None else str(problem)]) if one is not None]
        if not found:
            return
        where = before()
        if isinstance(problem, MCPGRPOError) and not isinstance(problem, RewardError):
            raise problem
        raise RewardError(f"{found[0]} {where}") from (None if problem is None else problem.__cause__)


def _rows(kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the arguments for each trajectory by itself, without what would log again."""
    quiet, number = without_logging(dict(kwargs)), len(kwargs["trajectory"])
    for row in range(number):
        yield {k: [v[row]] if isinstance(v, list) and len(v) == number else v for k, v in quiet.items()}


def _at_once(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    try:
        return next(iter(function(**row)))
    except Exception as error:
        return error


async def _later(function: Callable[..., Any], row: dict[str, Any]) -> Any:
    try:
        return next(iter(await function(**row)))
    except Exception as error:
        return error


def _told(name: str, error: Exception, trajectory: Trajectory) -> str:
    message = trajectory.messages[-1].get("content") if trajectory.messages else ""
    text = message if isinstance(message, str) else ""
    shown = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN // 2]} ... {text[-MAX_SHOWN // 2 :]}"
    return (
        f"The reward function `{name}` raised {_named(error)} for a trajectory of task {trajectory.task.task_id!r} "
        f"({trajectory.stop_reason}, {trajectory.num_turns} turns, {len(trajectory.exchanges)} calls), which ends with {shown!r}."
    )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:MAX_SHOWN]}"
