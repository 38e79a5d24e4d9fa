"""Scripted solutions that could not be run, or learnt from, are refused."""

import pytest
from datasets import Dataset

from mcp_grpo.errors import TaskFormatError
from mcp_grpo.evaluation import check_replayed
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tasks.columns import dataset_from_rows


ROWS = with_solutions(build_tasks(num_train=9, num_held_out=1)[0])


def test_arguments_that_arrow_has_added_are_refused() -> None:
    with pytest.raises(TaskFormatError, match=r"has the arguments of all tools.*'name': None.*load_tasks"):
        check_replayed(tasks_from_rows(Dataset.from_list(ROWS)))


def test_solutions_as_they_were_written_are_not() -> None:
    check_replayed(tasks_from_rows(dataset_from_rows(ROWS)))
    check_replayed(tasks_from_rows(Dataset.from_list([row for row in ROWS if len(row["steps"]) == 1])))
