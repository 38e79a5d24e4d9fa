"""Metrics of trajectories that show whether a run is healthy."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcp_grpo.types import ResultKind, StopReason, Trajectory, is_of_user


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A mean that survives many ranks: totals and counts are added, and only then divided."""

    total: float
    count: float


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, Ratio]:
    """Compute metrics of a batch of trajectories. The keys do not depend on them, so that ranks can add up."""
    results = [exchange.result for trajectory in trajectories for exchange in trajectory.exchanges]
    kinds = [result.kind for result in results]
    stops = [trajectory.stop_reason for trajectory in trajectories]

    sampled = [segment for trajectory in trajectories for segment in trajectory.segments if segment.sampled]
    num_sampled = sum(len(segment.token_ids) for segment in sampled)
    reads = [read for trajectory in trajectories for read in trajectory.turn_reads]
    allowed = [logprob for segment in sampled for logprob in segment.allowed_logprobs or ()]

    def per_trajectory(total: float) -> Ratio:
        return Ratio(total=total, count=len(trajectories))

    def per_call(total: float) -> Ratio:
        return Ratio(total=total, count=len(results))

    return {
        **{f"stop/{reason}": per_trajectory(stops.count(reason)) for reason in StopReason},
        "turns/mean": per_trajectory(sum(trajectory.num_turns for trajectory in trajectories)),
        "turns/user": per_trajectory(sum(is_of_user(m) for t in trajectories for m in t.messages)),
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
        "rollout/cached_fraction": Ratio(
            total=sum(num_cached for _, num_cached in reads), count=sum(num_tokens for num_tokens, _ in reads)
        ),
        "rollout/failed_fraction": per_trajectory(sum(trajectory.is_failed for trajectory in trajectories)),
        "rollout/left_out_fraction": per_trajectory(sum(not t.is_learnt_from for t in trajectories)),
        "rollout/shortened_fraction": per_trajectory(sum(len(t.views) > 1 for t in trajectories)),
        "rollout/trajectory_seconds": per_trajectory(sum(trajectory.seconds for trajectory in trajectories)),
        "rollout/queue_seconds": per_trajectory(sum(trajectory.queue_seconds for trajectory in trajectories)),
    }


def tool_metrics(
    trajectories: Sequence[Trajectory], gather: Callable[[list[Any]], list[Any]] = list
) -> dict[str, float]:
    """Compute metrics of each tool that was called."""
    exchanges = [e for trajectory in trajectories for e in trajectory.exchanges]
    # A name that the policy made up is no tool.
    named = [e for e in exchanges if e.result.kind not in (ResultKind.UNKNOWN_TOOL, ResultKind.MALFORMED_CALL)]
    counts = Counter(e.call.name for e in named), Counter(e.call.name for e in named if e.result.is_error)
    calls, errors = Counter[str](), Counter[str]()
    for own_calls, own_errors in gather([counts]):
        calls, errors = calls + own_calls, errors + own_errors
    return {f"tools/by_name/{name}/calls": float(count) for name, count in sorted(calls.items())} | {
        f"tools/by_name/{name}/error_rate": errors[name] / count for name, count in sorted(calls.items())
    }


def staleness_metrics(
    trajectories: Sequence[Trajectory], gather: Callable[[list[Any]], list[Any]] = list
) -> dict[str, float]:
    """Compute how many updates lie between the beginning of trajectories and their use."""
    found: list[int] = gather([trajectory.staleness for trajectory in trajectories])
    if not found:
        return {}
    return {
        "rollout/staleness": sum(found) / len(found),
        "rollout/staleness_max": float(max(found)),
        "rollout/carried_fraction": sum(each > 1 for each in found) / len(found),
    }


def reduced(ratios: Mapping[str, Ratio], accelerator: Any) -> dict[str, float]:
    """Add ratios up over all ranks, then divide."""
    local = torch.tensor([[ratio.total, ratio.count] for ratio in ratios.values()], device=accelerator.device)
    sums = accelerator.gather(local).view(-1, len(ratios), 2).sum(dim=0).tolist()
    return {key: total / count for key, (total, count) in zip(ratios, sums, strict=True) if count}


def weigh_batches(metrics: dict[str, list[float]], sizes: Sequence[int]) -> None:
    """
    Make one mean of what each batch of an evaluation came to, in place: over attempts, where batches have not as many each.

    Args:
        metrics (`dict[str, list[float]]`):
            Values of each metric, batch by batch, NaN where there is none.
        sizes (`Sequence[int]`):
            Attempts in each batch.
    """
    if len(set(sizes)) < 2:
        return
    for values in metrics.values():
        known = [(value, size) for value, size in zip(values, sizes, strict=False) if not math.isnan(value)]
        if len(values) == len(sizes) and known:
            values[:] = [sum(value * size for value, size in known) / sum(size for _, size in known)]
