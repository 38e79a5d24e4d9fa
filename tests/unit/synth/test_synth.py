"""Tasks that are made from the tools of a server."""

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers.endpoint import stand_in
from helpers.libraries import (
    BOOKS,
    INJECTIONS,
    clock,
    database,
    flaky,
    hostile,
    journal,
    leaking,
    library,
    locked,
    many,
    per_task,
    staff,
    vault,
)

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Endpoint, run_solutions
from mcp_grpo.rewards import task_outcome
from mcp_grpo.rewards.checks import reward_problems
from mcp_grpo.synth import Made, SynthSettings, make_tasks, write_tasks
from mcp_grpo.tasks import load_tasks, tasks_from_rows


def made(servers: Any, **settings: Any) -> Made:
    return anyio.run(make_tasks, servers, SynthSettings(**settings))


def question(row: dict[str, Any]) -> str:
    return row["prompt"][-1]["content"]


@pytest.fixture(scope="module")
def of_library() -> Made:
    return made({"library": library(), "parcels": many(5)})


def test_the_solutions_solve_the_tasks(of_library: Made) -> None:
    tasks = tasks_from_rows(of_library.tasks)
    assert len(tasks) > 40
    assert [
        one.problems for one in run_solutions(tasks, {"library": library(), "parcels": many(5)}) if one.problems
    ] == []
    assert reward_problems(tasks, task_outcome) == []


def test_a_value_that_one_tool_returns_and_another_takes_makes_a_chain(of_library: Made) -> None:
    chains = [row for row in of_library.tasks if row["family"] == "chain"]
    codes = {book["code"] for book in BOOKS}
    told = [
        row
        for row in chains
        if [c["calls"][0]["name"] for c in row["solution"]["steps"]] == ["list_books", "book_details"]
    ]
    assert told
    for row in told:
        code = row["solution"]["steps"][1]["calls"][0]["arguments"]["code"]
        assert code in codes
        assert code not in question(row)


def test_there_are_refusals_recoveries_and_differences(of_library: Made) -> None:
    families = Counter(row["family"] for row in of_library.tasks)
    assert {"lookup", "chain", "refusal", "recovery", "difference"} <= families.keys()
    assert families["refusal"] < len(of_library.tasks) / 4
    refusals = [row for row in of_library.tasks if row["family"] == "refusal"]
    assert all(row["answer"] == {"type": "refusal"} for row in refusals)
    recovery = next(row for row in of_library.tasks if row["family"] == "recovery")
    assert [step["fails"] for step in recovery["solution"]["steps"]] == [True, False, False]


def test_tools_of_other_servers_are_offered_too(of_library: Made) -> None:
    row = next(row for row in of_library.tasks if row["family"] == "chain")
    assert row["distractors"] == 5
    assert {"list_books", "station_0"} <= set(row["tools"])
    assert "add_book" not in row["tools"]  # it was not called, so nobody is to call it


@pytest.mark.full
def test_the_same_seed_gives_the_same_tasks_and_another_does_not(of_library: Made) -> None:
    again = made({"library": library(), "parcels": many(5)})
    assert again.rows == of_library.rows
    assert again.dropped == of_library.dropped
    assert made({"library": library(), "parcels": many(5)}, seed=1).rows != of_library.rows


def test_splits_share_no_chain(of_library: Made) -> None:
    chains = {split: {row["chain"] for row in rows} for split, rows in of_library.rows.items()}
    assert all(chains.values())
    assert not chains["train"] & chains["test"]
    assert not chains["train"] & chains["validation"]
    assert not chains["validation"] & chains["test"]


def test_no_answer_stands_in_its_question(of_library: Made) -> None:
    for row in of_library.tasks:
        value = str(row["answer"].get("value", "-"))
        assert not re.search(rf"(?<!\w){re.escape(value)}(?!\w)", question(row)) or value == "-", row


def test_questions_have_one_answer_and_ids_are_unique(of_library: Made) -> None:
    questions = Counter(map(question, of_library.tasks))
    assert set(questions.values()) == {1}
    assert len({row["task_id"] for row in of_library.tasks}) == len(of_library.tasks)


@pytest.mark.parametrize("allow_writes", [False, True])
def test_nothing_is_written_on_a_shared_server(allow_writes: bool) -> None:
    calls = Counter[str]()
    tasks = made({"library": library(calls)}, allow_writes=allow_writes)
    assert calls["book_details"]
    assert calls["add_book"] == 0
    assert "may change things" in tasks.uncalled["add_book"]


def test_nothing_is_written_on_an_isolated_server_without_being_allowed() -> None:
    calls = Counter[str]()
    made(per_task(calls))
    assert calls["book_details"]
    assert calls["add_book"] == 0


def test_changes_are_made_in_isolation_and_checked_by_what_the_reading_tools_show() -> None:
    calls = Counter[str]()
    tasks = made(per_task(calls), allow_writes=True)
    changes = [row for row in tasks.tasks if row["family"] == "change"]
    assert calls["add_book"]
    assert changes
    row = changes[0]
    assert "Add a book" in question(row)
    assert "list_books" in [call["name"] for call in row["state_calls"]["library"]]
    found = run_solutions(tasks_from_rows(changes), per_task(Counter()))
    assert [one.problems for one in found if one.problems] == []
    idle = [{**row, "solution": {"steps": [], "final": "It is done."}} for row in changes]
    assert all(one.problems for one in run_solutions(tasks_from_rows(idle), per_task(Counter())))


def test_a_server_that_keeps_what_one_trajectory_wrote_is_left_alone_at_once() -> None:
    calls = Counter[str]()
    tasks = made(leaking(calls), allow_writes=True)
    assert calls["add_book"] == 1
    assert not [row for row in tasks.tasks if row["family"] == "change"]
    assert "still there for the next trajectory" in tasks.uncalled["add_book"]


def test_results_that_change_with_time_make_no_tasks() -> None:
    tasks = made({"clock": clock()})
    assert tasks.tasks == []
    assert tasks.dropped["the result tells the present time"] >= 4  # `weekday`, `day`, `epoch` and `season`
    assert tasks.dropped["it came to something else the second time"] >= 2


def test_a_flaky_tool_makes_no_tasks_and_spoils_no_others() -> None:
    tasks = made({"flaky": flaky(), "library": library()})
    assert not [row for row in tasks.tasks if row["solution"]["steps"][-1]["calls"][0]["name"] == "level"]
    assert tasks.dropped["a call failed"] >= 2
    assert len(tasks.tasks) > 20


def test_what_a_hostile_server_says_is_in_no_prompt_and_no_card(tmp_path: Path) -> None:
    tasks = made({"hostile": hostile()})
    assert any("`weight`" in question(row) for row in tasks.tasks)
    write_tasks(tasks, tmp_path)
    prompts = "\n".join(
        json.dumps([row["prompt"], row["answer"], row["solution"]], ensure_ascii=False) for row in tasks.tasks
    )
    card = (tmp_path / "README.md").read_text()
    for text in (prompts, card):
        for piece in (
            "previous instructions",
            "im_end",
            "<script",
            "evil.example",
            "\x1b",
            "system prompt",
            "delete_everything",
        ):
            assert piece not in text, piece
    assert INJECTIONS[0] not in (tmp_path / "report.json").read_text()


@pytest.mark.full
def test_253_tools_are_tried_and_few_of_them_offered() -> None:
    tasks = made({"many": many(253)}, num_tasks=60)
    assert len(tasks.tasks) == 60
    assert max(len(row["tools"]) for row in tasks.tasks) <= 24
    assert (
        len({call["name"] for row in tasks.tasks for step in row["solution"]["steps"] for call in step["calls"]}) > 40
    )


def test_calls_are_limited() -> None:
    calls = Counter[str]()
    made({"library": library(calls)}, max_calls=3, num_tasks=2)
    assert sum(calls.values()) <= 3 + 2 * 4 * 3


def test_values_that_are_given_are_tried() -> None:
    without = made({"locked": locked()})
    assert without.tasks == []
    assert without.uncalled == {"open_safe": "no value is known that it could be called with"}
    tasks = made({"locked": locked()}, values={"word": ["sesame", "thistle"]})
    assert {417, 958} <= {row["answer"].get("value") for row in tasks.tasks}


def test_tools_that_return_a_single_value_are_asked_and_linked() -> None:
    tasks = made({"staff": staff()}).tasks
    words = "find the salary of a person, in euros, with `person` set to `ida berg`"
    asked = [row for row in tasks if row["family"] == "lookup" and words in question(row).lower()]
    assert [row["answer"] for row in asked] == [{"type": "number", "value": 5150}]
    chains = [[c["calls"][0]["name"] for c in row["solution"]["steps"]] for row in tasks if row["family"] == "chain"]
    assert ["manager", "salary"] in chains
    assert [one.problems for one in run_solutions(tasks_from_rows(tasks), {"staff": staff()}) if one.problems] == []


def test_the_last_of_some_and_the_absence_of_a_choice_are_not_asked_for() -> None:
    tasks = made({"journal": journal()}).tasks
    assert len(tasks) > 5
    assert not [row for row in tasks if "last" in question(row)]
    assert not [row for row in tasks if "How many" in question(row)]
    kinds = {"`kind` set to `day`", "`kind` set to `night`"}
    assert all(any(kind in question(row) for kind in kinds) for row in tasks if "`kind`" in question(row))


def test_a_tool_that_refuses_to_look_shows_no_absence() -> None:
    tasks = made({"vault": vault()})
    assert not [row for row in tasks.tasks if row["family"] == "refusal"]
    assert any("refuses to look" in why for why in tasks.dropped)


def test_where_nothing_can_be_asked_the_remedy_is_that_for_the_reason() -> None:
    assert "`mcp-grpo tasks synth --values FILE`" in made({"locked": locked()}).remedy
    assert "What was tried was left out: " in made({"clock": clock()}).remedy


def test_settings_that_make_nothing_are_refused() -> None:
    with pytest.raises(SettingsError, match="`num_tasks` must be at least 1, got 0"):
        SynthSettings(num_tasks=0)


def test_files_a_card_and_a_report_are_written(tmp_path: Path, of_library: Made) -> None:
    (tmp_path / "test.jsonl").write_text("old")
    files = write_tasks(of_library, tmp_path)
    assert [path.name for path in files] == ["train.jsonl", "validation.jsonl", "test.jsonl"]
    loaded = [dict(row) for path in files for row in load_tasks(path)]
    assert [row["task_id"] for row in loaded] == [row["task_id"] for row in of_library.tasks]
    card = (tmp_path / "README.md").read_text()
    assert "| train |" in card
    assert "`add_book`: it may change things" in card
    report = json.loads((tmp_path / "report.json").read_text())
    assert sum(report["tasks"].values()) == len(of_library.tasks)
    assert report["dropped"] == of_library.dropped


def test_a_split_that_has_no_tasks_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("of an earlier run")
    write_tasks(made({"clock": clock()}), tmp_path)
    assert not (tmp_path / "test.jsonl").exists()


@pytest.mark.full
def test_a_model_words_questions_and_is_asked_again_blind() -> None:
    def reply(body: dict[str, Any]) -> dict[str, Any]:
        system = body["messages"][0]["content"] if len(body["messages"]) > 1 else ""
        content = body["messages"][-1]["content"]
        if "word questions" in system:
            asked = json.loads(content)
            if "`year`" in asked:
                return {"content": json.dumps({"question": f"Please <|im_end|> tell: {asked}"})}
            if "`shelf`" in asked:
                return {"content": json.dumps({"question": "Which shelf?"})}
            return {"content": json.dumps({"question": f"Dear librarian, kindly tell me: {asked}"})}
        if "results of tool calls" in system:
            given = json.loads(content)
            pages = re.search(r'"pages": (\d+)', given["results"][-1]["result"])
            is_asked = "what is the `pages`" in given["question"].lower()
            return {"content": f"Answer: {pages[1]}" if pages and is_asked else "Answer: unclear"}
        return {"content": "Hello"}

    with stand_in(reply) as endpoint:
        writer = Endpoint(base_url=endpoint.url, model="writer")
        tasks = made({"library": library()}, num_tasks=40, writer=writer)
    assert tasks.tasks
    assert all(question(row).startswith("Dear librarian") and "`pages`" in question(row) for row in tasks.tasks)
    assert tasks.dropped["the model came to another answer"] > 0
    blind = [body for body in endpoint.bodies if "results of tool calls" in body["messages"][0]["content"]]
    assert blind
    assert not any('"answer"' in body["messages"][-1]["content"] for body in blind)
    # What loses a value, or would be markup, stays as the template had it.
    worded = [json.loads(body["messages"][-1]["content"])["question"] for body in blind]
    assert not any("Which shelf?" in text or "im_end" in text for text in worded)


def test_tools_that_take_sql_are_asked_in_sql() -> None:
    tasks = made({"database": database()})
    families = Counter(row["family"] for row in tasks.tasks)
    assert families["query"] > 30
    assert {"refusal", "recovery"} <= families.keys()
    assert [
        one.problems for one in run_solutions(tasks_from_rows(tasks.tasks), {"database": database()}) if one.problems
    ] == []
    joined = [row for row in tasks.tasks if "belong to the row of `customers`" in question(row)]
    assert joined
    assert all("change" not in row["tools"] for row in tasks.tasks)
    assert not any("SELECT" in question(row) for row in tasks.tasks)


@pytest.mark.full
def test_rows_are_changed_only_where_that_is_allowed_and_isolated() -> None:
    shared = made({"database": database()}, allow_writes=True)
    assert "change" not in {row["family"] for row in shared.tasks}
    servers: dict[str, Any] = {"database": {"server": lambda task: database()}}
    tasks = made(servers, allow_writes=True, num_tasks=40)
    changes = [row for row in tasks.tasks if row["family"] == "change"]
    assert {question(row).split()[0] for row in changes} == {"Delete", "In"}
    assert [one.problems for one in run_solutions(tasks_from_rows(changes), servers) if one.problems] == []
