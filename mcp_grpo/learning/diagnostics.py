"""Figures about trajectories that say whether a run is healthy."""

from collections.abc import Sequence
from dataclasses import dataclass

from mcp_grpo.types import ResultKind, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """
    A mean that survives many ranks: totals and counts are added, and only then divided.

    Args:
        total (`float`):
            Sum of what is averaged.
        count (`int`):
            How many there were.
    """

    total: float
    count: int


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Ratio]:
    """
    What happened in a batch of trajectories. The keys do not depend on the trajectories, so ranks can add them up.

    Args:
        trajectories (`Sequence[Trajectory]`):
            The batch.

    Returns:
        `dict[str, Ratio]`: Metric keys and their ratios:

            - `stop/*`: share of trajectories that ended for each reason.
            - `turns/mean`: turns per trajectory.
            - `tools/call_frequency`: tool calls per trajectory.
            - `tools/valid_rate`: share of calls that could be made: parsed, of a tool that exists, with valid arguments.
            - `tools/failure_frequency`: share of calls that did not succeed, whoever is to blame.
            - `tools/seconds`: seconds per call that a server took.
            - `rollout/failed_fraction`: share of trajectories left out of loss and baseline.
            - `rollout/seconds`: seconds per trajectory.
    """
    kinds = [exchange.result.kind for trajectory in trajectories for exchange in trajectory.exchanges]
    seconds = [exchange.result.seconds for trajectory in trajectories for exchange in trajectory.exchanges]
    stops = [trajectory.stop_reason for trajectory in trajectories]

    def per_trajectory(total: float) -> Ratio:
        return Ratio(total=total, count=len(trajectories))

    def per_call(total: float) -> Ratio:
        return Ratio(total=total, count=len(kinds))

    return {
        **{f"stop/{reason}": per_trajectory(stops.count(reason)) for reason in StopReason},
        "turns/mean": per_trajectory(sum(trajectory.num_turns for trajectory in trajectories)),
        "tools/call_frequency": per_trajectory(len(kinds)),
        "tools/valid_rate": per_call(sum(not kind.is_policy_fault for kind in kinds)),
        "tools/failure_frequency": per_call(sum(kind is not ResultKind.OK for kind in kinds)),
        "tools/seconds": per_call(sum(seconds)),
        "rollout/failed_fraction": per_trajectory(sum(trajectory.is_failed for trajectory in trajectories)),
        "rollout/seconds": per_trajectory(sum(trajectory.seconds for trajectory in trajectories)),
    }
