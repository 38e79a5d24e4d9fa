"""Solutions of WorkBench look for what they use, by the real searches."""

import os
from collections.abc import Mapping
from typing import Any

import pytest

from mcp_grpo.environments import Environment, load_environment
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.tasks import tasks_from_rows, unseen_values


DATA = "MCP_GRPO_WORKBENCH"
pytestmark = pytest.mark.skipif(DATA not in os.environ, reason=f"{DATA} names no clone of olly-styles/WorkBench")

LEADS = {"assigned_to_email": "raj.patel@atlas.com", "status": "Lead"}


@pytest.fixture(scope="module")
def environment() -> Environment:
    return load_environment("workbench", os.environ[DATA])


@pytest.fixture(scope="module")
def rows(environment: Environment) -> dict[str, Mapping[str, Any]]:
    return {row["prompt"][-1]["content"]: row for split in environment.splits.values() for row in split}


def searches(row: Mapping[str, Any]) -> list[list[tuple[str, dict[str, str]]]]:
    steps = row["solution"]["steps"][: len(row["solution"]["steps"]) - len(row["actions"])]
    return [[(call["name"].split("_")[-1], call["arguments"]) for call in step["calls"]] for step in steps]


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        ("Cancel my next meeting with aisha", [[("events", {"query": "aisha", "time_min": "2023-11-30 00:00:00"})]]),
        (
            "raj and sofia need the last email about 'Update on introductory call'. Can you forward it?",
            [[("emails", {"query": "Update on introductory call"})], [("address", {"name": "raj"}), ("address", {"name": "sofia"})]],
        ),
        (
            "Give all the overdue tasks that chenwei hasn't started to amir.",
            [
                [("address", {"name": "chenwei"})],
                [("tasks", {"assigned_to_email": "chenwei.zhang@atlas.com", "list_name": "Backlog"})],
                [("address", {"name": "amir"})],
            ],
        ),
        (
            "Reassign all of Raj's leads that are interested in services to Sofia in the crm.",
            [
                [("address", {"name": "Raj"})],
                [("customers", {**LEADS, "product_interest": "services"})],
                [("address", {"name": "Sofia"})],
            ],
        ),
        (
            "have I met with carlos in the last 7 days? If not, schedule a 30-minute meeting called 'catch-up' for my first free slot from tomorrow",
            [
                [("events", {"query": "carlos", "time_min": "2023-11-23 00:00:00", "time_max": "2023-11-30 00:00:00"})],
                [("address", {"name": "carlos"})],
                [("events", {"time_min": "2023-12-01 09:00:00", "time_max": "2023-12-01 18:00:00"})],
            ],
        ),
        # Where nothing is to be done, only a look tells.
        ("Is engaged users more than 5% lower than September 25? If so, please plot it as a line chart", [[("count", {"time_min": "2023-09-25"})]]),
        ("Plot the distribution of total visits on October 28", []),
    ],
)  # fmt: skip
def test_what_is_not_told_is_searched_for(
    rows: dict[str, Mapping[str, Any]], request_: str, expected: list[Any]
) -> None:
    assert searches(rows[request_]) == expected
    assert rows[request_]["grounded"]


def test_searches_go_on_where_five_rows_are_not_all(rows: dict[str, Mapping[str, Any]]) -> None:
    request = "can you check if engaged users was less than 11 at any time since October 10? If so, delete all the leads assigned to Lena in the CRM"
    kinds = [kind for step in searches(rows[request]) for kind, _ in step]
    assert kinds == ["count", "address", "customers", "customers", "customers"]
    assert len(rows[request]["actions"]) == 11


def test_nearly_all_follow_from_what_is_seen_and_the_authors_slips_do_not(rows: dict[str, Mapping[str, Any]]) -> None:
    odd = [request for request, row in rows.items() if not row["grounded"]]
    assert len(odd) == 13
    for slip in (
        "I need to move all of Akira's customers that are in the qualified stage",  # and they are deleted
        "Was engaged users more than 1 at any time since November 6?",  # yes, but the solution says no
        "Was total visits more than 21 at any time since September 14?",  # with a title that nobody said
    ):
        assert any(request.startswith(slip) for request in odd)
    assert max(len(row["solution"]["steps"]) for row in rows.values()) < 20  # turns that the authors allow


def test_solutions_solve_and_use_nothing_unseen_but_dates(environment: Environment) -> None:
    tasks = [task for task in tasks_from_rows(environment.tasks("test"))[::8] if task.metadata["grounded"]]
    for task, solution in zip(tasks, run_solutions(tasks, environment.servers), strict=True):
        assert solution.problems == ()
        unseen = unseen_values(task.prompt, solution.trajectory.messages)
        assert not [value for value in unseen if value.isdigit() or "@" in value]
