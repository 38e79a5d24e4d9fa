"""WorkBench is run as it is: its own tools, state and check, with a state of each trajectory's own."""

import json
import os
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from helpers.workbench import ITEMS, NUM_IDLE, NUM_TASKS, write_workbench

from mcp_grpo.bench import bench
from mcp_grpo.cli import main
from mcp_grpo.environments import Environment, load_environment
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import GROUND_TRUTH
from mcp_grpo.rewards import task_outcome
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import Cassette, ToolPool
from mcp_grpo.types import ResultKind, Task, ToolCall


AT_ONCE = 64
DATA = "MCP_GRPO_WORKBENCH"
needs_data = pytest.mark.skipif(DATA not in os.environ, reason=f"{DATA} names no clone of olly-styles/WorkBench")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workbench(tmp_path_factory.mktemp("workbench"))


@pytest.fixture(scope="module")
def environment(folder: Path) -> Environment:
    return load_environment("workbench", folder)


@pytest.fixture(scope="module")
def real() -> Environment:
    return load_environment("workbench", os.environ[DATA])


def tasks_of(environment: Environment, split: str = "all") -> list[Task]:
    return tasks_from_rows(environment.tasks(split))


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def use(pool: ToolPool, task: Task, *calls: ToolCall) -> tuple[list[str], dict[str, Any]]:
    async with pool.lease(task) as lease:
        results = [await lease.call(each) for each in calls]
        return [result.text for result in results], (await lease.states())["workbench"]


def test_the_command_says_what_ground_truth_and_doing_nothing_score(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", "workbench", "--data", str(folder), "--out", str(tmp_path)]
    assert main([*argv, "--policy", "ground-truth"]) == 0
    num_needed = NUM_TASKS - NUM_IDLE
    said = capsys.readouterr().out
    assert said.splitlines()[-6:] == [
        f"ground-truth: {NUM_TASKS} of {NUM_TASKS} (100.0%) succeed",
        f"ground-truth: {num_needed} of {num_needed} (100.0%) succeed where something must be done",
        f"ground-truth: 0 of {NUM_TASKS} (0.0%) have unwanted side effects",
        f"nothing: {NUM_IDLE} of {NUM_TASKS} (40.0%) succeed",
        f"nothing: 0 of {num_needed} (0.0%) succeed where something must be done",
        f"nothing: 0 of {NUM_TASKS} (0.0%) have unwanted side effects",
    ]
    assert "success of doing nothing | 40.0%" in said
    told = json.loads((tmp_path / "bench.json").read_text())
    assert [score["count"] for score in told["scores"]] == [NUM_TASKS, num_needed, 0, NUM_IDLE, 0, 0]
    assert len((tmp_path / "attempts.jsonl").read_text().splitlines()) == NUM_TASKS
    assert main([*argv, "--policy", "nothing", "--split", "test", "--out", str(tmp_path / "idle")]) == 0
    assert capsys.readouterr().out.splitlines()[-3] == "nothing: 2 of 2 (100.0%) succeed"


def test_what_is_wrong_is_counted_with_its_side_effects(environment: Environment, tmp_path: Path) -> None:
    """A policy that always puts the same on the shelf."""
    script = {"steps": [{"calls": [{"name": "shelf_put", "arguments": {"item": "A LAMP", "place": "left"}}]}]}
    policy: Any = type(GROUND_TRUTH)(name="lamps", script=lambda task: {**script, "final": "Done."})
    found = bench(environment, policy, tmp_path)
    # Letters' case does not matter; a lamp that nobody asked for is a side effect.
    assert [(score.count, score.total) for score in found.scores[:3]] == [(1, 10), (1, 6), (9, 10)]


def test_tasks_have_the_authors_opening_tools_and_a_split_by_template(environment: Environment, folder: Path) -> None:
    train, test = tasks_of(environment, "train"), tasks_of(environment, "test")
    assert len(train) + len(test) == len(tasks_of(environment)) == NUM_TASKS
    templates = [{task.metadata["template"] for task in split} for split in (train, test)]
    assert [len(found) for found in templates] == [4, 1]
    assert templates[0].isdisjoint(templates[1])
    assert train[0].prompt == (
        {"role": "system", "content": "It is 2031-05-04."},
        {"role": "user", "content": f"Put {ITEMS[0]} on the shelf"},
    )
    assert train[0].tools == ("shelf.put", "shelf.remove", "shelf.find", "company_directory.find_email_address")
    assert tasks_of(load_environment("workbench", folder, tools="all"))[0].tools is None


@pytest.mark.anyio
async def test_tools_are_described_by_their_own_functions(environment: Environment) -> None:
    async with ToolPool(environment.servers) as pool:
        tools = {tool.name: tool for tool in pool.catalog.tools}
        assert list(tools) == ["shelf_put", "shelf_remove", "shelf_find", "company_directory_find_email_address"]
        put = tools["shelf_put"]
        assert put.description == "Puts an item on the shelf.\n\nReturns\nmessage : str\n    What happened."
        assert put.input_schema["properties"] == {
            "item": {"type": "string", "description": "Name of the item."},
            "place": {"type": "string", "description": 'Where it goes, such as {"left"}.'},
        }
        assert [tool.is_read_only for tool in tools.values()] == [False, False, True, True]


@pytest.mark.anyio
@pytest.mark.parametrize("make", ["environment", pytest.param("real", marks=[needs_data, pytest.mark.full])])
async def test_no_trajectory_sees_what_another_did(make: str, request: pytest.FixtureRequest) -> None:
    """Each leaves something of its own, waits until all have, and looks for all of it."""
    environment: Environment = request.getfixturevalue(make)
    task = next(task for task in tasks_of(environment) if any("email" in tool for tool in task.tools or ()))
    task = Task(task_id=task.task_id, prompt=task.prompt, metadata=task.metadata)  # with all tools
    put, find = (
        (lambda mark: call("shelf_put", item=mark, place="left"), lambda: call("shelf_find", item="mark"))
        if make == "environment"
        else (
            lambda mark: call("calendar_create_event", event_name=mark, participant_email="a@b.c", event_start="2023-12-01 09:00:00", duration="30"),
            lambda: call("calendar_search_events", query="mark"),
        )
    )  # fmt: skip
    num_done, all_done = 0, anyio.Event()

    async def attempt(pool: ToolPool, number: int) -> None:
        nonlocal num_done
        async with pool.lease(task) as lease:
            assert not (await lease.call(put(f"mark {number}."))).is_error
            num_done += 1
            if num_done == AT_ONCE:
                all_done.set()
            await all_done.wait()
            seen = (await lease.call(find())).text
            assert seen.count("mark") == 1
            assert f"mark {number}." in seen

    async with ToolPool(environment.servers) as pool, anyio.create_task_group() as group:
        for number in range(AT_ONCE):
            group.start_soon(attempt, pool, number)


@pytest.mark.anyio
async def test_what_the_policy_writes_is_never_run(environment: Environment, tmp_path: Path) -> None:
    """The authors' check evaluates calls as they are written."""
    trap = tmp_path / "trap"
    text = f'x"), open("{trap}", "w"), ("'
    async with ToolPool(environment.servers) as pool:
        texts, state = await use(pool, tasks_of(environment)[0], call("shelf_put", item=text), call("shelf_find"))
    assert repr(text) in texts[1]
    assert state == {"correct": False, "side_effects": True}
    assert not trap.exists()


@pytest.mark.anyio
async def test_numbers_are_text_and_errors_are_answers(environment: Environment) -> None:
    async with ToolPool(environment.servers) as pool, pool.lease(tasks_of(environment)[0]) as lease:
        assert (await lease.call(call("shelf_put", item=7))).text.endswith("There are 5 items.")
        assert "'7'" in (await lease.call(call("shelf_find"))).text
        assert (await lease.call(call("shelf_find", item="("))).kind is ResultKind.TOOL_ERROR
        assert (await lease.call(call("shelf_put", thing="x"))).kind is ResultKind.INVALID_ARGUMENTS
        # The raw list is not there, so that colleagues are those whose domain is the commonest.
        found = await lease.call(call("company_directory_find_email_address", name="e"))
        assert found.text == "['ann@our.example' 'bob@our.example']"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|a)*b", "(.*)*x", ".*.*.*.*.*x", "a?" * 40 + "a" * 40, "(x+x+)+y", "(?:a{1,9}){9}b"]
)
async def test_a_pattern_does_not_hold_up_the_others(environment: Environment, pattern: str) -> None:
    """The authors' searches take what the policy writes for a regular expression, which nothing could break off."""
    async with ToolPool(environment.servers) as pool, pool.lease(tasks_of(environment)[0]) as lease:
        await lease.call(call("shelf_put", item="a" * 40 + "!", place="left"))
        start = time.monotonic()
        result = await lease.call(call("shelf_find", item=pattern))
        assert time.monotonic() - start < 1
    assert (result.kind, "Search for plain text." in result.text) == (ResultKind.TOOL_ERROR, True)


@pytest.mark.anyio
async def test_searches_are_what_they_were(environment: Environment) -> None:
    patterns = [
        "a lamp",
        ".*lamp.*",
        "^a l.*p$",
        "lamp|cups",
        r"\w+ lamp",
        "l[am]*p",
        "lamps?",
        r"a.{1}lamp",
        "a" * 3000,
    ]
    async with ToolPool(environment.servers) as pool, pool.lease(tasks_of(environment)[0]) as lease:
        await lease.call(call("shelf_put", item="(a+)+ is what it is called", place="left"))  # which is no search
        await lease.call(call("shelf_put", item="a lamp"))
        found = [await lease.call(call("shelf_find", item=pattern)) for pattern in patterns]
        assert ["a lamp" in one.text for one in found] == [True] * 8 + [False]
        assert {one.kind for one in found} == {ResultKind.OK}
        await lease.call(call("shelf_put", item="a" * 2000))  # what is searched may be the policy's own
        start = time.monotonic()
        slow = await lease.call(call("shelf_find", item="a*a*x"))
        assert (slow.kind, time.monotonic() - start < 1) == (ResultKind.TOOL_ERROR, True)


@pytest.mark.anyio
async def test_a_check_that_fails_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any) -> bool:
        raise TypeError("It compares text with a number.")

    monkeypatch.setattr("mcp_grpo.environments.workbench.copy", fail)
    environment = load_environment("workbench", folder)
    async with ToolPool(environment.servers) as pool:
        _, state = await use(pool, tasks_of(environment)[0], call("shelf_put", item="x"))
    assert state == {"correct": False, "side_effects": True}
    assert "WorkBench's check failed at what an attempt left behind, which counts as wrong." in caplog.text
    assert "TypeError: It compares text with a number." in caplog.text


def test_its_modules_touch_nothing_of_this_process(folder: Path, tmp_path: Path) -> None:
    before, place = set(sys.modules), Path.cwd()
    np.random.seed(7)
    random.seed(7)
    expected = np.random.RandomState(7).rand(), random.Random(7).random()
    bench(load_environment("workbench", folder), "ground-truth", tmp_path)
    assert (np.random.rand(), random.random()) == expected
    assert not [name for name in set(sys.modules) - before if name.split(".")[0] in ("src", "langchain", "shelf")]
    assert Path.cwd() == place


@pytest.mark.anyio
async def test_a_recording_is_played_back_without_the_benchmark(environment: Environment, tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"

    async def run(pool: ToolPool) -> Sequence[Any]:
        return [
            await use(pool, task, *(call(one["name"], **one["arguments"]) for step in steps for one in step["calls"]))
            for task in tasks_of(environment)
            if (steps := task.metadata["solution"]["steps"]) is not None
        ]

    async with ToolPool(environment.servers, Cassette(path, "record")) as pool:
        recorded = await run(pool)
    assert [state["correct"] for _, state in recorded] == [True] * NUM_TASKS
    async with ToolPool(None, Cassette(path, "replay")) as pool:
        assert await run(pool) == recorded


def test_what_is_missing_is_said(environment: Environment, tmp_path: Path) -> None:
    assert environment.reward_funcs == (task_outcome,)
    with pytest.raises(SettingsError, match="is not WorkBench"):
        load_environment("workbench", tmp_path)
    with pytest.raises(SettingsError, match="missing 1 required positional argument: 'data'"):
        load_environment("workbench")
    with pytest.raises(SettingsError, match="must be 'domains' or 'all', got 'some'"):
        load_environment("workbench", tmp_path, tools="some")
    with pytest.raises(SettingsError, match=r"has no split 'dev'. Its splits are 'train', 'test', 'all'"):
        environment.tasks("dev")
    with pytest.raises(SettingsError, match=r"There is no environment .workbank.. Known are .workbench., .bfcl."):
        load_environment("workbank")
    with pytest.raises(SettingsError, match="could not be imported"):
        load_environment("nowhere:make")


@needs_data
@pytest.mark.full
def test_the_real_one_scores_what_it_must(real: Environment, tmp_path: Path) -> None:
    tasks = tasks_of(real)
    assert (len(tasks), len({task.metadata["template"] for task in tasks})) == (690, 69)
    templates = [{task.metadata["template"] for task in tasks_of(real, split)} for split in ("train", "test")]
    assert [len(found) for found in templates] == [53, 16]
    found = bench(real, "ground-truth", tmp_path)
    assert [(score.count, score.total) for score in found.scores] == [
        (690, 690),
        (566, 566),
        (0, 690),
        (124, 690),
        (0, 566),
        (0, 690),
    ]
    assert found.evaluation.num_failed == 0
