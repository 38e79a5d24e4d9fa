"""Choose the forced tokens of tool calls that the policy loss leaves out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from mcp_grpo.metrics import Ratio
from mcp_grpo.types import Segment, Task, TokenRole, Trajectory


MIN_UNFORCED_TOKENS = 16  # in the loss of a batch

Gather = Callable[[list[Any]], list[Any]]

RolesOf = Callable[[Segment, Sequence[Mapping[str, Any]]], tuple[TokenRole, ...]]
"""Returns the role of each token of a sampled turn, given the schemas of the tools that were offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """
    Which of the forced tokens are masked.

    Args:
        min_prob (`float`, *optional*, defaults to `0.99`):
            Mask only tokens that were sampled with at least this probability, so that a format that is not yet reliable is
            still learnt; 0 masks every forced token.
        min_unforced_tokens (`int`, *optional*, defaults to `MIN_UNFORCED_TOKENS`):
            Smallest number of tokens in the loss of a batch. The least probable masked tokens are restored to reach it.
        min_unforced_fraction (`float`, *optional*, defaults to `0.3`):
            The same, as a share of the sampled tokens.
    """

    min_prob: float = 0.99
    min_unforced_tokens: int = MIN_UNFORCED_TOKENS
    min_unforced_fraction: float = 0.3

    def num_to_relax(self, num_sampled: int, num_masked: int) -> int:
        """Return how many masked tokens of a batch must be restored to reach both floors."""
        floor = max(self.min_unforced_tokens, math.ceil(self.min_unforced_fraction * num_sampled))
        return min(num_masked, max(0, floor - (num_sampled - num_masked)))


def with_roles(trajectory: Trajectory, roles_of: RolesOf, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
    """
    Add the roles of a trajectory's tokens. A turn with a call that could not be made, or that was cut short, has only
    choices: what is wrong with it must be learnt.
    """
    called = {exchange.turn for exchange in trajectory.exchanges}
    faulty = {exchange.turn for exchange in trajectory.exchanges if exchange.result.kind.is_policy_fault}
    found: list[tuple[TokenRole, ...]] = []
    turn = -1
    for segment in trajectory.segments:
        if not segment.sampled:
            found.append((TokenRole.ENVIRONMENT,) * len(segment.token_ids))
            continue
        turn += 1
        if turn in called and turn not in faulty:
            found.append(roles_of(segment, tools))
        else:
            found.append((TokenRole.CHOICE,) * len(segment.token_ids))
    return replace(trajectory, roles=tuple(chain.from_iterable(found)))


def with_candidates(trajectory: Trajectory, rule: MaskRule) -> Trajectory:
    """
    Mask what a rule names, ignoring its floors; nothing in a trajectory that is not learnt from, or that the policy did not
    sample: how probable its syntax is, nobody knows yet.
    """
    assert trajectory.roles is not None
    if not trajectory.is_learnt_from or trajectory.is_scripted:
        return replace(trajectory, masked=(False,) * len(trajectory.roles))
    least = math.log(rule.min_prob) if rule.min_prob > 0 else -math.inf
    pairs = zip(trajectory.roles, trajectory.logprobs, strict=True)
    masked = [role is TokenRole.FORCED and logprob >= least for role, logprob in pairs]
    return replace(trajectory, masked=tuple(masked))


def with_masks(
    trajectories: Sequence[Trajectory], rule: MaskRule, gather: Gather = list, rank: int = 0
) -> tuple[list[Trajectory], dict[str, Ratio]]:
    """
    Mask trajectories that have roles, and return them with metrics. Those that are masked already only lose masks to the
    floors, which hold for all processes together: `gather` joins a list with those of the others.

    Metrics, as shares of the sampled tokens: `mask/masked_fraction`, `mask/forced_fraction` (syntax of a valid call) and
    `mask/straddling_fraction` (syntax and a choice in one token); and `mask/relaxed_fraction`, the share of the tokens to be
    masked that the floors restored.
    """
    found = [t if t.masked is not None else with_candidates(t, rule) for t in trajectories]
    learnt = [t for t in found if t.is_learnt_from]
    num_sampled = sum(len(segment.token_ids) for t in learnt for segment in t.segments if segment.sampled)
    num_forced, num_straddling = (
        sum((t.roles or ()).count(role) for t in learnt) for role in (TokenRole.FORCED, TokenRole.STRADDLING)
    )
    num_candidates = sum((t.masked or ()).count(True) for t in learnt)
    counts = gather([(num_sampled, num_candidates)])
    num_to_relax = rule.num_to_relax(sum(count for count, _ in counts), sum(count for _, count in counts))
    num_relaxed = 0
    if num_to_relax:
        found, num_relaxed = _relaxed(found, num_to_relax, gather, rank)
    return found, {
        "mask/masked_fraction": Ratio(total=num_candidates - num_relaxed, count=num_sampled),
        "mask/forced_fraction": Ratio(total=num_forced, count=num_sampled),
        "mask/straddling_fraction": Ratio(total=num_straddling, count=num_sampled),
        "mask/relaxed_fraction": Ratio(total=num_relaxed, count=num_candidates),
    }


def _relaxed(
    trajectories: list[Trajectory], num_to_relax: int, gather: Gather, rank: int
) -> tuple[list[Trajectory], int]:
    """Restore the least probable masked tokens of all processes; return the trajectories and the number of own ones."""
    masked = [np.array(t.masked, dtype=np.bool_) & t.is_learnt_from for t in trajectories]
    own = np.concatenate([np.array(t.logprobs)[mask] for t, mask in zip(trajectories, masked, strict=True)])
    everyone = gather([own])  # one array for each process, in the order of ranks
    first = sum(map(len, everyone[:rank]))
    places = np.argsort(np.concatenate(everyone), kind="stable")[:num_to_relax] - first
    stays = np.ones(len(own), dtype=np.bool_)
    stays[places[(places >= 0) & (places < len(own))]] = False
    ends = np.cumsum([mask.sum() for mask in masked])
    for mask, kept in zip(masked, np.split(stays, ends[:-1]), strict=True):
        mask[mask] = kept
    done = [replace(t, masked=tuple(mask.tolist())) for t, mask in zip(trajectories, masked, strict=True)]
    return done, int((~stays).sum())


class SchemaMask:
    """
    Finds the roles of tokens, and masks what a rule names; without a rule it only finds roles.

    [`mark`] does nearly all of it for each trajectory as it ends, while others are still being generated. Only the floors
    take the whole batch.
    """

    def __init__(self, roles_of: RolesOf, rule: MaskRule | None) -> None:
        self._roles_of = roles_of
        self._rule = rule

    def mark(self, trajectory: Trajectory, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
        """Add `roles` to a finished trajectory, and `masked` if there is a rule, ignoring its floors."""
        found = with_roles(trajectory, self._roles_of, tools)
        return found if self._rule is None else with_candidates(found, self._rule)

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        tools_for: Callable[[Task], Sequence[Mapping[str, Any]]],
        gather: Gather = list,
        rank: int = 0,
    ) -> tuple[list[Trajectory], dict[str, Ratio]]:
        """Mask the trajectories of this process, marking those that are not; see [`with_masks`]."""
        found = [t if t.roles is not None else self.mark(t, tools_for(t.task)) for t in trajectories]
        return (found, {}) if self._rule is None else with_masks(found, self._rule, gather, rank)
