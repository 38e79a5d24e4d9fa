"""Which solutions are imitated."""

from typing import Any

from mcp_grpo.environments import function_server
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.imitation import conversations


def test_an_environment_judges_its_solutions_itself() -> None:
    rows: list[dict[str, Any]] = [  # without an answer or a state, as benchmarks with a check of their own have them
        {"task_id": name, "prompt": "Go on.", "solution": {"steps": [], "final": name}} for name in ("right", "wrong")
    ]
    servers = {"none": lambda task: function_server("none", [], lambda *_: "")}
    found = conversations(tasks_from_rows(rows), servers, is_success=lambda trajectory: trajectory.answer == "right")
    assert [task.task_id for task, _ in found] == ["right"]
