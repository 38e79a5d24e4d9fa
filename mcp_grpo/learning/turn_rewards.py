"""Rewards for single turns, beside those for whole trajectories."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from mcp_grpo.errors import SettingsError
from mcp_grpo.trl_compat import is_async_callable


class TurnRewards:
    """
    Lets a reward function return, for a trajectory, one reward for each of its turns instead of one for all of it.

    TRL gets their sum. What was given to each turn is kept for the estimate of turn-level advantages.

    Args:
        functions (`Sequence[Callable | nn.Module]`):
            Reward functions and reward models.
        names (`Sequence[str]`):
            Their names, for error messages.

    Attributes:
        functions (`list[Callable | nn.Module]`):
            What TRL is to call instead.
        given (`dict[int, list[list[float] | None]]`):
            For each function, what it gave to each turn of the trajectories it has seen last; `None` for one that got a
            single reward.
    """

    def __init__(self, functions: Sequence[Any], names: Sequence[str]) -> None:
        self._names = list(names)
        self.given: dict[int, list[list[float] | None]] = {}
        self.functions = [f if isinstance(f, nn.Module) else self._summed(i, f) for i, f in enumerate(functions)]

    def _summed(self, index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        if is_async_callable(function):

            async def summed_later(*args: Any, **kwargs: Any) -> list[float | None]:
                return self._sums(index, await function(*args, **kwargs))

            return functools.update_wrapper(summed_later, function)

        def summed(*args: Any, **kwargs: Any) -> list[float | None]:
            return self._sums(index, function(*args, **kwargs))

        return functools.update_wrapper(summed, function)

    def _sums(self, index: int, rewards: Iterable[Any]) -> list[float | None]:
        rewards = list(rewards)
        if any(turn is None for reward in rewards if _is_list(reward) for turn in reward):
            raise SettingsError(
                f"The reward function {self._names[index]!r} returned a list of rewards with `None` in it. Give every turn a "
                "number, or return `None` for the whole trajectory."
            )
        given = [list(map(float, reward)) if _is_list(reward) else None for reward in rewards]
        self.given[index] = given
        return [reward if turns is None else math.fsum(turns) for reward, turns in zip(rewards, given, strict=True)]

    def per_turn(self, rewards: torch.Tensor, weights: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """
        Return the reward of each turn of the trajectories that the functions have seen last, of shape `(B, K)`.

        `rewards` of shape `(B, F)` has NaN where a function gave none; `counts` are the turns of each trajectory, 0 for one that is
        left out. A reward for a whole trajectory is that of its last turn.
        """
        turns = torch.zeros(len(counts), max([1, *counts]))
        for index, column in enumerate(rewards.T.tolist()):
            given = self.given.get(index, [None] * len(counts))
            for row, (reward, listed, count) in enumerate(zip(column, given, counts, strict=True)):
                if not count or math.isnan(reward):
                    continue
                if listed is None:
                    turns[row, count - 1] += weights[index].item() * reward
                    continue
                if len(listed) != count:
                    raise SettingsError(
                        f"The reward function {self._names[index]!r} returned {len(listed)} rewards for a trajectory of "
                        f"{count} turns. Return one number for the whole trajectory, or one for each turn "
                        "(`trajectory.num_turns`)."
                    )
                turns[row, :count] += weights[index].item() * torch.tensor(listed)
        return turns.to(rewards.device)


def _is_list(reward: Any) -> bool:
    return isinstance(reward, list | tuple) or (hasattr(reward, "ndim") and reward.ndim == 1)
