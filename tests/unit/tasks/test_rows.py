"""Rows of a dataset are tasks, or every reason why not is given at once."""

import pytest
from datasets import Dataset

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.tasks import task_from_row, tasks_from_rows


ROW = {"task_id": "a", "prompt": "What is 2 + 3?"}


def test_a_string_is_one_message_of_the_user() -> None:
    assert task_from_row(ROW).prompt == ({"role": "user", "content": "What is 2 + 3?"},)


def test_known_columns_are_read_and_the_others_kept() -> None:
    task = task_from_row(
        {
            **ROW,
            "servers": ["desk"],
            "tools": ["add"],
            "max_turns": 3,
            "difficulty": "easy",
            "answer": 5,
            "source": "x",
        }
    )
    assert (task.servers, task.tools, task.max_turns) == (("desk",), ("add",), 3)
    assert (task.difficulty, task.answer, dict(task.metadata)) == ("easy", 5, {"source": "x"})


def test_keys_that_a_dataset_filled_in_are_not_part_of_a_message() -> None:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi", "name": "Ann"}]
    (row,) = Dataset.from_list([{**ROW, "prompt": prompt}])
    assert task_from_row(row).prompt == tuple(prompt)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": None}, ["'prompt'", "rename_columns", "['prompt', 'task_id']"]),
        ({"task_id": None}, ["'task_id'", "rename_columns"]),
        ({"prompt": []}, ["list of messages", "[]"]),
        ({"prompt": [{"content": "hi"}]}, ["not a message", "'content': 'hi'"]),
        ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, ["assistant message"]),
        ({"servers": "desk"}, ["`servers`", "list of names", "'desk'"]),
        ({"tools": [1]}, ["`tools`", "[1]"]),
        ({"max_turns": 0}, ["`max_turns`", "at least 1", "0"]),
        ({"max_turns": "3"}, ["`max_turns`", "'3'"]),
    ],
)
def test_a_row_that_is_not_a_task_says_what_is_wrong_and_what_to_do(change: dict, words: list[str]) -> None:
    with pytest.raises(TaskFormatError) as caught:
        task_from_row({**ROW, **change})
    assert all(word in str(caught.value) for word in words)


def test_every_bad_row_is_reported_with_its_number() -> None:
    rows = [ROW, {"question": "?"}, {**ROW, "task_id": "b", "max_turns": -1}, {**ROW, "prompt": "Another task"}]
    with pytest.raises(TaskFormatError) as caught:
        tasks_from_rows(rows)
    message = str(caught.value)
    assert "3 rows" in message
    assert all(f"row {number}:" in message for number in (1, 2, 3))
    assert "that of row 0" in message


def test_a_task_may_stand_in_a_dataset_more_than_once() -> None:
    assert len(tasks_from_rows([ROW, dict(ROW)])) == 2


@pytest.mark.parametrize(
    ("columns", "max_turns"),
    [
        ({"difficulty": "easy"}, 5),
        ({"difficulty": "medium"}, 8),
        ({"difficulty": "hard", "max_turns": None}, 10),
        ({"difficulty": "hard", "max_turns": 3}, 3),
        ({"difficulty": "two calls"}, None),
        ({}, None),
    ],
)
def test_the_difficulty_limits_turns_where_the_row_does_not(columns: dict, max_turns: int | None) -> None:
    assert task_from_row({**ROW, **columns}).max_turns == max_turns


def test_all_problems_of_a_row_are_reported() -> None:
    with pytest.raises(TaskFormatError, match=r"`servers`.*`max_turns`"):
        task_from_row({**ROW, "servers": "desk", "max_turns": 0})
