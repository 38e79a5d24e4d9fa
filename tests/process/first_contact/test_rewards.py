"""Only what came to an answer of its own is right."""

import json

import pytest
from helpers.shell import Shell


@pytest.mark.full
def test_a_solution_that_never_says_that_it_is_done_solves_nothing(shell: Shell) -> None:
    assert (
        shell.run_forked(
            "mcp-grpo", "tasks", "build", "desk", "--train", "14", "--validation", "0", "--test", "0"
        ).status
        == 0
    )
    rows = [json.loads(line) for line in (shell.folder / "desk" / "train.jsonl").read_text().splitlines()]
    (whole,) = (row for row in rows if row["family"] == "report")
    cut = {**whole, "task_id": "cut", "solution": {**whole["solution"], "final": ""}}
    (shell.folder / "cut.jsonl").write_text("".join(json.dumps(row) + "\n" for row in (whole, cut)))
    said = shell.run_forked("mcp-grpo", "tasks", "check", "cut.jsonl")
    assert said.status == 1
    assert "cut: It does not come to an answer: `final` is empty." in said.terminal
    assert "1 of 2 solutions solve their tasks." in said.terminal
