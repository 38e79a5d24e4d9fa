"""Each process of a server works on a copy of a folder, and nobody notices."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from mcp_grpo.errors import CatalogError, ServerConfigError, TaskFormatError, ToolServerError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.rewards import is_done, task_outcome
from mcp_grpo.rewards.checks import reward_problems
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import ServerConfig, ToolPool, load_servers
from mcp_grpo.tools.setup import state_calls
from mcp_grpo.types import Task, ToolCall


pytestmark = pytest.mark.anyio

CABINET = Path(__file__).parents[2] / "servers" / "cabinet.py"
TASK = Task(task_id="t", prompt=())


@pytest.fixture
def office(tmp_path: Path) -> Path:
    folder = tmp_path / f"office_{uuid4().hex}"
    folder.mkdir()
    (folder / "a.txt").write_text("alpha")
    return folder


def cabinet(office: Path, **options: Any) -> ServerConfig:
    options = {"isolation": "exclusive", "scratch": str(office), "pool_size": 2, "spares": 0} | options
    args = (str(CABINET), str(office))
    env = {"CABINET": f"{office}/a.txt:{office}2"}
    return ServerConfig(name="cabinet", transport="stdio", command=sys.executable, args=args, env=env, **options)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def row(office: Path, **columns: Any) -> dict[str, Any]:
    path = f"{office}/b.txt"
    reads = [{"name": "read_file", "arguments": {"path": path}}, {"name": "list_files", "arguments": {}}]
    steps = [{"calls": [{"name": "write_file", "arguments": {"path": path, "text": "beta"}}], "evidence": [path]}]
    files = json.dumps([{"path": f"{office}/a.txt", "bytes": 5}, {"path": path, "bytes": 4}])
    return {
        "task_id": "write",
        "prompt": "Write beta into b.txt.",
        "tools": ["write_file"],
        "state_calls": {"cabinet": reads},
        "expected_state": {"cabinet": {"calls": [{"equals": "beta"}, {"equals": files}]}},
        "solution": {"steps": steps, "final": "Done."},
    } | columns


async def test_what_is_written_stays_in_the_copy_of_one_trajectory(office: Path) -> None:
    path = f"{office}/b.txt"
    async with ToolPool([cabinet(office)]) as pool:
        async with pool.lease(TASK) as first, pool.lease(TASK) as second:
            written = await first.call(call("write_file", path=path, text="beta"))
            listed = [await lease.call(call("list_files")) for lease in (first, second)]
            place = json.loads((await first.call(call("working_directory"))).text)
        async with pool.lease(TASK) as third:
            anew = await third.call(call("list_files"))
    assert written.text == f"wrote {path}"  # by its own name, in calls and results
    assert [[one["path"] for one in json.loads(result.text)] for result in (*listed, anew)] == [
        [f"{office}/a.txt", path],
        [f"{office}/a.txt"],
        [f"{office}/a.txt"],
    ]
    assert place == {"directory": str(office), "variable": f"{office}/a.txt:{office}2"}
    assert [file.name for file in office.iterdir()] == ["a.txt"]
    assert not list(Path(tempfile.gettempdir()).glob(f"mcp_grpo_servers_*/*/{office.name}"))


@pytest.mark.full
async def test_a_relative_folder_starts_at_the_file_that_names_it(office: Path) -> None:
    entry = {"command": sys.executable, "args": [str(CABINET), str(office)]}
    entry["x-mcp-grpo"] = {"isolation": "exclusive", "scratch": office.name, "pool_size": 1, "spares": 0}
    (office.parent / "mcp.json").write_text(json.dumps({"mcpServers": {"cabinet": entry}}))
    async with ToolPool(office.parent / "mcp.json") as pool:
        await pool.call(call("write_file", path=f"{office}/b.txt", text="beta"))
    assert [file.name for file in office.iterdir()] == ["a.txt"]


async def test_a_folder_that_is_not_there_is_told(office: Path) -> None:
    with pytest.raises(ToolServerError, match=r"`scratch` of server 'cabinet', could not be copied"):
        async with ToolPool([cabinet(office, scratch=f"{office}/none")]):
            pass


@pytest.mark.parametrize("options", [{"isolation": "shared"}, {"reset_tool": "list_files"}])
def test_a_copy_that_others_would_get_is_refused(office: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ServerConfigError, match="needs `isolation` 'exclusive' and no `reset_tool`"):
        cabinet(office, **options)
    with pytest.raises(ServerConfigError, match="has no effect on one that is not started here"):
        load_servers(
            {"web": {"url": "http://localhost/mcp", "x-mcp-grpo": {"isolation": "exclusive", "scratch": "a"}}}
        )


@pytest.mark.full
def test_calls_at_the_end_show_the_state_that_a_task_expects(office: Path) -> None:
    idle = row(office, task_id="idle", solution={"steps": [], "final": "Done."})
    too_much = row(office, task_id="too much")
    more = {"calls": [{"name": "write_file", "arguments": {"path": f"{office}/c.txt", "text": "c"}}]}
    too_much["solution"]["steps"].append(more)
    tasks = tasks_from_rows([row(office), idle, too_much])
    found = run_solutions(tasks, [cabinet(office, pool_size=1)])
    assert [is_done(one.trajectory) for one in found] == [True, False, False]
    assert [bool(one.problems) for one in found] == [False, True, True]
    assert found[0].trajectory.states["cabinet"]["calls"][0] == "beta"
    assert reward_problems(tasks, task_outcome) == []


async def test_state_calls_that_cannot_be_made_are_told(office: Path) -> None:
    reads = {"cabinet": [{"name": "read_fiel", "arguments": {}}]}
    async with ToolPool([cabinet(office, pool_size=1)]) as pool:
        (task,) = tasks_from_rows([row(office, state_calls=reads)])
        with pytest.raises(CatalogError, match=r"'read_fiel' of server 'cabinet', which does not exist.*read_file"):
            async with pool.lease(task):
                pass
    (task,) = tasks_from_rows([row(office, state_calls={"cabinet": "read_file"})])
    with pytest.raises(TaskFormatError, match="must map names of servers to lists of calls"):
        state_calls(task)
