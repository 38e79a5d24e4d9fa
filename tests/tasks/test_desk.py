"""Tasks on the desk: the same for the same seed, solvable with the real servers, and not without them."""

import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
from helpers.gallery import BEGIN, END, README, gallery, solutions

from mcp_grpo.errors import SettingsError, TaskFormatError
from mcp_grpo.evaluation import Solution, run_solutions
from mcp_grpo.rewards import desk_reward, is_done
from mcp_grpo.servers import desk_servers
from mcp_grpo.servers.world.market import Market
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tasks.desk import FAMILIES, HELD_OUT_FAMILIES, SPLITS, build_tasks
from mcp_grpo.types import Segment, StopReason, Task, Trajectory


DIGEST = "fd8fd8a2e2830173"


def digest(rows: Any) -> str:
    return hashlib.sha256("\n".join(json.dumps(row, sort_keys=True) for row in rows).encode()).hexdigest()[:16]


@pytest.fixture(scope="module")
def datasets() -> dict[str, Any]:
    return {split: build_tasks(split, 300) for split in SPLITS}


@pytest.fixture(scope="module")
def solved() -> list[Solution]:
    return solutions()


def attempt(task: Task, answer: str, states: Mapping[str, Any] | None = None) -> Trajectory:
    """What a policy does that asks no tool."""
    return Trajectory(
        task=task,
        prompt_ids=(0,),
        segments=(Segment(token_ids=(0,), logprobs=(0.0,)),),
        messages=({"role": "assistant", "content": answer},),
        exchanges=(),
        stop_reason=StopReason.ANSWERED,
        states={"slack": {"added": []}} if states is None else states,
    )


def test_the_same_seed_gives_the_same_tasks_to_the_byte_on_every_machine(datasets: dict[str, Any]) -> None:
    assert digest(datasets["test"]) == DIGEST


def test_tasks_do_not_depend_on_how_python_hashes(datasets: dict[str, Any]) -> None:
    code = "import sys, json\nfrom mcp_grpo.tasks.desk import build_tasks\nfor row in build_tasks('test', 40): print(json.dumps(row, sort_keys=True))"
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert texts[0].count("\n") == 40


def test_another_seed_gives_other_tasks_and_another_world_others_still(datasets: dict[str, Any]) -> None:
    ids = [
        set(rows["task_id"])
        for rows in (datasets["test"], build_tasks("test", 300, seed=1), build_tasks("test", 100, world=3))
    ]
    assert len(ids[0] & ids[1]) < 100
    assert len(ids[0] & ids[2]) < 10  # a few companies are in every world


def test_splits_share_neither_companies_nor_tasks(datasets: dict[str, Any]) -> None:
    issuers = {company.symbol: company.issuer for company in Market().companies()}
    used = {split: {issuers[symbol] for row in rows for symbol in row["symbols"]} for split, rows in datasets.items()}
    ids = {split: set(rows["task_id"]) for split, rows in datasets.items()}
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not used[one] & used[other]
        # Nobody's figures are in the same split as another's; companies that do not exist belong to none.
        assert all(task_id.startswith("refusal-") for task_id in ids[one] & ids[other])


def test_some_families_are_only_in_the_test_split(datasets: dict[str, Any]) -> None:
    for split, rows in datasets.items():
        found = Counter(rows["family"])
        assert set(found) == set(FAMILIES) - (set(HELD_OUT_FAMILIES) if split != "test" else set())
        if split == "train":  # the others are about few companies, which not every family has enough to ask about
            assert max(found.values()) - min(found.values()) <= 1
    assert len(set(FAMILIES) - set(HELD_OUT_FAMILIES)) >= 12


def test_every_row_is_a_task_with_turns_for_its_difficulty(datasets: dict[str, Any]) -> None:
    tasks = tasks_from_rows(datasets["train"])
    assert {task.difficulty: task.max_turns for task in tasks} == {"easy": 5, "medium": 8, "hard": 10}


def test_scripted_solutions_do_what_their_tasks_ask_for(solved: list[Solution]) -> None:
    assert [(one.trajectory.task.task_id, one.problems) for one in solved if one.problems] == []
    assert {one.trajectory.task.metadata["family"] for one in solved} == set(FAMILIES)
    assert desk_reward()([one.trajectory for one in solved]) == [
        pytest.approx([0.0] * (one.trajectory.num_turns - 1) + [1.0]) for one in solved
    ]


def test_the_readme_s_gallery_shows_them(solved: list[Solution]) -> None:
    assert README.read_text().split(BEGIN)[1].split(END)[0] == gallery(solved) + "\n"


@pytest.mark.slow
def test_scripted_solutions_of_two_thousand_tasks_do() -> None:
    for split, number in (("train", 1400), ("validation", 200), ("test", 400)):
        found = run_solutions(tasks_from_rows(build_tasks(split, number, seed=7)), desk_servers())
        assert [(one.trajectory.task.task_id, one.problems) for one in found if one.problems] == []


class TestSolutionsThatProveNothing:
    @pytest.fixture
    def tasks(self) -> dict[str, Task]:
        return {task.metadata["family"]: task for task in tasks_from_rows(build_tasks("test", len(FAMILIES)))}

    def changed(self, task: Task, **changes: Any) -> Task:
        script = {**task.metadata["solution"], **changes.pop("script", {})}
        return replace(task, metadata={**task.metadata, "solution": script}, **changes)

    def test_are_found(self, tasks: dict[str, Task]) -> None:
        lookup, report, recovery = tasks["lookup"], tasks["report"], tasks["recovery"]
        steps = lookup.metadata["solution"]["steps"]
        broken = [
            self.changed(lookup, script={"final": "Answer: 17"}),
            self.changed(lookup, script={"steps": [{**steps[0], "evidence": ["nobody says this"]}, *steps[1:]]}),
            self.changed(lookup, script={"steps": [{"calls": [{"name": "getQuote", "arguments": {}}]}]}),
            self.changed(lookup, max_turns=1),
            self.changed(report, script={"steps": report.metadata["solution"]["steps"][:-1]}),
            self.changed(
                recovery, script={"steps": [{**one, "fails": False} for one in recovery.metadata["solution"]["steps"]]}
            ),
        ]
        found = run_solutions(broken, desk_servers())
        assert [len(one.problems) > 0 for one in found] == [True] * len(broken)
        assert "is not what the task wants" in found[0].problems[0]
        assert "do not say 'nobody says this'" in found[1].problems[0]
        assert "getQuote" in found[2].problems[0]
        assert "allows 1" in found[3].problems[0]

    def test_a_task_without_one_is_refused(self) -> None:
        with pytest.raises(TaskFormatError, match="has no `solution` to run"):
            run_solutions([Task(task_id="a", prompt=({"role": "user", "content": "b"},), answer=1)], {})


def guesses(task: Task) -> Iterator[str]:
    """Answers of a policy that has read the question, knows what kinds of tasks there are, and asks no tool."""
    question = task.prompt[-1]["content"]
    yield "There is no such data.\nAnswer: no data available"
    yield "Done."
    yield from (
        f"Answer: {guess}" for guess in ("0", "1", "21", "22", "yes", "100 USD", "1000000000 USD", "2024-06-28")
    )
    if ": " in question:
        names = question.split(": ", 1)[1].rstrip("?").replace(" or ", ", ").split(". Give")[0].split(", ")
        yield f"Answer: {names[0]}"
        yield f"Answer: {', '.join(names)}"
    for word in question.replace("?", "").split():
        if word[0] in "$€£":
            yield f"Answer: {question.split(word, 1)[0][-1:]}{word} million"


def test_a_policy_that_asks_no_tool_is_paid_next_to_nothing(datasets: dict[str, Any]) -> None:
    tasks = [task for rows in datasets.values() for task in tasks_from_rows(rows)]
    # The best of its guesses, if it could know which one that is; and any one guess.
    best = sum(any(is_done(attempt(task, guess)) for guess in guesses(task)) for task in tasks)
    assert best / len(tasks) < 0.05
    assert best > 0  # it is a real attempt


def test_what_is_out_of_date_or_somebody_else_s_is_not_paid(solved: list[Solution]) -> None:
    for one in solved:
        task = one.trajectory.task
        others = [other for other in solved if other.trajectory.task.answer != task.answer]
        for other in others:
            swapped = replace(
                one.trajectory,
                messages=other.trajectory.messages,
                states={"slack": {"added": []}, **other.trajectory.states},
            )
            assert not is_done(swapped), (task.task_id, other.trajectory.messages[-1])


def test_a_post_too_many_or_in_another_channel_costs_all(solved: list[Solution]) -> None:
    posted = next(one.trajectory for one in solved if one.trajectory.task.metadata["family"] == "report")
    (post,) = posted.states["slack"]["added"]
    assert is_done(posted)
    for added in ([], [post, post], [{**post, "channel": "random"}], [{**post, "text": post["text"] + "!"}]):
        assert not is_done(replace(posted, states={"slack": {"added": added}}))


@pytest.mark.parametrize(("arguments", "words"), [(("dev", 3), "'train'"), (("train", 0), "at least 1")])
def test_what_cannot_be_built_is_refused(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        build_tasks(*arguments)
