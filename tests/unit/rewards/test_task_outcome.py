"""A task is done where its answer and its state are right, and were not guessed: tools were asked what it is about."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from helpers.attempts import attempt

from mcp_grpo.desk.reward import desk_reward
from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards import is_done, task_outcome
from mcp_grpo.types import Exchange, ResultKind, ToolCall, ToolResult, Trajectory


QUESTION = "What was the revenue of the Ostermark Aviation Corp. in fiscal 2023? If there is no such data, say so."
REFUSED = "Answer: no data available"


def looked(
    arguments: Mapping[str, Any] | None,
    kind: ResultKind = ResultKind.OK,
    *,
    message: str = REFUSED,
    question: str = QUESTION,
    **metadata: Any,
) -> Trajectory:
    """A refusal after one call, or none."""
    made = attempt(message, answer={"type": "refusal"}, **metadata)
    exchange = Exchange(
        call=ToolCall(name="look", arguments=arguments or {}), result=ToolResult(text="", kind=kind), turn=0
    )
    task = replace(
        made.task, prompt=({"role": "system", "content": "Be Brief."}, {"role": "user", "content": question})
    )
    return replace(made, task=task, exchanges=() if arguments is None else (exchange,))


@pytest.mark.parametrize("kind", [ResultKind.OK, ResultKind.TOOL_ERROR])
@pytest.mark.parametrize(
    "arguments",
    [
        {"symbol": "OSTM.L"},
        {"symbols": ["VLTA", "OSTM.L"]},
        {"symbol": "ostm.l"},
        {"filters": [{"symbol": "OSTM.L", "name": "Ostermark Aviation Corp."}]},
    ],
)
def test_a_refusal_is_paid_after_a_look_at_what_was_asked_about(arguments: dict[str, Any], kind: ResultKind) -> None:
    assert is_done(looked(arguments, kind, symbols=["OSTM.L"]))


@pytest.mark.parametrize(
    "arguments",
    [
        None,
        {},
        {"symbol": "VLTA"},
        {"symbol": "OSTM"},
        {"query": "Aviation"},
        {"query": "revenue"},
        {"query": "What"},
        {"query": "If"},
        {"query": "Ostermarkt"},
        {"query": "Ostermark"},  # that there is such a company says nothing about its data
        {"query": "ostermark aviation revenue"},
    ],
)
def test_a_refusal_is_not_paid_after_a_look_elsewhere(arguments: dict[str, Any] | None) -> None:
    assert not is_done(looked(arguments, symbols=["OSTM.L"]))


@pytest.mark.parametrize(
    "kind",
    [
        ResultKind.TIMEOUT,
        ResultKind.SERVER_ERROR,
        ResultKind.UNKNOWN_TOOL,
        ResultKind.INVALID_ARGUMENTS,
        ResultKind.MALFORMED_CALL,
    ],
)
def test_a_call_that_got_no_answer_is_no_look(kind: ResultKind) -> None:
    assert not is_done(looked({"symbol": "OSTM.L"}, kind, symbols=["OSTM.L"]))
    assert not is_done(looked({"symbol": "OSTM.L"}, kind))


def test_of_a_company_without_a_symbol_the_name_counts() -> None:
    assert is_done(looked({"query": "Ostermark"}, symbols=[]))
    assert is_done(looked({"query": "Ostermark"}, symbols=[], question="What is Ostermark's revenue?"))
    assert not is_done(looked({"query": "Volta"}, symbols=[]))


def test_of_a_task_that_does_not_say_what_it_is_about_any_look_counts() -> None:
    assert is_done(looked({"query": "anything"}))
    assert is_done(looked({}))
    assert is_done(looked({"query": "anything"}, symbols=[], question="how much was it?"))
    assert not is_done(looked(None))
    assert not is_done(looked(None, symbols=[], question="how much was it?"))


def guessed(*arguments: Mapping[str, Any], question: str = QUESTION, **metadata: Any) -> Trajectory:
    """A right answer, after some calls that each got an answer."""
    made = looked({}, message="Answer: 3", question=question, **metadata)
    exchanges = [replace(made.exchanges[0], call=ToolCall(name="look", arguments=one)) for one in arguments]
    return replace(made, task=replace(made.task, answer=3), exchanges=tuple(exchanges))


def test_a_right_guess_is_not_paid() -> None:
    assert not is_done(guessed(symbols=["OSTM.L"]))
    assert not is_done(guessed({"symbol": "VLTA"}, symbols=["OSTM.L"]))
    assert is_done(guessed({"symbol": "OSTM.L"}, symbols=["OSTM.L"]))
    assert is_done(guessed({"query": "ostermark revenue"}, symbols=["OSTM.L"]))  # a page may have said it
    assert is_done(guessed())  # of what it is about nothing is known


def test_of_several_companies_each_must_have_been_looked_at() -> None:
    question, symbols = "Which is larger: Ostermark Aviation, Volta Grid or Umber Foods?", ["OSTM.L", "VLTA", "UMB"]
    looks = [{"symbol": symbol} for symbol in symbols]
    names = [{"query": name} for name in ("Ostermark", "Volta", "Umber")]
    assert is_done(guessed(*looks, symbols=symbols, question=question))
    assert is_done(guessed({"symbols": "OSTM.L,VLTA,UMB"}, symbols=symbols, question=question))
    assert not is_done(guessed(*names, symbols=symbols, question=question))
    for left_out in range(3):
        some = [*looks[:left_out], *looks[left_out + 1 :]]
        assert not is_done(guessed(*names, *some, symbols=symbols, question=question))


def test_a_look_that_got_no_answer_is_none_for_any_answer() -> None:
    made = guessed({"symbol": "OSTM.L"}, symbols=["OSTM.L"])
    failed = replace(made.exchanges[0], result=ToolResult(text="", kind=ResultKind.INVALID_ARGUMENTS))
    assert not is_done(replace(made, exchanges=(failed,)))


@pytest.mark.parametrize(
    "message",
    [
        "I cannot be bothered.",
        "Answer: this is not financial advice",
        "The answer is not simple.",
        "Answer: none",
        "Answer: 3",
    ],
)
def test_what_is_no_refusal_is_not_paid_after_any_look(message: str) -> None:
    assert not is_done(looked({"symbol": "OSTM.L"}, message=message, symbols=["OSTM.L"]))


def test_an_answer_and_a_state_are_both_wanted_where_both_are_given() -> None:
    state = {"slack": {"added": [{"text": "done"}]}}
    right, wrong = {"slack": {"added": [{"text": "done"}]}}, {"slack": {"added": []}}
    attempts = [
        attempt("3", answer=3, expected_state=state, states=right),
        attempt("4", answer=3, expected_state=state, states=right),
        attempt("3", answer=3, expected_state=state, states=wrong),
        attempt("done", expected_state=state, states=right),
        attempt("3", answer=3),
    ]
    assert task_outcome(attempts) == [1.0, 0.0, 0.0, 1.0, 1.0]
    with pytest.raises(TaskFormatError, match="neither an `answer` nor"):
        task_outcome([attempt("3")])


def test_the_desk_pays_the_outcome_less_a_little_for_faults() -> None:
    (rewards,) = desk_reward()([attempt("3", answer=3, kinds=[[ResultKind.UNKNOWN_TOOL], [ResultKind.OK]])])
    assert sum(rewards) < 1.0
    assert sum(rewards) > 0.5
