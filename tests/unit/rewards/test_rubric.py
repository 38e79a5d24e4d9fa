"""One reward of several parts, each still seen on its own."""

from collections import defaultdict
from typing import Any

import pytest
from helpers.attempts import attempt

from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards import Rubric, answer_match, call_penalty, format_reward
from mcp_grpo.types import ResultKind, StopReason


def constant(*rewards: Any) -> Any:
    return lambda trajectory, **kwargs: list(rewards)


def test_parts_are_weighed_and_added() -> None:
    rubric = Rubric({"a": constant(1.0, 0.0), "b": constant(0.5, 1.0)}, weights={"b": 0.2})
    assert rubric([attempt(), attempt()]) == pytest.approx([1.1, 0.2])


def test_a_gated_part_pays_only_where_its_gate_is_right_and_takes_in_any_case() -> None:
    parts = {"answer": constant(1.0, 0.0, 0.9), "form": constant(1.0, 1.0, 1.0), "calls": constant(0.3, -0.3, -0.1)}
    rubric = Rubric(parts, gates={"form": "answer", "calls": "answer"})
    assert rubric([attempt()] * 3) == pytest.approx([2.3, -0.3, 0.8])


def test_form_without_content_pays_nothing() -> None:
    rubric = Rubric({"answer": answer_match, "form": format_reward()}, gates={"form": "answer"}, weights={"form": 0.1})
    attempts = [attempt(text, answer=3) for text in ("Answer: 3", "Answer: 4", "3")]
    assert rubric(attempts) == pytest.approx([1.1, 0.0, 1.0])


def test_rewards_of_turns_stay_with_their_turns_and_the_rest_is_of_the_last() -> None:
    rubric = Rubric({"answer": answer_match, "calls": call_penalty()}, weights={"answer": 2.0, "calls": 0.5})
    wrong = attempt("3", answer=3, kinds=[[ResultKind.UNKNOWN_TOOL], [ResultKind.OK]])
    assert rubric([wrong]) == [pytest.approx([-0.05, 0.0, 2.0])]


def test_what_a_part_cannot_judge_has_no_reward() -> None:
    rubric = Rubric({"a": constant(1.0, 1.0), "judge": constant(None, 0.5)}, gates={"judge": "a"})
    assert rubric([attempt(), attempt()]) == [None, 1.5]


def test_each_part_is_logged_on_its_own() -> None:
    metrics, columns = defaultdict(list), {}
    rubric = Rubric({"a": constant(1.0, 0.0, 1.0, None), "b": constant([-0.1, -0.1], [0.0], [0.0], [0.0])})
    attempts = [attempt(kinds=[[]]), attempt(), attempt(stop_reason=StopReason.SERVER_FAILED), attempt()]
    rubric(
        attempts,
        log_metric=lambda name, value: metrics[name].append(value),
        log_extra=lambda column, values: columns.update({column: values}),
    )
    assert metrics["rewards/a/mean"] == [1.0, 0.0]
    assert metrics["rewards/b/mean"] == pytest.approx([-0.2, 0.0, 0.0])
    assert columns["reward_a"] == [1.0, 0.0, 1.0, None]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"parts": {}}, "at least one part"),
        ({"weights": {"c": 1.0}}, r"`weights` names \['c'\]"),
        ({"weights": {"a": float("nan")}}, "finite"),
        ({"gates": {"a": "c"}}, r"`gates` names \['c'\]"),
        ({"gates": {"a": "b", "b": "a"}}, "gates of their own"),
    ],
)
def test_a_rubric_that_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        Rubric(**{"parts": {"a": constant(), "b": constant()}} | options)


def test_a_part_that_forgets_a_trajectory_is_named() -> None:
    with pytest.raises(SettingsError, match="'a' returned 1 rewards for 2"):
        Rubric({"a": constant(1.0)})([attempt(), attempt()])
    with pytest.raises(SettingsError, match="'a' returned 3 rewards for a trajectory of 1 turns"):
        Rubric({"a": constant([0.0] * 3)})([attempt()])
