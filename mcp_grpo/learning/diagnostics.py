"""Figures about trajectories that say whether a run is healthy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

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
            - `rollout/force_rate`: share of the sampled tokens that were sampled under a constraint.
            - `rollout/neg_log_allowed`: of those, the mean of -log of the probability that the policy gave to all that
              the constraint allowed; 0 for a policy that needs no constraint.
            - `rollout/failed_fraction`: share of trajectories left out of loss and baseline.
            - `rollout/seconds`: seconds per trajectory.
    """
    results = [exchange.result for trajectory in trajectories for exchange in trajectory.exchanges]
    kinds = [result.kind for result in results]
    stops = [trajectory.stop_reason for trajectory in trajectories]

    sampled = [segment for trajectory in trajectories for segment in trajectory.segments if segment.sampled]
    num_sampled = sum(len(segment.token_ids) for segment in sampled)
    allowed = [logprob for segment in sampled for logprob in segment.allowed_logprobs or ()]

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
        "rollout/force_rate": Ratio(total=len(allowed), count=num_sampled),
        "rollout/neg_log_allowed": Ratio(total=-sum(allowed), count=len(allowed)),
        "rollout/failed_fraction": per_trajectory(sum(trajectory.is_failed for trajectory in trajectories)),
        "rollout/seconds": per_trajectory(sum(trajectory.seconds for trajectory in trajectories)),
    }


def reduced(ratios: Mapping[str, Ratio], accelerator: Any) -> dict[str, float]:
    """
    Ratios added up over all ranks, then divided.

    Args:
        ratios (`Mapping[str, Ratio]`):
            Those of this rank; all ranks have the same keys.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.

    Returns:
        `dict[str, float]`: The means of all that were counted at all.
    """
    local = torch.tensor([[ratio.total, ratio.count] for ratio in ratios.values()], device=accelerator.device)
    sums = accelerator.gather(local).view(-1, len(ratios), 2).sum(dim=0).tolist()
    return {key: total / count for key, (total, count) in zip(ratios, sums, strict=True) if count}
