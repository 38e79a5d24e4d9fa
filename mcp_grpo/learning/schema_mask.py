"""Which tokens of a tool call leave the policy loss, because the policy had no choice in them."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from mcp_grpo.learning.diagnostics import Ratio
from mcp_grpo.types import Segment, Task, TokenRole, Trajectory


Gather = Callable[[list[Any]], list[Any]]

Candidate = tuple[int, int]
"""A token that could be masked: its trajectory and its place."""


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


def with_masks(
    trajectories: Sequence[Trajectory], rule: MaskRule, gather: Gather = list, rank: int = 0
) -> tuple[list[Trajectory], dict[str, Ratio]]:
    """
    Choose the tokens that the policy loss leaves out.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Trajectories with roles, of this process.
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
    least = math.log(rule.min_prob) if rule.min_prob > 0 else -math.inf
    maskable = [TokenRole.FORCED, *([TokenRole.TRIGGER] if rule.mask_trigger else [])]
    masked = [[False] * len(trajectory.completion_ids) for trajectory in trajectories]
    candidates: list[Candidate] = []
    num_sampled = num_forced = num_straddling = 0
    for row, trajectory in enumerate(trajectories):
        if not trajectory.is_learnt_from:
            continue
        assert trajectory.roles is not None
        num_sampled += sum(len(segment.token_ids) for segment in trajectory.segments if segment.sampled)
        num_forced += trajectory.roles.count(TokenRole.FORCED)
        num_straddling += trajectory.roles.count(TokenRole.STRADDLING)
        logprobs = trajectory.logprobs
        for place in sorted(place for role in maskable for place in _places(trajectory.roles, role)):
            if logprobs[place] >= least:
                candidates.append((row, place))
                masked[row][place] = True
    relaxed = _relaxed(candidates, trajectories, num_sampled, rule, gather, rank)
    for row, place in relaxed:
        masked[row][place] = False
    return [replace(t, masked=tuple(own)) for t, own in zip(trajectories, masked, strict=True)], {
        "mask/masked_fraction": Ratio(total=len(candidates) - len(relaxed), count=num_sampled),
        "mask/forced_fraction": Ratio(total=num_forced, count=num_sampled),
        "mask/straddling_fraction": Ratio(total=num_straddling, count=num_sampled),
        "mask/relaxed_fraction": Ratio(total=len(relaxed), count=len(candidates)),
    }


def _places(roles: tuple[TokenRole, ...], role: TokenRole) -> Iterator[int]:
    """Where a role stands, without a look in Python at every token."""
    place = -1
    for _ in range(roles.count(role)):
        place = roles.index(role, place + 1)
        yield place


def _relaxed(
    candidates: list[Candidate],
    trajectories: Sequence[Trajectory],
    num_sampled: int,
    rule: MaskRule,
    gather: Gather,
    rank: int,
) -> list[Candidate]:
    """The candidates of this process that come back, the least probable of all processes first."""
    counts = gather([(num_sampled, len(candidates))])
    num_to_relax = rule.num_to_relax(sum(count for count, _ in counts), sum(count for _, count in counts))
    if not num_to_relax:
        return []
    # One list for each process, in the order of ranks.
    logprobs = gather([[trajectories[row].logprobs[place] for row, place in candidates]])
    everyone = sorted(
        (logprob, owner, index) for owner, own in enumerate(logprobs) for index, logprob in enumerate(own)
    )
    return [candidates[index] for _, owner, index in everyone[:num_to_relax] if owner == rank]


class SchemaMask:
    """
    Tells syntax from choices in trajectories, and chooses what the policy loss leaves out.

    Args:
        roles_of (`Callable`):
            Looks at one turn: gets its segment and the schemas of the tools, returns one role per token.
        rule (`MaskRule`, *optional*):
            Which tokens to leave out. `None` leaves none out, and only tells syntax from choices.
    """

    def __init__(self, roles_of: RolesOf, rule: MaskRule | None) -> None:
        self._roles_of = roles_of
        self._rule = rule

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
                Finished trajectories of this process.
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
        found = [with_roles(trajectory, self._roles_of, tools_for(trajectory.task)) for trajectory in trajectories]
        return (found, {}) if self._rule is None else with_masks(found, self._rule, gather, rank)
