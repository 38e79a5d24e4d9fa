"""Which forced tokens are masked, and which come back."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.masking.mask import MaskRule, SchemaMask, with_masks, with_roles
from mcp_grpo.types import (
    Exchange,
    ResultKind,
    Segment,
    StopReason,
    Task,
    TokenRole,
    ToolCall,
    ToolResult,
    Trajectory,
)


TASK = Task(task_id="t", prompt=({"role": "user", "content": "?"},))
C, F, S, T = TokenRole.CHOICE, TokenRole.FORCED, TokenRole.STRADDLING, TokenRole.TRIGGER
ALL = MaskRule(min_unforced_tokens=0, min_unforced_fraction=0.0)


def exchange(turn: int, kind: ResultKind = ResultKind.OK) -> Exchange:
    return Exchange(call=ToolCall(name="f", arguments={}), result=ToolResult(text="r", kind=kind), turn=turn)


def trajectory(
    probs: Sequence[float],
    roles: Sequence[TokenRole] | None = None,
    exchanges: Sequence[Exchange] = (exchange(0),),
    stop_reason: StopReason = StopReason.ANSWERED,
) -> Trajectory:
    turn = Segment(token_ids=tuple(range(len(probs))), logprobs=tuple(math.log(p) for p in probs))
    return Trajectory(
        task=TASK,
        prompt_ids=(0,),
        segments=(turn,),
        messages=({"role": "assistant", "content": ""},),
        exchanges=tuple(exchanges),
        stop_reason=stop_reason,
        roles=None if roles is None else tuple(roles),
    )


def all_forced(segment: Segment, tools: Sequence[Any]) -> tuple[TokenRole, ...]:
    """Takes every token for syntax."""
    return (F,) * len(segment.token_ids)


def masked(*trajectories: Trajectory, rule: MaskRule = ALL) -> list[tuple[bool, ...] | None]:
    return [t.masked for t in with_masks(trajectories, rule)[0]]


def test_only_forced_tokens_that_were_almost_certain_are_masked() -> None:
    roles, probs = [T, F, F, S, C], [1.0, 0.995, 0.98, 1.0, 1.0]
    assert masked(trajectory(probs, roles)) == [(False, True, False, False, False)]


def test_without_a_smallest_probability_all_syntax_is_masked() -> None:
    rule = MaskRule(min_prob=0.0, min_unforced_tokens=0, min_unforced_fraction=0.0)
    assert masked(trajectory([0.001, 0.5, 1.0], [F, F, C]), rule=rule) == [(True, True, False)]


def test_a_trajectory_that_failed_has_nothing_to_mask_and_does_not_count() -> None:
    failed = trajectory([1.0] * 9, [F] * 9, stop_reason=StopReason.SERVER_FAILED)
    done, metrics = with_masks([failed, trajectory([1.0, 0.5], [F, C])], ALL)
    assert [t.masked for t in done] == [(False,) * 9, (True, False)]
    assert (metrics["mask/masked_fraction"].total, metrics["mask/masked_fraction"].count) == (1, 2)


def test_a_short_call_keeps_the_floor_and_the_least_probable_tokens_come_back_first() -> None:
    probs = [0.999 - 0.0001 * i for i in range(20)]
    done, metrics = with_masks([trajectory([*probs, 0.5, 0.5], [F] * 20 + [C] * 2)], MaskRule())
    (mask,) = (t.masked for t in done)
    assert mask is not None
    assert sum(not m for m in mask) == 16
    assert mask[:6] == (True,) * 6  # the most probable ones
    assert not any(mask[6:])
    assert metrics["mask/relaxed_fraction"].total / metrics["mask/relaxed_fraction"].count == 14 / 20


def test_a_share_of_the_tokens_stays_in_the_loss_of_a_long_call() -> None:
    done, _ = with_masks([trajectory([1.0] * 1000, [F] * 900 + [C] * 100)], MaskRule())
    assert sum(not m for m in done[0].masked or ()) == 300


def test_the_floor_holds_for_all_processes_together() -> None:
    likely, unlikely = trajectory([1.0] * 20, [F] * 20), trajectory([0.995] * 20, [F] * 20)
    lists = {"counts": [(20, 20), (20, 20)], "logprobs": [[0.0] * 20, [math.log(0.995)] * 20]}

    def gather(own: list[Any]) -> list[Any]:
        return lists["counts"] if isinstance(own[0], tuple) else lists["logprobs"]

    first, _ = with_masks([likely], MaskRule(), gather, rank=0)
    second, _ = with_masks([unlikely], MaskRule(), gather, rank=1)
    assert sum(not m for m in first[0].masked or ()) == 0
    assert sum(not m for m in second[0].masked or ()) == 16


@given(
    st.lists(st.tuples(st.sampled_from([C, F, S, T]), st.floats(0.01, 1.0)), min_size=1, max_size=60),
    st.integers(0, 30),
    st.floats(0, 1),
)
def test_the_floors_hold_whenever_they_can(tokens: list[tuple[TokenRole, float]], floor: int, share: float) -> None:
    rule = MaskRule(min_unforced_tokens=floor, min_unforced_fraction=share)
    (mask,) = masked(trajectory([p for _, p in tokens], [r for r, _ in tokens]), rule=rule)
    assert mask is not None
    active = sum(not m for m in mask)
    assert active >= min(len(tokens), max(floor, math.ceil(share * len(tokens))))
    assert all(role is F for role, m in zip((r for r, _ in tokens), mask, strict=True) if m)


def test_the_loss_looks_at_what_was_sampled_and_is_not_masked() -> None:
    (done,), _ = with_masks([trajectory([1.0, 1.0, 0.5], [F, C, C])], ALL)
    assert done.loss_mask == (0, 1, 1)


@pytest.mark.parametrize(
    "kind", [ResultKind.INVALID_ARGUMENTS, ResultKind.UNKNOWN_TOOL, ResultKind.MALFORMED_CALL], ids=str
)
def test_a_turn_with_a_call_that_could_not_be_made_has_nothing_but_choices(kind: ResultKind) -> None:
    found = with_roles(trajectory([1.0] * 3, exchanges=[exchange(0), exchange(0, kind)]), all_forced, [])
    assert found.roles == (C, C, C)


def test_a_turn_without_a_call_has_nothing_but_choices() -> None:
    assert with_roles(trajectory([1.0] * 3, exchanges=[]), all_forced, []).roles == (C, C, C)


def test_a_tool_that_answers_with_an_error_was_called_in_the_right_form() -> None:
    found = with_roles(trajectory([1.0] * 3, exchanges=[exchange(0, ResultKind.TOOL_ERROR)]), all_forced, [])
    assert found.roles == (F, F, F)


@pytest.mark.parametrize("rule", [None, ALL, MaskRule()], ids=["no rule", "no floors", "floors"])
def test_a_batch_of_trajectories_that_were_marked_as_they_ended_is_masked_like_one_that_was_not(
    rule: MaskRule | None,
) -> None:
    mask = SchemaMask(all_forced, rule)
    batch = [
        trajectory([0.999, 0.5, 1.0]),
        trajectory([1.0] * 30, stop_reason=StopReason.SERVER_FAILED),
        trajectory([1.0] * 3, exchanges=[]),
        trajectory([0.991 + 0.0001 * i for i in range(40)]),
    ]
    marked = [mask.mark(attempt, []) for attempt in batch]
    assert all(attempt.roles is not None for attempt in marked)
    assert mask(marked, lambda _: pytest.fail("There is nothing left to look at.")) == mask(batch, lambda _: [])


def test_a_trajectory_that_is_left_out_after_it_was_marked_has_no_part_in_the_floors() -> None:
    mask = SchemaMask(all_forced, MaskRule())
    left_out = replace(mask.mark(trajectory([0.992] * 50), []), left_out=True)
    (_, other), metrics = mask([left_out, mask.mark(trajectory([0.995] * 20), [])], lambda _: [])
    assert sum(not m for m in other.masked or ()) == 16
    assert (metrics["mask/relaxed_fraction"].total, metrics["mask/relaxed_fraction"].count) == (16, 20)
    assert metrics["mask/forced_fraction"].count == 20
