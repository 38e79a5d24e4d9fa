"""Tasks come from files of several kinds, unchanged, or every reason why not is given at once."""

import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.tasks import load_tasks, tasks_from_rows
from mcp_grpo.tasks.columns import dataset_from_rows


ROWS = [
    {"task_id": "a", "prompt": "How much?", "answer": 3, "tools": ["add"], "max_turns": 2},
    {"task_id": "b", "prompt": "Which?", "answer": ["x", 2], "expected_state": {"slack": {"posts": []}}},
    {"task_id": "c", "prompt": "Who?", "answer": {"type": "name", "value": "Ann"}, "difficulty": "hard"},
    {"task_id": "d", "prompt": "Text of a number", "answer": "3"},
    {"task_id": "e", "prompt": "Text of JSON", "answer": '{"a": 1}', "expected_state": {"other": None}},
]


def given_values(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if value is not None}


def saved(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"tasks.{kind}"
    match kind:
        case "json":
            path.write_text(json.dumps(rows))
        case "tasks.json" | "data.json":
            path.write_text(json.dumps({"version": 1, kind.removesuffix(".json"): rows}))
        case "jsonl":
            path.write_text("\n\n".join(json.dumps(row) for row in rows))
        case "parquet":
            dataset_from_rows(rows).to_parquet(str(path))
        case "folder":
            dataset_from_rows(rows).save_to_disk(str(path))
    return path


@pytest.mark.parametrize("kind", ["json", "tasks.json", "data.json", "jsonl", "parquet", "folder"])
def test_every_kind_of_file_gives_the_same_rows_whatever_the_types_of_their_answers(kind: str, tmp_path: Path) -> None:
    tasks = load_tasks(saved(tmp_path, kind, ROWS))
    assert [given_values(row) for row in tasks] == ROWS
    assert [task.answer for task in tasks_from_rows(tasks)] == [row["answer"] for row in ROWS]


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_file_that_datasets_wrote_by_itself_is_read(kind: str, tmp_path: Path) -> None:
    dataset = Dataset.from_list([{"task_id": "a", "prompt": [{"role": "user", "content": "Hi"}], "answer": 3}])
    path = tmp_path / "tasks.parquet"
    dataset.to_parquet(str(path)) if kind == "parquet" else dataset.save_to_disk(str(path))
    assert load_tasks(path)[0] == dataset[0]


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(-1e9, 1e9).map(lambda x: round(x, 6))
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(json_values, min_size=1, max_size=4))
def test_any_json_survives_in_a_column(values: list[Any]) -> None:
    rows = [{"task_id": str(number), "prompt": "?", "answer": value} for number, value in enumerate(values)]
    kept = [task.answer for task in tasks_from_rows(dataset_from_rows(rows))]
    assert kept == values
    assert [json.dumps(value) for value in kept] == [json.dumps(value) for value in values]


def test_prompts_may_be_texts_in_one_row_and_messages_in_another(tmp_path: Path) -> None:
    rows = [{"task_id": "a", "prompt": "Hi"}, {"task_id": "b", "prompt": [{"role": "user", "content": "Hi"}]}]
    one, other = tasks_from_rows(load_tasks(saved(tmp_path, "json", rows)))
    assert one.prompt == other.prompt


def test_a_dataset_is_taken_as_it_is() -> None:
    dataset = Dataset.from_list(ROWS[:1])
    assert load_tasks(dataset) is dataset


def test_a_split_is_chosen_by_name() -> None:
    splits = DatasetDict(train=Dataset.from_list(ROWS[:1]), test=Dataset.from_list(ROWS[3:4]))
    assert load_tasks(splits, "test")[0]["task_id"] == "d"
    assert load_tasks(DatasetDict(test=splits["test"]))[0]["task_id"] == "d"
    with pytest.raises(TaskFormatError, match=r"\['train', 'test'\]"):
        load_tasks(splits)


def test_a_split_may_be_a_key_of_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps({"train": ROWS, "validation": ROWS[:2]}))
    assert len(load_tasks(path, "validation")) == 2
    words = rf"'train' \({len(ROWS)} rows\), 'validation' \(2 rows\).*--split.*mcp-grpo tasks import {path} {tmp_path}/tasks$"
    with pytest.raises(TaskFormatError, match=words):
        load_tasks(path)
    with pytest.raises(TaskFormatError, match=r"the key 'test'.*\['train', 'validation'\]"):
        load_tasks(path, "test")
    path.write_text(json.dumps({"version": 1, "train": ROWS}))
    assert len(load_tasks(path)) == len(ROWS)
    path.write_text(json.dumps(ROWS))
    with pytest.raises(TaskFormatError, match="has no splits"):
        load_tasks(path, "train")


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_a_file_that_needs_importing_says_so_with_the_command(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"my rows{suffix}"
    rows = [{"question": "How many?", "tools_available": ["f"]}]
    if suffix == ".parquet":
        Dataset.from_list(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if suffix == ".json" else json.dumps(rows[0]))
    with pytest.raises(TaskFormatError) as caught:
        load_tasks(path)
    command = str(caught.value).splitlines()[-1].strip()
    assert command == f"mcp-grpo tasks import '{path}' '{tmp_path}/my rows_tasks.jsonl'"
    hopeless = tmp_path / "hopeless.json"
    hopeless.write_text('[{"colour": "red"}]')
    with pytest.raises(TaskFormatError) as caught:
        load_tasks(hopeless)
    assert "tasks import" not in str(caught.value)


def test_columns_that_tasks_do_not_read_but_mean_something_elsewhere_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([{"task_id": "a", "prompt": "?", "complexity": "easy", "tools_available": ["f"]}]))
    load_tasks(path)
    assert "no `tools`, `difficulty`, but `tools_available`, `complexity`, which tasks do not read" in caplog.text
    assert f"mcp-grpo tasks import {path}" in caplog.text
    caplog.clear()
    path.write_text(json.dumps([{"task_id": "a", "prompt": "?", "answer": 1, "target": 2, "solution": {"steps": []}}]))
    load_tasks(path)
    assert not caplog.text


def test_every_problem_is_listed_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    lines = [
        json.dumps(ROWS[0]),
        '{"task_id": "x", "prompt": "?"',
        "",
        json.dumps({"task_id": "y", "prompt": [], "max_turns": "many", "tools": "add"}),
        json.dumps({"question": "?"}),
        "[1, 2]",
        json.dumps({"task_id": "a", "prompt": "Another"}),
    ]
    path.write_text("\n".join(lines))
    with pytest.raises(TaskFormatError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert "5 rows of" in message
    assert str(path) in message
    for words in (
        "line 2: This is not JSON",
        "line 4: `prompt` must be",
        "line 4: `max_turns` must be a whole number of at least 1, or `None`, got 'many'",
        "line 4: `tools` must be a list of names",
        "line 5: A task needs",
        "line 6: A task is an object",
        "line 7: `task_id` 'a' is that of line 1",
    ):
        assert words in message


def test_the_same_problem_in_many_rows_is_said_once(tmp_path: Path) -> None:
    with pytest.raises(TaskFormatError) as caught:
        load_tasks(saved(tmp_path, "json", [{"question": "?"}] * 1000))
    assert "1000 rows" in str(caught.value)
    assert "row 4 and 995 more: A task needs" in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tasks.json", b"[\n{},\n{]", ["line 3", "column 2"]),
        ("tasks.json", b'{"a": 1}\n{"a": 2}', ["`.jsonl`"]),
        ("tasks.json", b"3", ["list of tasks", "got 3"]),
        ("tasks.json", b'{"rows": []}', ["'tasks'", "'data'", "['rows']"]),
        ("tasks.json", b"[]", ["holds no tasks"]),
        ("tasks.jsonl", b'{"a": 1}\n{"b": "\xff"}', ["Line 2", "UTF-8"]),
        ("tasks.csv", b"task_id,prompt\n", [".jsonl", "datasets.Dataset"]),
        ("tasks.parquet", b"PAR?", ["not a Parquet file"]),
    ],
)
def test_a_file_that_cannot_be_read_says_where_and_what_to_do(
    name: str, content: bytes, words: list[str], tmp_path: Path
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(TaskFormatError) as caught:
        load_tasks(path)
    assert all(word in str(caught.value) for word in [*words, name])


def test_a_file_that_is_not_there_is_not_looked_for_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(TaskFormatError, match="There is no file"):
        load_tasks(tmp_path / "tasks.json")
    with pytest.raises(TaskFormatError, match=r"There is no file 'data/tasks\.jsonl'"):
        load_tasks("data/tasks.jsonl")


def test_a_folder_that_holds_something_else_names_its_files(tmp_path: Path) -> None:
    saved(tmp_path, "jsonl", ROWS)
    with pytest.raises(TaskFormatError, match=r"\['tasks.jsonl'\]"):
        load_tasks(tmp_path)


def test_a_dataset_that_the_hub_does_not_have_is_said_so() -> None:
    with pytest.raises(TaskFormatError, match="neither a file here nor a dataset"):
        load_tasks("nobody/no-such-tasks")
