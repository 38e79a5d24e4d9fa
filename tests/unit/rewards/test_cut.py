"""A trajectory that did not come to an answer of its own is right in no reward, and better than an answered one in none."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.attempts import attempt

import mcp_grpo.rewards
from mcp_grpo.desk.reward import desk_outcome, desk_reward
from mcp_grpo.evaluation import summarize
from mcp_grpo.rewards import (
    Rubric,
    answer_match,
    call_penalty,
    efficiency,
    exact_answer,
    fault_penalty,
    format_reward,
    is_answered,
    is_as_expected,
    is_done,
    is_matched,
    state_match,
    task_outcome,
)
from mcp_grpo.rewards.shape import total
from mcp_grpo.types import ResultKind, StopReason, Trajectory


POSTED = {"slack": {"added": [{"text": "3"}]}}
CUT = [reason for reason in StopReason if reason is not StopReason.ANSWERED]
REWARDS: dict[str, Callable[..., list[Any]]] = {
    "exact_answer": exact_answer,
    "answer_match": answer_match,
    "state_match": state_match,
    "task_outcome": task_outcome,
    "desk_reward": desk_reward(),
    "desk_outcome": desk_outcome,
    "format_reward": format_reward(answer_line=False),
    "efficiency": efficiency(task_outcome, budget=1),
    "Rubric": Rubric({"state": state_match, "form": format_reward(answer_line=False)}, gates={"form": "state"}),
    "fault_penalty": fault_penalty,
    "call_penalty": call_penalty(),
}
PENALTIES = ("fault_penalty", "call_penalty")
WITH_A_MODEL = ("Judge",)  # see `test_judge.py`


def right(**changes: Any) -> Trajectory:
    """A trajectory that did all it was asked for."""
    return replace(attempt("3", answer=3, expected_state=POSTED, states=POSTED, kinds=[[ResultKind.OK]]), **changes)


def without_answer(trajectory: Trajectory) -> Trajectory:
    """The same task, of which only the state is expected."""
    return replace(trajectory, task=replace(trajectory.task, answer=None))


def worth(name: str, trajectory: Trajectory) -> float:
    return total(REWARDS[name](trajectory=[trajectory])[0])


def test_no_reward_that_ships_is_left_out_here() -> None:
    predicates = {"is_answered", "is_as_expected", "is_done", "is_matched", "matches_answer", "matches_state"}
    ships = {*mcp_grpo.rewards.__all__, "desk_reward", "desk_outcome"} - {"AnswerWords"}
    assert {*REWARDS, *WITH_A_MODEL, *predicates} == ships


@pytest.mark.parametrize("reason", CUT)
@pytest.mark.parametrize("name", [name for name in REWARDS if name not in PENALTIES])
def test_what_was_cut_is_not_paid_whatever_it_did_and_wrote_before(name: str, reason: StopReason) -> None:
    assert worth(name, right()) >= 1
    assert worth(name, right(stop_reason=reason)) <= 0


@pytest.mark.parametrize("reason", CUT)
def test_nor_is_it_where_only_the_state_was_asked_for(reason: StopReason) -> None:
    assert is_done(without_answer(right()))
    cut = without_answer(right(stop_reason=reason))
    assert not is_done(cut)
    assert not is_as_expected(cut)
    assert not any(check(right(stop_reason=reason)) for check in (is_done, is_as_expected, is_matched, is_answered))


@pytest.mark.parametrize("message", ["", " \n"])
def test_a_turn_that_says_nothing_is_no_answer(message: str) -> None:
    silent = without_answer(right(messages=({"role": "assistant", "content": message},)))
    assert silent.answer is None
    assert not is_done(silent)


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("num_faults", [0, 1, 2, 3, 5])
def test_being_cut_is_no_way_around_a_penalty(name: str, num_faults: int) -> None:
    faults = [[ResultKind.MALFORMED_CALL]] * num_faults
    answered, cut = attempt("wrong", answer=3, kinds=faults), attempt("rambles on", stop_reason=StopReason.MAX_TOKENS)
    assert worth(name, cut) <= worth(name, answered) <= 0
    assert worth(name, cut) == pytest.approx(-0.3)


def test_what_being_cut_costs_is_the_last_turn_s_and_is_under_the_same_cap() -> None:
    kinds = [[ResultKind.UNKNOWN_TOOL], [ResultKind.OK]]
    (turns,) = call_penalty()([attempt("rambles on", kinds=kinds, stop_reason=StopReason.MAX_TOKENS)])
    assert turns == pytest.approx([-0.1, 0.0, -0.2])
    (turns,) = call_penalty(cap=0.0)([attempt("rambles on", kinds=kinds, stop_reason=StopReason.MAX_TOKENS)])
    assert turns == [0.0, 0.0, 0.0]


def test_an_evaluation_counts_no_cut_trajectory_as_a_success() -> None:
    found = [right(), right(stop_reason=StopReason.MAX_TOKENS), right(stop_reason=StopReason.MAX_TURNS)]
    found = [without_answer(one) for one in found]
    assert summarize(found, is_done).success == pytest.approx(1 / 3)
