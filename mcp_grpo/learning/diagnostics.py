"""Figures about trajectories that say whether a run is healthy."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mcp_grpo.rollout import RolloutProgress
from mcp_grpo.types import ResultKind, StopReason, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """
    A mean that survives many ranks: totals and counts are added, and only then divided.

    Args:
        total (`float`):
            Sum of what is averaged.
        count (`float`):
            How many there were.
    """

    total: float
    count: float


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
            - `rollout/rejected_turns`: first turns per trajectory that were thrown away because they called no tool.
            - `rollout/rejection_cost`: what that costs in being on-policy: the mean of log(q / pi) of the first turns that
              were kept, where the sampler draws from pi and throwing away makes q of it; 0 if none was thrown away. It
              is estimated for each task by itself, from its trajectories on this rank.
            - `rollout/failed_fraction`: share of trajectories that ended for a reason the policy is not to blame for.
            - `rollout/straggler_fraction`: share of trajectories that were cut because most of their batch had ended.
            - `rollout/left_out_fraction`: share of trajectories left out of loss and baseline, for one of these or by
              `truncation`.
            - `rollout/trajectory_seconds`: seconds per trajectory.
            - `rollout/queue_seconds`: seconds that a trajectory waited to be started.
    """
    results = [exchange.result for trajectory in trajectories for exchange in trajectory.exchanges]
    kinds = [result.kind for result in results]
    stops = [trajectory.stop_reason for trajectory in trajectories]

    sampled = [segment for trajectory in trajectories for segment in trajectory.segments if segment.sampled]
    num_sampled = sum(len(segment.token_ids) for segment in sampled)
    allowed = [logprob for segment in sampled for logprob in segment.allowed_logprobs or ()]

    costs = _rejection_costs(trajectories)

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
        "rollout/rejected_turns": per_trajectory(sum(trajectory.num_rejected for trajectory in trajectories)),
        "rollout/rejection_cost": Ratio(total=sum(costs), count=len(costs)),
        "rollout/failed_fraction": per_trajectory(sum(trajectory.is_failed for trajectory in trajectories)),
        "rollout/left_out_fraction": per_trajectory(sum(not t.is_learnt_from for t in trajectories)),
        "rollout/straggler_fraction": per_trajectory(stops.count(StopReason.STRAGGLER)),
        "rollout/trajectory_seconds": per_trajectory(sum(trajectory.seconds for trajectory in trajectories)),
        "rollout/queue_seconds": per_trajectory(sum(trajectory.queue_seconds for trajectory in trajectories)),
    }


def pace_metrics(progress: RolloutProgress) -> dict[str, Ratio]:
    """
    How fast a batch was rolled out.

    Args:
        progress ([`RolloutProgress`]):
            What was counted, groups that were replaced since included.

    Returns:
        `dict[str, Ratio]`: Metric keys and their ratios:

            - `rollout/seconds`: wall-clock time of the rollout, as the mean over processes.
            - `rollout/tokens_per_second`: tokens that the policy sampled per second and process.
    """
    return {
        "rollout/seconds": Ratio(total=progress.seconds, count=1),
        "rollout/tokens_per_second": Ratio(total=progress.num_tokens, count=progress.seconds),
    }


def _rejection_costs(trajectories: Sequence[Trajectory]) -> list[float]:
    """
    log(q / pi) of each first turn that was kept.

    Let f be how likely a turn is that calls no tool. Of at most R + 1 draws, a turn that is kept at once comes as the
    first, or as the second after one without a call, and so on: q / pi = 1 + f + ... + f^R, which is also the mean number
    of draws. A turn without a call is kept only as the last draw: q / pi = f^R, and R is how many were thrown away.
    """
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        if trajectory.num_turns:  # the deadline may come before a turn is kept
            groups[trajectory.task.task_id].append(trajectory)
    costs: list[float] = []
    for group in groups.values():
        lacks_call = [t.num_turns == 1 and t.stop_reason is StopReason.ANSWERED for t in group]
        num_rejected = sum(trajectory.num_rejected for trajectory in group)
        num_draws = num_rejected + len(group)
        num_without_call = num_rejected + sum(lacks_call)
        costs += [
            t.num_rejected * math.log(num_without_call / num_draws) if lacks else math.log(num_draws / len(group))
            for t, lacks in zip(group, lacks_call, strict=True)
        ]
    return costs


def tool_metrics(
    trajectories: Sequence[Trajectory], gather: Callable[[list[Any]], list[Any]] = list
) -> dict[str, float]:
    """
    What happened to each tool that was called.

    Args:
        trajectories (`Sequence[Trajectory]`):
            The batch of this rank.
        gather (`Callable[[list], list]`, *optional*):
            Joins a list with those of all other ranks.

    Returns:
        `dict[str, float]`: For each tool of the catalog that was called, `tools/by_name/*/calls`, the number of calls, and
        `tools/by_name/*/error_rate`, the share of them that did not succeed.
    """
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
