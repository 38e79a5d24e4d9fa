"""Scripted policies are evaluated like any other: on the real servers, with the states that they leave."""

import json
from pathlib import Path
from typing import Any

import pytest
from mcp.server.mcpserver import MCPServer

from mcp_grpo import evaluate
from mcp_grpo.evaluation import GROUND_TRUTH, NOTHING
from mcp_grpo.policy_evaluation import baselines, read_attempts
from mcp_grpo.types import Task, UserTurn


def make_jar(task: Task | None) -> MCPServer:
    if task is not None and task.metadata.get("is_broken"):
        raise ValueError("no jar")
    jar, coins = MCPServer("jar", log_level="ERROR"), list[str]()

    @jar.tool()
    async def add(coin: str) -> str:
        coins.append(coin)
        return "added"

    @jar.tool()
    async def content() -> str:
        return json.dumps(coins)

    return jar


SERVERS: Any = {"jar": {"server": make_jar, "x-mcp-grpo": {"state_tool": "content"}}}


def task(name: str, *coins: str, **metadata: Any) -> Task:
    steps = [{"calls": [{"name": "add", "arguments": {"coin": coin}}]} for coin in coins]
    # Every coin is asked for by itself.
    rounds = [{"steps": [step], "final": "Done."} for step in steps] or [{"steps": [], "final": "Done."}]
    return Task(
        task_id=name,
        prompt=({"role": "user", "content": "Add a coin, if there is one."},),
        user_turns=tuple(UserTurn(content="Another.") for _ in rounds[1:]),
        metadata={"expected_state": {"jar": list(coins)}, "solution": {"rounds": rounds}, **metadata},
    )


TASKS = [task("none"), task("one", "a"), task("three", "a", "b", "c")]


def test_what_is_to_be_compared_with_is_run_on_the_servers() -> None:
    """Without a state, no task that asks for one could be judged."""
    assert baselines(TASKS, SERVERS) == {"doing nothing": pytest.approx(1 / 3), "scripted solutions": 1.0}


def test_scripts_are_policies(tmp_path: Path) -> None:
    found = evaluate(GROUND_TRUTH, TASKS, SERVERS, output_dir=tmp_path / "truth", max_concurrent=2)
    assert (found.success, found.num_trajectories) == (1.0, 3)
    assert [attempt.states for attempt in read_attempts(tmp_path / "truth")][-1] == {"jar": ["a", "b", "c"]}
    idle = evaluate(NOTHING, TASKS, SERVERS, k=2, output_dir=tmp_path / "idle")
    assert idle.outcomes == {"none": [True, True], "one": [False, False], "three": [False, False]}
    assert [attempt.num_turns for attempt in read_attempts(tmp_path / "idle")] == [1, 1, 3] * 2


def test_what_a_server_fails_does_not_count(tmp_path: Path) -> None:
    found = evaluate(GROUND_TRUTH, [*TASKS, task("broken", "a", is_broken=True)], SERVERS, output_dir=tmp_path)
    assert (found.success, found.num_tasks, found.num_failed) == (1.0, 3, 1)
    assert len(read_attempts(tmp_path)) == 3
