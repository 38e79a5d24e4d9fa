"""Combine several rewards into one, each still logged on its own."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards.shape import RewardFunction, total
from mcp_grpo.types import Trajectory


class Rubric:
    """
    A reward function that weighs others, its parts.

    The mean of each part is logged as `rewards/<part>/mean`, after its gate and before its weight, and each part is a column
    of the table of completions. A trajectory with `None` from any part gets `None`: rewards with and without that part could
    not be compared.

    Args:
        parts (`Mapping[str, Callable]`):
            Reward functions by the name they are logged under.
        weights (`Mapping[str, float]`, *optional*):
            Weights of parts; 1 by default.
        gates (`Mapping[str, str]`, *optional*):
            Parts that are paid only where another part is right (1 or more), by name. Penalties are charged in any case.

    Example:

    ```python
    reward = Rubric(
        {"answer": answer_match, "form": format_reward(), "calls": call_penalty()},
        weights={"form": 0.1},
        gates={"form": "answer"},
    )
    trainer = MCPGRPOTrainer(model, reward, args, tasks, servers="servers.json")
    ```
    """

    __name__ = "rubric"

    def __init__(
        self,
        parts: Mapping[str, RewardFunction],
        *,
        weights: Mapping[str, float] | None = None,
        gates: Mapping[str, str] | None = None,
    ) -> None:
        self.parts = dict(parts)
        self.gates = dict(gates or {})
        given = dict(weights or {})
        _check(self.parts, given, self.gates)
        self.weights = {name: float(given.get(name, 1.0)) for name in self.parts}

    def __call__(self, trajectory: list[Trajectory], **kwargs: Any) -> list[Any]:
        """Return the weighted sum of the parts."""
        rewards = self.rewards(trajectory, **kwargs)
        self._log(rewards, trajectory, kwargs)
        return [
            self._sum({name: given[index] for name, given in rewards.items()}, attempt)
            for index, attempt in enumerate(trajectory)
        ]

    def rewards(self, trajectory: list[Trajectory], **kwargs: Any) -> dict[str, list[Any]]:
        """Return what each part gives, after its gate and before its weight."""
        given = {name: list(part(trajectory=trajectory, **kwargs)) for name, part in self.parts.items()}
        for name, rewards in given.items():
            if len(rewards) != len(trajectory):
                raise SettingsError(
                    f"The part {name!r} returned {len(rewards)} rewards for {len(trajectory)} trajectories. Return one for "
                    "each."
                )
        for name, gate in self.gates.items():
            given[name] = [_gated(reward, right) for reward, right in zip(given[name], given[gate], strict=True)]
        return given

    def _sum(self, rewards: Mapping[str, Any], attempt: Trajectory) -> Any:
        if any(reward is None for reward in rewards.values()):
            return None
        whole = math.fsum(self.weights[n] * reward for n, reward in rewards.items() if not _is_list(reward))
        listed = {name: reward for name, reward in rewards.items() if _is_list(reward)}
        if not listed:
            return whole
        turns = [0.0] * max(1, attempt.num_turns)
        for name, reward in listed.items():
            if len(reward) != len(turns):
                raise SettingsError(
                    f"The part {name!r} returned {len(reward)} rewards for a trajectory of {len(turns)} turns. Return one number "
                    "for the whole trajectory, or one for each turn (`trajectory.num_turns`)."
                )
            for turn, value in enumerate(reward):
                turns[turn] += self.weights[name] * value
        turns[-1] += whole
        return turns

    def _log(
        self, rewards: Mapping[str, Sequence[Any]], trajectories: Sequence[Trajectory], kwargs: Mapping[str, Any]
    ) -> None:
        log_metric, log_extra = kwargs.get("log_metric"), kwargs.get("log_extra")
        for name, given in rewards.items():
            totals = [None if reward is None else total(reward) for reward in given]
            for value, attempt in zip(totals, trajectories, strict=True):
                if log_metric is not None and value is not None and attempt.is_learnt_from:
                    log_metric(f"rewards/{name}/mean", value)  # one by one: TRL takes the mean over all ranks
            if log_extra is not None:
                log_extra(f"reward_{name}", totals)


def _check(parts: Mapping[str, Any], weights: Mapping[str, float], gates: Mapping[str, str]) -> None:
    if not parts:
        raise SettingsError("A `Rubric` needs at least one part, got none.")
    for option, names in (("weights", [*weights]), ("gates", [*gates, *gates.values()])):
        unknown = [name for name in names if name not in parts]
        if unknown:
            raise SettingsError(f"`{option}` names {unknown}; the parts are {list(parts)}.")
    chained = [name for name, gate in gates.items() if gate in gates]
    if chained:
        raise SettingsError(f"The gates of {chained} have gates of their own. Gate by a part that has none.")
    wrong = {name: weight for name, weight in weights.items() if not math.isfinite(weight)}
    if wrong:
        raise SettingsError(f"`weights` must be finite numbers, got {wrong}.")


def _gated(reward: Any, right: Any) -> Any:
    if reward is None or right is None:
        return None
    if total(right) >= 1:
        return reward
    return [min(0.0, turn) for turn in reward] if _is_list(reward) else min(0.0, reward)


def _is_list(reward: Any) -> bool:
    return isinstance(reward, list | tuple)
