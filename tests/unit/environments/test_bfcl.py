"""
BFCL's conversations are run as they are: its own APIs, executor and checker, with users and tools that come turn by turn.

Where `bfcl_eval` is installed, or on `PYTHONPATH`, the tests with `installed` use it; the others use a made-up one in its place.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers.bfcl import NUM_CONVERSATIONS, write_bfcl

from mcp_grpo.bench import bench
from mcp_grpo.cli import main
from mcp_grpo.environments import Environment, bfcl, load_environment
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.rewards.checks import check_tasks
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import Cassette, Lease, ToolPool
from mcp_grpo.types import Exchange, ResultKind, StopReason, Task, ToolCall, ToolResult


AT_ONCE = 64
CACHED = ("_code", "_root", "_documented", "_tools", "_entries", "_parameters")
is_installed = find_spec("bfcl_eval") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="bfcl-eval is not installed")


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    """The made-up one, in place of what is installed."""
    kept = forget()
    monkeypatch.syspath_prepend(str(write_bfcl(tmp_path / "site")))
    yield load_environment("bfcl")
    forget()
    sys.modules.update(kept)


def forget() -> dict[str, Any]:
    for name in CACHED:
        getattr(bfcl, name).cache_clear()
    return {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "bfcl_eval"}


def tasks_of(environment: Environment) -> dict[str, Task]:
    return {task.task_id.removeprefix("multi_turn_"): task for task in tasks_from_rows(environment.tasks())}


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def says_more(lease: Lease) -> str | None:
    said = await lease.next_user_turn(lambda: pytest.fail("The user's words are written."))
    return None if said is None else said[0].content


def test_ground_truth_and_doing_nothing_score_what_they_must(
    environment: Environment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    number = 4 * NUM_CONVERSATIONS
    assert main(["bench", "bfcl", "--policy", "ground-truth", "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[-4:] == [
        f"ground-truth: {number} of {number} (100.0%) succeed",
        f"ground-truth: {number} of {number} (100.0%) succeed where something must be done",
        f"nothing: 0 of {number} (0.0%) succeed",
        f"nothing: 0 of {number} (0.0%) succeed where something must be done",
    ]
    assert environment.max_turns == 4


@needs_package
@pytest.mark.full
def test_the_installed_one_scores_what_it_must(tmp_path: Path) -> None:
    found = bench(load_environment("bfcl"), "ground-truth", tmp_path)
    assert [(score.count, score.total) for score in found.scores] == [(800, 800), (800, 800), (0, 800), (0, 800)]
    assert found.evaluation.success_by_family == dict.fromkeys(sorted(bfcl.CATEGORIES), 1.0)
    assert found.evaluation.num_failed == 0


def test_held_out_conversations_are_held_out_in_every_category(environment: Environment) -> None:
    splits = [{row["task_id"].rpartition("_")[2] for row in environment.tasks(name)} for name in ("train", "test")]
    assert splits == [{"0", "1", "2"}, {"3"}]
    only = load_environment("bfcl", category="miss_param").tasks("test")
    assert [row["task_id"] for row in only] == ["multi_turn_miss_param_3"]


@pytest.mark.anyio
async def test_tools_come_when_the_user_brings_them(environment: Environment) -> None:
    task = tasks_of(environment)["miss_func_1"]
    assert task.tools == ("put",)  # which is withheld, too, but which the ground truth needs before
    async with ToolPool(environment.servers) as pool, pool.lease(task) as lease:
        check_tasks([task], environment.reward_funcs, pool.catalog, (), pool.setup_servers)
        assert (await lease.call(call("list_all"))).kind is ResultKind.UNKNOWN_TOOL
        assert await says_more(lease) == "List all."
        assert (await lease.call(call("list_all"))).kind is ResultKind.UNKNOWN_TOOL
        assert await says_more(lease) == "There is more now."
        assert (await lease.call(call("list_all"))).text == '{"coins": [1]}'
        assert await says_more(lease) is None


@pytest.mark.anyio
async def test_no_trajectory_sees_what_another_did(environment: Environment) -> None:
    """All attempt the same task, whose instances have the same names in the executor."""
    task, num_done, all_done = tasks_of(environment)["long_context_2"], 0, anyio.Event()

    async def attempt(pool: ToolPool, number: int) -> None:
        nonlocal num_done
        async with pool.lease(task) as lease:
            await lease.call(call("put", coin=100 + number))
            num_done += 1
            if num_done == AT_ONCE:
                all_done.set()
            await all_done.wait()
            assert (await lease.call(call("list_all"))).text == f'{{"coins": [2, "long", {100 + number}]}}'

    async with ToolPool(environment.servers) as pool, anyio.create_task_group() as group:
        for number in range(AT_ONCE):
            group.start_soon(attempt, pool, number)


@pytest.mark.anyio
async def test_what_the_policy_writes_is_never_run(environment: Environment, tmp_path: Path) -> None:
    task, trap = tasks_of(environment)["base_0"], tmp_path / "trap"
    texts = [f"'), open('{trap}', 'w'), ('", f'"), open("{trap}", "w"), ("', f"\\'), open('{trap}', 'w'))#"]
    calls = [call("put", coin=text) for text in texts]
    calls += [call("put", coin=1, **{f"x=open('{trap}', 'w'), y": 1})]
    async with ToolPool(environment.servers) as pool, pool.lease(task) as lease:
        results = [await lease.call(each) for each in calls]
        assert [result.kind for result in results] == [ResultKind.OK] * 3 + [ResultKind.TOOL_ERROR]
        assert (await lease.call(call("put", coin=""))).kind is ResultKind.TOOL_ERROR  # as the API says it
    (solution,) = run_solutions([task], environment.servers, is_success=environment.is_success)
    written = tuple(Exchange(call=one, result=result, turn=0) for one, result in zip(calls, results, strict=True))
    hostile = replace(solution.trajectory, exchanges=written + solution.trajectory.exchanges)
    assert not environment.is_success(hostile)
    assert not trap.exists()


def test_only_the_whole_conversation_is_right(environment: Environment) -> None:
    (solution,) = run_solutions([tasks_of(environment)["base_1"]], environment.servers, is_success=lambda _: True)
    right = solution.trajectory
    assert environment.reward_funcs[0]([right, right]) == [1.0, 1.0]  # the second finds nothing of the first
    assert not environment.is_success(replace(right, stop_reason=StopReason.MAX_TURNS))
    assert not environment.is_success(replace(right, messages=right.messages[:-3]))  # the user was not done
    assert not environment.is_success(replace(right, exchanges=right.exchanges[1:]))
    # What was refused was not done.
    refused = replace(right.exchanges[0], result=ToolResult(text="", kind=ResultKind.INVALID_ARGUMENTS))
    assert not environment.is_success(replace(right, exchanges=(refused, *right.exchanges[1:])))
    assert environment.is_success(replace(right, exchanges=(refused, *right.exchanges)))


@pytest.mark.anyio
async def test_a_recording_is_played_back_without_the_package(environment: Environment, tmp_path: Path) -> None:
    path, tasks = tmp_path / "calls.jsonl", tasks_of(environment).values()

    async def run(pool: ToolPool) -> list[Any]:
        said: list[Any] = []
        for task in tasks:
            async with pool.lease(task) as lease:
                for each in task.metadata["solution"]["rounds"]:
                    for step in each["steps"]:
                        calls = [call(one["name"], **one["arguments"]) for one in step["calls"]]
                        said += [result.text for result in await lease.call_all(calls)]
                    said.append(await says_more(lease))
        return said

    async with ToolPool(environment.servers, Cassette(path, "record")) as pool:
        recorded = await run(pool)
    assert "There is more now." in recorded
    async with ToolPool(None, Cassette(path, "replay")) as pool:
        assert await run(pool) == recorded


def test_what_is_missing_is_said(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"must be one of .* got 'best'"):
        load_environment("bfcl", category="best")
    monkeypatch.setattr(bfcl, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install --no-deps bfcl-eval"):
        load_environment("bfcl")
