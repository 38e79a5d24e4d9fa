"""Rewards for the way there cannot be collected without getting there."""

from typing import Any

import pytest
from helpers.attempts import attempt
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.rewards import answer_match, call_penalty, efficiency, format_reward
from mcp_grpo.types import ResultKind


OK, ERROR, UNKNOWN = ResultKind.OK, ResultKind.TOOL_ERROR, ResultKind.UNKNOWN_TOOL
INVALID, MALFORMED = ResultKind.INVALID_ARGUMENTS, ResultKind.MALFORMED_CALL


@pytest.mark.parametrize(
    ("options", "message", "reward"),
    [
        ({}, "So.\nAnswer: 3", 1.0),
        ({}, "**Answer:** 3", 1.0),
        ({}, "The answer is 3", 0.0),
        ({}, None, 0.0),
        ({"answer_line": False}, "3", 1.0),
        ({"answer_line": False, "pattern": r"^\d+$"}, "3", 1.0),
        ({"answer_line": False, "pattern": r"^\d+$"}, "3 apples", 0.0),
        ({"max_length": 10}, "Answer: 3", 1.0),
        ({"max_length": 10}, "Answer: 3 apples", 0.0),
    ],
)
def test_the_form_of_the_final_message(options: dict[str, Any], message: str | None, reward: float) -> None:
    assert format_reward(**options)([attempt(message)]) == [reward]


def test_more_calls_than_needed_pay_less_and_fewer_no_more() -> None:
    reward = efficiency(answer_match)
    attempts = [attempt("3", answer=3, kinds=[[OK]] * calls, reference_calls=2) for calls in (0, 1, 2, 3, 4, 20)]
    assert reward(attempts) == [1.0, 1.0, 1.0, pytest.approx(2 / 3), 0.5, 0.1]


def test_a_wrong_outcome_pays_nothing_however_few_the_calls() -> None:
    reward = efficiency(answer_match, budget=2)
    assert reward([attempt("4", answer=3), attempt(None, answer=3), attempt("3", answer=3)]) == [0.0, 0.0, 1.0]


def test_turns_can_be_counted_instead() -> None:
    reward = efficiency(answer_match, budget=2, unit="turns")
    assert reward([attempt("3", answer=3, kinds=[[OK] * 5, [OK]])]) == [pytest.approx(2 / 3)]


def test_where_the_outcome_is_not_known_efficiency_is_not_either() -> None:
    reward = efficiency(lambda trajectory, **kwargs: [None, [0.5, 0.5]], budget=1)
    assert reward([attempt(), attempt()]) == [None, 1.0]


def test_an_outcome_that_is_asked_twice_logs_once() -> None:
    def outcome(trajectory: Any, log_metric: Any = None, **kwargs: Any) -> list[float]:
        assert log_metric is None
        return [1.0]

    assert efficiency(outcome, budget=1)([attempt()], log_metric=print, step=3) == [1.0]


def test_faults_cost_the_turns_that_made_them() -> None:
    kinds = [[OK, UNKNOWN], [ERROR], [INVALID, MALFORMED]]
    (turns,) = call_penalty()([attempt("3", kinds=kinds)])
    assert turns == pytest.approx([-0.1, 0.0, -0.2, 0.0])
    (turns,) = call_penalty(tool_error=0.05)([attempt("3", kinds=kinds)])
    assert turns == pytest.approx([-0.1, -0.05, -0.15, 0.0])


def test_an_answer_without_a_call_may_cost_as_much_as_calls_that_fail() -> None:
    silent, trying = attempt("3"), attempt("3", kinds=[[MALFORMED], [OK]])
    assert [sum(turns) for turns in call_penalty()([silent, trying])] == pytest.approx([0.0, -0.1])
    assert [sum(turns) for turns in call_penalty(no_call=0.3)([silent, trying])] == pytest.approx([-0.3, -0.1])
    assert [sum(turns) for turns in call_penalty(no_call=0.5)([silent])] == pytest.approx([-0.3])  # the cap


@given(st.lists(st.lists(st.sampled_from(list(ResultKind)), max_size=5), max_size=6))
def test_penalties_never_pay_and_never_outweigh_an_outcome(kinds: list[list[ResultKind]]) -> None:
    (turns,) = call_penalty(tool_error=0.02)([attempt("3", kinds=kinds)])
    assert len(turns) == len(kinds) + 1
    assert all(turn <= 0 for turn in turns)
    assert sum(turns) >= -0.3 - 1e-9


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: format_reward("("), r"'\('"),
        (lambda: format_reward(max_length=0), "`max_length`"),
        (lambda: efficiency(answer_match, budget=0), "`budget`"),
        (lambda: efficiency(answer_match, unit="steps"), "'steps'"),  # type: ignore[arg-type]
        (lambda: call_penalty(fault=-0.1), "`fault`"),
        (lambda: call_penalty(cap=1.0), "`cap`"),
    ],
)
def test_settings_that_make_no_sense_are_refused(make: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


def test_a_task_without_a_budget_is_named() -> None:
    with pytest.raises(TaskFormatError, match="`reference_calls` of task 't'"):
        efficiency(answer_match)([attempt("3", answer=3)])
