"""
Environments of the library `verifiers` are run as they are: what its rubric says of a rollout of its own, it says of ours.

Where `verifiers` is installed, or on `PYTHONPATH`, the tests that need it run; the environments are made up.
"""

import importlib
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import pytest
from helpers.verifiers_envs import write_environments

from mcp_grpo.bench import bench
from mcp_grpo.cli import main
from mcp_grpo.environments import Environment, load_environment, verifiers
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import Scripted, run_solutions
from mcp_grpo.policy_evaluation import evaluate
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import Cassette, ToolPool
from mcp_grpo.types import ResultKind, StopReason, Task, ToolCall, Trajectory


AT_ONCE = 64
needs_package = pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed")

Turn = str | Sequence[tuple[str, Mapping[str, Any]]]  # an answer, or calls


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = list(sys.path)
    yield write_environments(tmp_path_factory.mktemp("environments"))
    sys.path[:] = path


def tasks_of(environment: Environment) -> list[Task]:
    return tasks_from_rows(environment.tasks())


def script(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the solution that has these turns."""
    rounds, steps = list[dict[str, Any]](), list[dict[str, Any]]()
    for turn in turns:
        if isinstance(turn, str):
            rounds.append({"steps": steps, "final": turn})
            steps = []
        else:
            steps.append({"calls": [{"name": name, "arguments": given} for name, given in turn]})
    assert not steps
    return {"rounds": rounds}


def ours(environment: Environment, index: int, turns: Sequence[Turn]) -> Trajectory:
    task = tasks_of(environment)[index]
    task = replace(task, metadata={**task.metadata, "solution": script(turns)})
    (run,) = run_solutions([task], environment.servers, is_success=lambda _: True, user=environment.user)
    assert not run.problems
    return run.trajectory


def theirs(name: str, index: int, turns: Sequence[Turn]) -> Any:
    """Return the state of a rollout by the library itself, judged by itself."""
    vf = importlib.import_module("verifiers")
    env, left = vf.load_environment(name), iter(turns)

    async def respond(*args: Any, **kwargs: Any) -> Any:
        turn = next(left)
        calls = [] if isinstance(turn, str) else turn
        message = vf.ResponseMessage(
            content=turn if isinstance(turn, str) else "",
            tool_calls=[vf.ToolCall(id=str(i), name=n, arguments=json.dumps(a)) for i, (n, a) in enumerate(calls)],
            finish_reason="stop",
            is_truncated=False,
        )
        return vf.Response(id="", created=0, model="", message=message)

    methods: dict[str, Any] = dict.fromkeys([*vf.Client.__abstractmethods__, "get_response"], respond)
    client = type("Client", (vf.Client,), methods)(None)

    async def run() -> Any:
        state = await env.rollout((env.build_dataset() or env.build_eval_dataset())[index], client, "m", {})
        await env.rubric.score_rollout(state)
        return state

    with verifiers._own_signals():
        return anyio.run(run)


def put(coin: int) -> list[tuple[str, dict[str, Any]]]:
    return [("put", {"coin": coin})]


SCRIPTS: dict[str, tuple[str, int, Sequence[Turn]]] = {
    "right": ("vf_jar", 2, [put(1), put(2), "It is done."]),
    "wrong": ("vf_jar", 2, [put(1), "It is done."]),
    "error": ("vf_jar", 0, [put(-1), put(1), "Well."]),
    "two calls in a turn": ("vf_jar", 2, [[*put(1), *put(2)], "It is done."]),
    "nothing": ("vf_jar", 0, ["I do not know."]),
    "found": ("vf_guess", 0, ["1", "5", "3"]),
    "found at once": ("vf_guess", 1, ["7"]),
    "out of turns": ("vf_guess", 1, ["1", "2", "3", "4"]),
    "single turn": ("vf_single", 0, ["<answer>\n2\n</answer>"]),
    "single turn, no form": ("vf_single", 0, ["2"]),
}


@needs_package
@pytest.mark.parametrize("case", SCRIPTS)
def test_a_trajectory_is_worth_what_the_library_says_itself(case: str, folder: Path) -> None:
    name, index, turns = SCRIPTS[case]
    environment = load_environment("verifiers", folder, env=name)
    trajectory, state = ours(environment, index, turns), theirs(name, index, turns)
    assert environment.reward_funcs[0]([trajectory, trajectory]) == [state["reward"]] * 2
    assert environment.is_success(trajectory) == (state["reward"] >= 0.5)
    said = [message.content for message in state["completion"] if message.role in ("tool", "user")]
    if state.get("final_env_response"):
        said.pop()  # which the policy does not get to read
    assert [message["content"] for message in trajectory.messages if message["role"] in ("tool", "user")] == said


@needs_package
@pytest.mark.parametrize(
    ("turns", "num_kept"),
    [
        ([put(1), [("seal", {})], put(1), "done"], 2),  # the environment had the last word after two turns
        ([put(1), put(1), put(1), put(1), "done"], 4),  # it was full after three, and asked once more
    ],
)
def test_what_comes_after_the_end_changes_nothing(turns: Sequence[Turn], num_kept: int, folder: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_jar")
    trajectory, state = ours(environment, 0, turns), theirs("vf_jar", 0, turns)
    assert len(state["trajectory"]) == num_kept
    assert environment.reward_funcs[0]([trajectory]) == [state["reward"]]
    assert trajectory.exchanges[-1].result.text == verifiers.OVER
    assert trajectory.states["verifiers"]["state"]["jar"] == state["jar"]


@needs_package
def test_the_command_prints_what_it_scores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "verifiers", "--option", "env", "vf_jar", "--option", "size", "6", "--data", str(folder)]
    assert main([*command, "--policy", "nothing", "--out", str(tmp_path)]) == 0
    assert "nothing: 0 of 8 (0.0%) succeed" in capsys.readouterr().out.splitlines()


@needs_package
def test_a_policy_that_solves_all_is_found_to(folder: Path, tmp_path: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_jar")
    assert {name: len(rows) for name, rows in environment.splits.items()} == {"train": 4, "test": 2}
    assert environment.max_turns == 5
    policy = Scripted(name="all", script=lambda task: script([put(1 + task.metadata["row"]), "done"]))
    found = bench(environment, policy, tmp_path)
    assert [(score.count, score.total) for score in found.scores] == [(6, 6), (6, 6), (0, 6), (0, 6)]


@needs_package
def test_doing_nothing_in_a_game_goes_on_until_the_game_ends(folder: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_guess")
    policy = Scripted(name="same", script=lambda task: script(["7"]))
    found = evaluate(
        policy, environment.tasks(), environment.servers, is_success=environment.is_success, user=environment.user
    )
    assert (found.success, found.num_failed) == (0.5, 0)
    assert [m["content"] for m in ours(environment, 0, ["7"]).messages] == [*["7", "Lower."] * 3, "7"]


@needs_package
@pytest.mark.anyio
async def test_no_trajectory_sees_what_another_did(folder: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_jar")
    task, num_done, all_done = tasks_of(environment)[0], 0, anyio.Event()

    async def attempt(pool: ToolPool, number: int) -> None:
        nonlocal num_done
        async with pool.lease(task) as lease:
            await lease.call(ToolCall(name="put", arguments={"coin": 100 + number}))
            num_done += 1
            if num_done == AT_ONCE:
                all_done.set()
            await all_done.wait()
            assert (await lease.states())["verifiers"]["state"]["jar"] == [100 + number]

    async with ToolPool(environment.servers) as pool, anyio.create_task_group() as group:
        assert {tool.name for tool in pool.catalog.tools} == {"put", "seal"}
        for number in range(AT_ONCE):
            group.start_soon(attempt, pool, number)


@needs_package
@pytest.mark.anyio
async def test_what_ends_the_library_s_rollouts_is_not_the_policy_s_fault(folder: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_jar")
    async with ToolPool(environment.servers) as pool, pool.lease(tasks_of(environment)[0]) as lease:
        result = await lease.call(ToolCall(name="put", arguments={"coin": 13}))
        assert (result.kind, result.text) == (
            ResultKind.SERVER_ERROR,
            "The environment failed: ToolCallError: The jar is out of reach.",
        )
        result = await lease.call(ToolCall(name="put", arguments={"coin": "a", "jar": []}))
        assert result.kind is ResultKind.INVALID_ARGUMENTS


@needs_package
@pytest.mark.anyio
async def test_a_recording_is_judged_like_the_run(folder: Path, tmp_path: Path) -> None:
    environment, path = load_environment("verifiers", folder, env="vf_guess"), tmp_path / "calls.jsonl"
    right = ours(environment, 0, ["1", "3"])
    said: list[list[str | None]] = []

    def first(number: int) -> Trajectory:
        return replace(right, messages=right.messages[:number])

    for mode in ("record", "replay"):
        servers = environment.servers if mode == "record" else None
        pool = ToolPool(servers, Cassette(path, mode), user=environment.user)
        async with pool, pool.lease(right.task) as lease:
            turns = [await lease.next_user_turn(partial(first, number)) for number in (1, 3)]
            states = await lease.states()
        said.append([None if turn is None else turn[0].content for turn in turns])
        assert environment.reward_funcs[0]([replace(right, states=states)]) == [1.25]
        environment = load_environment("verifiers", folder, env="vf_guess")  # which holds nothing of the first
    assert said == [["Higher.", None]] * 2


@needs_package
def test_a_trajectory_that_was_cut_is_judged_as_far_as_it_came(folder: Path) -> None:
    environment = load_environment("verifiers", folder, env="vf_jar")
    whole = ours(environment, 2, [put(1), put(2), "It is done."])
    cut = replace(whole, messages=whole.messages[:-1], stop_reason=StopReason.MAX_TURNS)
    assert environment.reward_funcs[0]([cut, whole]) == [1.0, 1.25]


@needs_package
@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("sandbox", r"runs in sandboxes or at services of others \(`SandboxEnv`\)"),
        ("judged", r"asks a judge at an endpoint \(`JudgeRubric`\)"),
        ("compared", "compares the rollouts of a group"),
        ("nonlinear", "its `get_prompt_messages` decides what the policy sees"),
        ("reworded", "changes the prompt or the tools when task 'train-0' begins"),
        ("own tools", "has tools of its own in `info`"),
        ("broken", r"'vf_refused' of verifiers could not be loaded: .*It is broken\."),
    ],
)
def test_what_cannot_be_carried_over_is_refused(kind: str, why: str, folder: Path) -> None:
    with pytest.raises(SettingsError, match=why):
        load_environment("verifiers", folder, env="vf_refused", kind=kind)


@needs_package
def test_ctrl_c_stays_what_it_was(folder: Path) -> None:
    before = [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)]
    load_environment("verifiers", folder, env="vf_jar")
    assert [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)] == before


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match=r"was not given what it takes: .*'env'"):
        load_environment("verifiers")
    monkeypatch.setattr(verifiers, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match="pip install --no-deps verifiers=="):
        load_environment("verifiers", env="any")
