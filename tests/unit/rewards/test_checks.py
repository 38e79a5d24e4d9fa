"""Rewards that cannot be computed are found before anything was attempted, for all tasks at once."""

from functools import partial
from typing import Any

import mcp.types
import pytest

from mcp_grpo.desk.reward import desk_reward
from mcp_grpo.errors import CatalogError, SettingsError, TaskFormatError
from mcp_grpo.rewards import (
    Judge,
    Rubric,
    answer_match,
    call_penalty,
    efficiency,
    exact_answer,
    fault_penalty,
    format_reward,
    state_match,
    task_outcome,
)
from mcp_grpo.rewards.checks import check_calls, check_tasks, is_computed_early, reward_problems
from mcp_grpo.tools import Catalog
from mcp_grpo.types import Task


CATALOG = Catalog.from_servers(
    {
        server: [mcp.types.Tool(name=name, input_schema={}) for name in names]
        for server, names in {"slack": ["post"], "finance": ["quote"]}.items()
    }
)
STATE = {"slack": {"added": []}}


def task(task_id: str = "t", answer: Any = None, tools: tuple[str, ...] | None = None, **metadata: Any) -> Task:
    prompt = ({"role": "user", "content": "How much?"},)
    return Task(task_id=task_id, prompt=prompt, answer=answer, tools=tools, metadata=metadata)


def own(trajectory: list[Any], **kwargs: Any) -> list[float]:
    raise AssertionError("a function of somebody's own is not called on a trajectory that nobody made")


def problems(reward: Any, *tasks: Task) -> list[str]:
    return reward_problems(tasks, reward, CATALOG, ("slack",))


@pytest.mark.parametrize("reward", [exact_answer, answer_match, task_outcome, partial(exact_answer, note=1)])
def test_tasks_without_answers_are_counted_and_told_of_together(reward: Any) -> None:
    tasks = [task(f"t{n}") for n in range(5)]
    (problem,) = problems([reward], task("fine", "3"), *tasks)
    assert "5 tasks ('t0', 't1', 't2' and 2 more): Task 't0' has" in problem
    assert "`answer`" in problem
    assert problems(reward, task(answer="3")) == []


@pytest.mark.parametrize(
    ("reward", "wrong", "words"),
    [
        (answer_match, task(answer={"type": "colour"}), "'colour'"),
        (desk_reward(), task(), "`desk_outcome`, 1 task ('t')"),
        (state_match, task(), "no `expected_state`"),
        (
            state_match,
            task(expected_state={"slak": {}}),
            "'slak', whose state is unknown; known are those of ['slack']",
        ),
        (
            state_match,
            task(expected_state=STATE, tools=("quote",)),
            "'slack', whose state is unknown; known are those of []",
        ),
        (task_outcome, task(answer={"type": "colour"}, expected_state=STATE), "'colour'"),
        (efficiency(exact_answer), task(answer="3"), "`reference_calls` of task 't'"),
        (efficiency(exact_answer), task(reference_calls=3), "no `answer`"),
        (Rubric({"answer": answer_match, "own": own}), task(), "no `answer`"),
    ],
)
def test_what_a_reward_of_ours_needs_is_looked_for(reward: Any, wrong: Task, words: str) -> None:
    (problem,) = problems(reward, wrong)
    assert words in problem


@pytest.mark.parametrize(
    "reward",
    [
        own,
        Rubric({"own": own, "calls": call_penalty()}),
        efficiency(own),
        Judge("http://127.0.0.1:1", "nobody"),
        efficiency(Judge("http://127.0.0.1:1", "nobody")),
        "somebody/reward-model",
        None,
    ],
)
def test_functions_of_others_and_judges_are_not_called(reward: Any) -> None:
    assert problems(reward, task()) == []
    assert not is_computed_early(reward)


@pytest.mark.parametrize(
    "reward", [fault_penalty, call_penalty(), format_reward(), efficiency(exact_answer, budget=3)]
)
def test_every_reward_of_ours_can_be_computed_for_an_attempt_that_did_nothing(reward: Any) -> None:
    assert problems(reward, task(answer="3")) == []
    assert is_computed_early(reward)


def test_wrong_names_and_missing_answers_are_told_at_once() -> None:
    with pytest.raises(
        CatalogError, match=r"(?s)tool 'quot3' \(1 task: 'a'\).*`quote`.*1 task \('b'\): Task 'b' has no"
    ):
        check_tasks([task("a", "3", tools=("quot3",)), task("b")], exact_answer, CATALOG)
    with pytest.raises(TaskFormatError, match=r"no `answer`"):
        check_tasks([task("b")], exact_answer, CATALOG)
    check_tasks([task("a", "3")], exact_answer, CATALOG)


def test_a_function_that_cannot_take_what_it_is_given_is_refused_without_calling_it() -> None:
    def narrow(completions: Any) -> list[float]:
        raise AssertionError

    def wants(trajectory: Any, colour: Any, **kwargs: Any) -> list[float]:
        raise AssertionError

    columns = ["task_id", "prompt", "answer"]
    with pytest.raises(SettingsError, match=r"(?s)`narrow` cannot be called: .*`wants`.*'colour'.*`\*\*kwargs`"):
        check_calls([narrow, wants, own], columns)
    check_calls([wants, own, exact_answer, desk_reward(), "somebody/reward-model"], [*columns, "colour"])
    check_calls(None, columns)
