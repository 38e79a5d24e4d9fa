"""What was left behind is what was expected, and nothing else."""

from typing import Any

import pytest
from helpers.attempts import attempt

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards import is_as_expected, matches_state, state_match
from mcp_grpo.types import StopReason


NUMBER = {"type": "number", "value": 12.5, "unit": "million", "tolerance": 0.01}


def post(text: str, channel: str = "earnings", **fields: Any) -> dict[str, Any]:
    return {
        "kind": "post",
        "channel": channel,
        "channel_id": "C01",
        "thread_ts": None,
        "ts": "1",
        "text": text,
    } | fields


EXPECTED = {"slack": {"added": [{"kind": "post", "channel": "earnings", "text": {"contains": ["VLTA", NUMBER]}}]}}
RIGHT = post("Revenue of VLTA: $12.5 million")


@pytest.mark.parametrize(
    ("added", "reward"),
    [
        ([RIGHT], 1.0),
        ([post("vlta made 12.5M in 2023")], 1.0),
        ([], 0.0),
        ([post("Revenue of VLTA: $13 million")], 0.0),
        ([post("Revenue: $12.5 million")], 0.0),
        ([post("Revenue of VLTA: $12.5 million", "general")], 0.0),
        ([RIGHT, RIGHT], 0.0),
        ([RIGHT, post("Sorry, that was for me.", "general")], 0.0),
        ([RIGHT, post("", kind="reaction", reaction="eyes")], 0.0),
        ([post("VLTA " + " ".join(f"{n}.5 million" for n in range(20)))], 0.0),
        ([post("VLTA 12.5 million " + "x" * 2000)], 0.0),
    ],
)
def test_the_right_post_pays_and_one_too_many_costs_all(added: list[Any], reward: float) -> None:
    assert state_match([attempt(expected_state=EXPECTED, states={"slack": {"added": added}})]) == [reward]


def test_what_is_not_named_must_be_empty() -> None:
    expected = {"slack": {"posts": []}}
    assert is_as_expected(attempt(expected_state=expected, states={"slack": {"posts": [], "reactions": []}}))
    assert not is_as_expected(attempt(expected_state=expected, states={"slack": {"posts": [], "reactions": [{}]}}))
    anything = {"slack": {"posts": [], "reactions": {"any": True}}}
    assert is_as_expected(attempt(expected_state=anything, states={"slack": {"posts": [], "reactions": [{}]}}))


def test_every_named_server_counts() -> None:
    expected = {"a": {"n": 1}, "b": {"n": 2}, "filled in by a dataset": None}
    assert is_as_expected(attempt(expected_state=expected, states={"a": {"n": 1}, "b": {"n": 2}, "c": {"n": 3}}))
    assert not is_as_expected(attempt(expected_state=expected, states={"a": {"n": 1}, "b": {"n": 3}}))


def test_a_trajectory_that_ran_out_of_turns_has_done_nothing() -> None:
    states = {"slack": {"added": [RIGHT]}}
    assert is_as_expected(attempt("done", expected_state=EXPECTED, states=states))
    assert not is_as_expected(attempt(None, expected_state=EXPECTED, states=states))
    assert not is_as_expected(attempt(None, expected_state=EXPECTED, stop_reason=StopReason.SERVER_FAILED))


@pytest.mark.parametrize(
    ("got", "expected", "is_match"),
    [
        (3, 3.0, True),
        (True, 1, False),
        (1, True, False),
        (None, None, True),
        (0, None, False),
        ("a ", "a", True),
        ("A", "a", False),
        ({"a": 1, "b": 2}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": None}, False),
        ([1, 2], [1, 2], True),
        ([2, 1], [1, 2], False),
        ([1, 2, 3], [1, 2], False),
        ([2, 1], {"any_order": [1, 2]}, True),
        ([2, 1, 1], {"any_order": [1, 2]}, False),
        ([1, 1], {"any_order": [1, 2]}, False),
        ([{"x": 1}, {"x": 1, "y": 2}], {"any_order": [{"x": 1, "y": 2}, {"x": 1}]}, True),
        ([{"x": 1, "y": 2}, {"x": 1}], {"any_order": [{"x": 1}, {"x": 1, "y": 2}]}, True),
        ("b", {"one_of": ["a", "b"]}, True),
        ("c", {"one_of": ["a", "b"]}, False),
        ("The  Cat sat", {"contains": "the cat"}, True),
        ("The cat sat", {"contains": ["cat", "dog"]}, False),
        (["cat"], {"contains": "cat"}, False),
        ("Revenue in 2023: $12.5 million", {"only": [NUMBER]}, True),
        ("Revenue in 2023: $12.5 million", {"only": NUMBER}, True),
        ("$12.5 million in 2023, $11 million in 2022", {"only": [NUMBER]}, False),
        ("Revenue: 12.5 million of VLTA", {"only": [NUMBER, "VLTA"]}, True),
        ("Revenue: 12.5 million", {"only": [NUMBER, "VLTA"]}, False),
        (12.5, {"only": [NUMBER]}, False),
        (12_490_000, NUMBER, True),
        (13_000_000, NUMBER, False),
        ("Answer: 12.5M", NUMBER, True),
        (True, {"type": "boolean", "value": True}, True),
        ([1], NUMBER, False),
        ({"any": 1}, {"equals": {"any": 1}}, True),
        ({"any": 2}, {"equals": {"any": 1}}, False),
        ([1, {"a": 2}], {"any": True}, True),
        ("x", {"a": 1}, False),
        ("x", ["x"], False),
    ],
)
def test_json_is_compared_as_the_expectation_says(got: Any, expected: Any, is_match: bool) -> None:
    assert matches_state(got, expected) is is_match


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        (None, "no `expected_state`"),
        ({}, "no `expected_state`"),
        ({"mail": {}}, r"'mail'.*\['slack'\].*`state_tool`"),
        ({"slack": {"added": {"contains": ["a"], "channel": "b"}}}, "'contains' with other keys"),
        ({"slack": {"added": {"any_order": 3}}}, "'any_order' takes a list"),
        ({"slack": {"added": {"only": 3}}}, "'only' takes a list"),
        ({"slack": {"added": {"type": "colour"}}}, "'colour'"),
        (
            {"slack": {"added": [{"text": {"contains": [{"type": "colour"}]}}]}},
            "'colour'",
        ),  # nothing was added to compare
        ("posted", "must be an object"),
    ],
)
def test_an_expectation_that_makes_no_sense_names_the_task(expected: Any, words: str) -> None:
    with pytest.raises(TaskFormatError, match=words) as caught:
        state_match([attempt(expected_state=expected, states={"slack": {"added": []}})])
    assert "'t'" in str(caught.value)
