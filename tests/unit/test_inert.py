"""Text from outside does nothing where it is shown."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import rich
from trl.trainer import utils as trl_utils

from mcp_grpo import comparison_table
from mcp_grpo.cli import main
from mcp_grpo.errors import MCPGRPOError, TaskFormatError, ToolServerError
from mcp_grpo.evaluation import Attempt, Evaluation
from mcp_grpo.inert import inert
from mcp_grpo.monitor.terminal import TerminalHandler
from mcp_grpo.trl_compat import inert_tables


HOSTILE = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\u202eb\ud83d"


def check(shown: str) -> None:
    assert "a" in shown
    assert [character for character in shown if not character.isprintable() and character not in "\n\t"] == []


def test_control_characters_are_shown_and_lines_stay() -> None:
    assert inert(f"{HOSTILE}\n\tc") == "a␛]0;title␇␛[2J�31m␍␈�b�\n\tc"
    assert inert("naïve 漢字 🙂") == "naïve 漢字 🙂"
    assert len(inert(HOSTILE)) == len(HOSTILE)


@pytest.mark.parametrize("kind", [MCPGRPOError, TaskFormatError, ToolServerError])
def test_an_error_that_quotes_it_is_inert(kind: type[Exception]) -> None:
    check(str(kind(f"The server said {HOSTILE}.")))


def test_a_warning_that_quotes_it_is_inert(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    TerminalHandler().emit(logging.LogRecord("mcp_grpo", logging.WARNING, "", 0, "said %s", (HOSTILE,), None))
    check(capsys.readouterr().err)


def test_tasks_are_shown_without_obeying_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = dict.fromkeys(("task_id", "prompt", "answer", "difficulty"), HOSTILE[:-1])  # Arrow takes no half characters
    (tmp_path / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    assert main(["tasks", "show", str(tmp_path / "tasks.jsonl")]) == 0
    check(capsys.readouterr().out)
    assert main(["tasks", "show", str(tmp_path / f"{HOSTILE[:-1]}.jsonl")]) == 1
    check(capsys.readouterr().err)


def test_the_table_of_an_evaluation_is_inert(capsys: pytest.CaptureFixture[str]) -> None:
    fixed: Any = {
        "family": None,
        "error": None,
        "calls": [],
        "messages": [],
        "stop_reason": "answered",
        "seconds": 0.0,
    }
    numbers: Any = {"index": 0, "num_turns": 1, "prompt_tokens": 1, "sampled_tokens": 1}
    attempt = Attempt(task_id="t", is_solved=True, difficulty=f"{HOSTILE}[/nothing]", **fixed, **numbers)
    found = Evaluation.of([attempt])
    rich.print(comparison_table(found, found))
    shown = capsys.readouterr().out
    check(shown)
    assert "[/nothing]" in shown


def test_the_tables_of_completions_are_inert(capsys: pytest.CaptureFixture[str]) -> None:
    with inert_tables():
        trl_utils.print_prompt_completions_sample(
            [[{"role": "user", "content": HOSTILE}]], [HOSTILE], {"r": [1.0]}, [0.0], 1, extra={"calls": [HOSTILE]}
        )
    check(capsys.readouterr().out)
