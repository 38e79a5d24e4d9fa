"""Files that name things in their own way become tasks, and a report says what became of what."""

import json
from pathlib import Path
from typing import Any

import pytest

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.rewards.answers import answer_spec
from mcp_grpo.tasks import ImportReport, import_tasks, tasks_from_rows
from mcp_grpo.tasks.importing import ANSWER_TYPES
from mcp_grpo.types import Task


def imported(folder: Path, *rows: Any) -> tuple[list[Task], ImportReport]:
    path = folder / "train.json"
    path.write_text(json.dumps(rows))
    dataset, report = import_tasks(path)
    return tasks_from_rows(dataset), report


@pytest.mark.parametrize(
    "row",
    [
        {"id": 7, "question": "Q", "tools": ["f"], "difficulty": "Easy", "expected_answer": 3},
        {"task_id": "7", "query": "Q", "available_tools": "f", "level": "easy", "ground_truth": 3, "max_steps": 5},
        {"uid": "7", "prompt": "Q", "required_tools": [{"type": "function", "function": {"name": "f"}}], "target": 3}
        | {"difficulty": "easy"},
        {"ID": "7", "input": {"question": "Q", "tool_names": [{"name": "f"}]}, "output": {"solution": 3}}
        | {"meta": {"level": "easy"}},
        {"id": "7", "instruction": "Q", "tools": ["f", "f"], "answer": 3, "difficulty": "easy"},
        {"id": "7", "question": "Q", "tools_available": ["f"], "answer": 3, "complexity": "Easy"},
    ],
)
def test_the_usual_names_are_known(row: dict[str, Any], tmp_path: Path) -> None:
    (task,), _ = imported(tmp_path, row)
    assert (task.task_id, task.prompt[0]["content"], task.tools, task.answer) == ("7", "Q", ("f",), 3)
    assert (task.difficulty, task.max_turns) == ("easy", 5)


def test_a_split_is_a_list_of_the_file_and_several_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"train": [{"question": "A"}, {"question": "B"}], "validation": [{"question": "C"}]}))
    assert [len(import_tasks(path, split)[0]) for split in ("train", "validation")] == [2, 1]
    with pytest.raises(TaskFormatError, match=r"'train' .*'validation' .*--split"):
        import_tasks(path)


def test_a_scripted_solution_is_no_answer(tmp_path: Path) -> None:
    (task,), report = imported(tmp_path, {"id": "a", "question": "Q", "solution": {"steps": [], "final": ""}})
    assert task.answer is None
    assert dict(task.metadata) == {"solution": {"steps": [], "final": ""}}
    assert report.unreadable == {}


def test_messages_are_a_prompt(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Q"}]
    (task,), _ = imported(tmp_path, {"id": "a", "messages": messages})
    assert task.prompt == tuple(messages)


def test_an_instruction_and_its_input_are_asked_together(tmp_path: Path) -> None:
    (task,), report = imported(tmp_path, {"instruction": "Translate.", "input": "Hallo", "answer": "Hello"})
    assert task.prompt[0]["content"] == "Translate.\n\nHallo"
    assert dict(task.metadata) == {}
    assert "`prompt` from 'instruction + input' (1)" in str(report)


def test_what_is_not_known_is_metadata_and_never_takes_the_place_of_a_column(tmp_path: Path) -> None:
    row = {"id": "a", "question": "Q", "prompt": {"style": "short"}, "answer": 1, "target": 2, "trajectory": [1]}
    (task,), report = imported(tmp_path, row)
    assert task.answer == 1
    assert task.prompt[0]["content"] == "Q"
    assert dict(task.metadata) == {"source_prompt": {"style": "short"}, "target": 2, "source_trajectory": [1]}
    assert "'target' kept as metadata\n" in str(report) + "\n"
    assert "'prompt' kept as metadata under the name `source_prompt`" in str(report)


def test_answers_of_any_type_survive(tmp_path: Path) -> None:
    answers = [3, "3", ["a", 1], {"value": 2.5}, True]
    tasks, _ = imported(tmp_path, *({"question": f"Q{n}", "answer": answer} for n, answer in enumerate(answers)))
    assert [task.answer for task in tasks] == answers


def test_invented_ids_are_the_same_in_every_import_whatever_the_order(tmp_path: Path) -> None:
    rows = [{"question": "A", "answer": 1}, {"question": "B"}]
    first, report = imported(tmp_path, *rows)
    again, _ = imported(tmp_path, *rows[::-1])
    assert [task.task_id for task in first] == [task.task_id for task in again[::-1]]
    assert len({task.task_id for task in first}) == 2
    assert report.invented_ids == ["row 0", "row 1"]


def test_duplicates_are_left_out_and_shared_ids_are_changed(tmp_path: Path) -> None:
    rows = [{"id": 1, "question": "A"}, {"id": 1, "question": "A"}, {"id": 1, "question": "B"}]
    tasks, report = imported(tmp_path, *rows)
    assert [task.prompt[0]["content"] for task in tasks] == ["A", "B"]
    assert tasks[0].task_id == "1"
    assert tasks[1].task_id.startswith("1-")
    assert (report.duplicates, report.changed_ids) == (["row 1"], ["row 2 ('1')"])


def test_the_report_says_which_rows_lack_what_and_what_was_not_understood(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "question": "A", "answer": 1, "tools": ["f"], "difficulty": "easy"},
        {"id": "b", "question": "B", "tools": [{"no": "name"}], "max_turns": "many"},
        {"id": "c", "answer": 3},
        "no object",
        {"id": "d", "messages": [{"role": "assistant", "content": "I begin."}]},
    ]
    tasks, report = imported(tmp_path, *rows)
    assert [task.task_id for task in tasks] == ["a", "b"]
    assert (tasks[1].tools, tasks[1].max_turns) == (None, None)
    text = str(report)
    for words in (
        "2 tasks from 5 rows",
        "`prompt` from 'question' (2)",
        "no `answer`: row 1",
        "no `difficulty`: row 1",
        "`tools` not understood and left out: row 1 ([{'no': 'name'}])",
        "`max_turns` not understood and left out: row 1 ('many')",
        "row 2: There is no question in it",
        "['answer', 'id']",
        "row 3: A task is an object",
        "row 4: There is no question",
    ):
        assert words in text


def test_answers_that_no_reward_compares_with_and_unknown_difficulties_are_kept_and_reported(tmp_path: Path) -> None:
    fine = [3, "3", True, ["a", 1], {"type": "name", "value": "a"}, [{"type": "number", "value": 1}]]
    odd = [{"revenue": 5}, {"type": "colour"}, [], [[1]], [{"revenue": 5}], " "]
    rows = [{"id": n, "question": f"Q{n}", "answer": answer} for n, answer in enumerate([*fine, *odd])]
    labels = [{"difficulty": "Hard"}, {"difficulty": "brutal"}, {"difficulty": "brutal", "max_turns": 3}, {"level": 2}]
    rows += [{"id": f"d{n}", "question": "Q", **label} for n, label in enumerate(labels)]
    tasks, report = imported(tmp_path, *rows)
    assert [task.answer for task in tasks[: len(fine) + len(odd)]] == [*fine, *odd]
    assert report.unmatched == [f"row {n} ({answer!r})" for n, answer in enumerate(odd, len(fine))]
    assert report.unknown_difficulties == ["row 13 ('brutal')", "row 15 ('2')"]
    assert [task.difficulty for task in tasks[-4:]] == ["hard", "brutal", "brutal", "2"]
    assert "`answer` kept, but `answer_match` cannot compare with it" in str(report)
    assert "['easy', 'medium', 'hard'] do: row 13 ('brutal')" in str(report)


def test_types_of_answers_are_those_that_the_reward_knows() -> None:
    with pytest.raises(TaskFormatError) as caught:
        answer_spec({"type": "colour"})
    assert str(sorted(ANSWER_TYPES)) in str(caught.value)


def test_unreadable_lines_are_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"question": "A"}\n{"question": \n')
    dataset, report = import_tasks(path)
    assert len(dataset) == 1
    assert report.num_rows == 2
    assert "line 2: This is not JSON" in str(report)


def test_a_file_without_a_single_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskFormatError, match="There is no question in it"):
        imported(tmp_path, {"answer": 1}, {"answer": 2})
    with pytest.raises(TaskFormatError, match="There is no file"):
        import_tasks(tmp_path / "none.json")
