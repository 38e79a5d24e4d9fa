"""Solutions that call with ids that nobody could know are told of."""

from typing import Any

import pytest
from mcp.types import Tool
from rich.console import Console

from mcp_grpo.cli import run_and_report
from mcp_grpo.environments import function_server
from mcp_grpo.tasks import tasks_from_rows


SCHEMA = {"type": "object", "properties": {"region": {"enum": ["us-east-1", "eu-west-2"]}}}
TOOLS = [Tool(name=name, input_schema=SCHEMA) for name in ("find", "delete")]


def make(task: Any) -> Any:
    return function_server("mail", TOOLS, lambda name, arguments: "00000422" if name == "find" else "Done.")


def row(*calls: tuple[str, dict[str, Any]], prompt: str = "Delete the last mail of Ann.") -> dict[str, Any]:
    steps = [{"calls": [{"name": name, "arguments": arguments}]} for name, arguments in calls]
    return {"task_id": "t", "prompt": prompt, "answer": "Done.", "solution": {"steps": steps, "final": "Done."}}


DELETE = ("delete", {"id": "00000422"})


@pytest.mark.parametrize(
    ("one", "is_guess"),
    [
        (row(DELETE), True),
        (row(("find", {"name": "Ann"}), DELETE), False),
        (row(DELETE, prompt="Delete mail 00000422."), False),
        (row(("find", {"since": "2024-05-01", "text": "a text of 3 words and more"})), False),
        (row(("find", {"address": "ann@our.example"})), True),
        (row(("find", {"region": "us-east-1"})), False),  # the schema has it
    ],
)
def test_an_id_that_nothing_has_shown_is_told(one: dict[str, Any], is_guess: bool) -> None:
    console = Console(record=True, width=300)
    assert run_and_report(tasks_from_rows([one]), {"mail": make}, console) == 0
    said = console.export_text()
    assert "1 of 1 solutions solve their tasks." in said
    assert ("call with an id that nothing before has shown" in said) == is_guess
