"""Which tokens of a tool call leave the policy loss, because the policy had no choice in them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from mcp_grpo.learning.diagnostics import Ratio
from mcp_grpo.types import Segment, Task, TokenRole, Trajectory


Gather = Callable[[list[Any]], list[Any]]

RolesOf = Callable[[Segment, Sequence[Mapping[str, Any]]], tuple[TokenRole, ...]]
"""Tells syntax from choices in a turn that the policy sampled, given the schemas of the tools that were offered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskRule:
    """
    Which of the forced tokens are masked.

    Args:
        min_prob (`float`, *optional*, defaults to `0.99`):
            Smallest probability that a token was sampled with to be masked. Where the format is not yet reliable, nothing
            is masked, and the format is learnt; 0 masks every forced token.
        mask_trigger (`bool`, *optional*, defaults to `False`):
            Whether the tokens that open a call are masked, too. That takes the choice to call a tool out of the loss.
        min_unforced_tokens (`int`, *optional*, defaults to `16`):
            How many tokens must stay in the loss of a batch. The least probable of the masked ones come back to make up
            for it.
        min_unforced_fraction (`float`, *optional*, defaults to `0.3`):
            The same, as a share of the tokens that the policy sampled.
    """

    min_prob: float = 0.99
    mask_trigger: bool = False
    min_unforced_tokens: int = 16
    min_unforced_fraction: float = 0.3

    def num_to_relax(self, num_sampled: int, num_masked: int) -> int:
        """
        How many masked tokens must come back.

        Args:
            num_sampled (`int`):
                Tokens that the policy sampled, in the whole batch.
            num_masked (`int`):
                How many of them would be masked.

        Returns:
            `int`: As few as keep both floors, or all.
        """
        floor = max(self.min_unforced_tokens, math.ceil(self.min_unforced_fraction * num_sampled))
        return min(num_masked, max(0, floor - (num_sampled - num_masked)))


def with_roles(trajectory: Trajectory, roles_of: RolesOf, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
    """
    Tell the syntax of a trajectory's tool calls from its choices.

    Args:
        trajectory (`Trajectory`):
            A finished trajectory.
        roles_of (`Callable`):
            Looks at one turn.
        tools (`Sequence[Mapping[str, Any]]`):
            Schemas of the tools that were offered.

    Returns:
        [`Trajectory`]: The same with `roles`. A turn with a call that could not be made, as one that was cut short, has
        nothing but choices: what is wrong with it is what must be learnt.
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
    Mask what a rule names, as if it had no floors.

    Args:
        trajectory (`Trajectory`):
            A finished trajectory with roles.
        rule (`MaskRule`):
            Which tokens.

    Returns:
        [`Trajectory`]: The same with `masked`; nothing of one that is not learnt from.
    """
    assert trajectory.roles is not None
    if not trajectory.is_learnt_from:
        return replace(trajectory, masked=(False,) * len(trajectory.roles))
    least = math.log(rule.min_prob) if rule.min_prob > 0 else -math.inf
    forced, opening = TokenRole.FORCED, TokenRole.TRIGGER if rule.mask_trigger else TokenRole.FORCED
    pairs = zip(trajectory.roles, trajectory.logprobs, strict=True)
    masked = [(role is forced or role is opening) and logprob >= least for role, logprob in pairs]
    return replace(trajectory, masked=tuple(masked))


def with_masks(
    trajectories: Sequence[Trajectory], rule: MaskRule, gather: Gather = list, rank: int = 0
) -> tuple[list[Trajectory], dict[str, Ratio]]:
    """
    Choose the tokens that the policy loss leaves out.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Trajectories with roles, of this process. From those that have `masked` already, only the floors bring
            tokens back.
        rule (`MaskRule`):
            Which tokens.
        gather (`Callable[[list], list]`, *optional*):
            Joins a list with those of all other processes, for the floors hold for all of them together.
        rank (`int`, *optional*, defaults to `0`):
            Index of this process.

    Returns:
        `tuple[list[Trajectory], dict[str, Ratio]]`: The same with `masked`, and what was done:

            - `mask/masked_fraction`: share of the sampled tokens that are masked.
            - `mask/forced_fraction`: share of the sampled tokens that are syntax of a valid call.
            - `mask/straddling_fraction`: share of the sampled tokens that are syntax and a choice in one.
            - `mask/relaxed_fraction`: share of the tokens that would be masked, but for the floors.
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
    """Trajectories without the masks that come back, the least probable of all processes first, and how many those are."""
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
    Tells syntax from choices in trajectories, and chooses what the policy loss leaves out.

    Nearly all of it can be done with each trajectory as it ends, by [`mark`], while others are still being generated. What
    is left takes the whole batch, and little time: the floors.

    Args:
        roles_of (`Callable`):
            Looks at one turn: gets its segment and the schemas of the tools, returns one role per token.
        rule (`MaskRule`, *optional*):
            Which tokens to leave out. `None` leaves none out, and only tells syntax from choices.
    """

    def __init__(self, roles_of: RolesOf, rule: MaskRule | None) -> None:
        self._roles_of = roles_of
        self._rule = rule

    def mark(self, trajectory: Trajectory, tools: Sequence[Mapping[str, Any]]) -> Trajectory:
        """
        Tell syntax from choices in one trajectory, and mask what the rule names, as if it had no floors.

        Args:
            trajectory (`Trajectory`):
                A finished trajectory.
            tools (`Sequence[Mapping[str, Any]]`):
                Schemas of the tools that were offered.

        Returns:
            [`Trajectory`]: The same with `roles`, and with `masked` if there is a rule.
        """
        found = with_roles(trajectory, self._roles_of, tools)
        return found if self._rule is None else with_candidates(found, self._rule)

    def __call__(
        self,
        trajectories: Sequence[Trajectory],
        tools_for: Callable[[Task], Sequence[Mapping[str, Any]]],
        gather: Gather = list,
        rank: int = 0,
    ) -> tuple[list[Trajectory], dict[str, Ratio]]:
        """
        Mask trajectories.

        Args:
            trajectories (`Sequence[Trajectory]`):
                Finished trajectories of this process. Those that are not marked yet, are here.
            tools_for (`Callable[[Task], Sequence[Mapping[str, Any]]]`):
                Schemas of the tools that a task may use.
            gather (`Callable[[list], list]`, *optional*):
                Joins a list with those of all other processes.
            rank (`int`, *optional*, defaults to `0`):
                Index of this process.

        Returns:
            `tuple[list[Trajectory], dict[str, Ratio]]`: The same with `roles` and `masked`, and what [`with_masks`] says
            about them.
        """
        found = [t if t.roles is not None else self.mark(t, tools_for(t.task)) for t in trajectories]
        return (found, {}) if self._rule is None else with_masks(found, self._rule, gather, rank)
