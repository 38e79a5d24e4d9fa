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
            - `tools/kind/*`: share of calls that came back as each kind of result.
            - `tools/repaired_rate`: share of calls whose arguments were mended before they were sent.
            - `tools/cut_rate`: share of calls whose result was cut because it was over the token budget.
            - `tools/retried_rate`: share of calls that were sent more than once.
            - `tools/seconds`: seconds per call that a server took.
            - `rollout/failed_fraction`: share of trajectories left out of loss and baseline.
            - `rollout/seconds`: seconds per trajectory.
    """
    results = [exchange.result for trajectory in trajectories for exchange in trajectory.exchanges]
    kinds = [result.kind for result in results]
    stops = [trajectory.stop_reason for trajectory in trajectories]

    def per_trajectory(total: float) -> Ratio:
        return Ratio(total=total, count=len(trajectories))

    def per_call(total: float) -> Ratio:
        return Ratio(total=total, count=len(results))

    return {
        **{f"stop/{reason}": per_trajectory(stops.count(reason)) for reason in StopReason},
        "turns/mean": per_trajectory(sum(trajectory.num_turns for trajectory in trajectories)),
        "tools/call_frequency": per_trajectory(len(results)),
        "tools/valid_rate": per_call(sum(not kind.is_policy_fault for kind in kinds)),
        "tools/failure_frequency": per_call(sum(kind is not ResultKind.OK for kind in kinds)),
        **{f"tools/kind/{kind}": per_call(kinds.count(kind)) for kind in ResultKind},
        "tools/repaired_rate": per_call(sum(bool(result.repairs) for result in results)),
        "tools/cut_rate": per_call(sum(result.num_cut > 0 for result in results)),
        "tools/retried_rate": per_call(sum(result.num_attempts > 1 for result in results)),
        "tools/seconds": per_call(sum(result.seconds for result in results)),
        "rollout/failed_fraction": per_trajectory(sum(trajectory.is_failed for trajectory in trajectories)),
        "rollout/seconds": per_trajectory(sum(trajectory.seconds for trajectory in trajectories)),
    }
