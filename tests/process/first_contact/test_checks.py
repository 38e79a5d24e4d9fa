"""Checks say what they checked, tell everything that is wrong at once, and fail."""

import json
import shlex
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.shell import ROOT, Shell


SUMS = {"command": sys.executable, "args": [str(ROOT / "tests" / "servers" / "sums.py")]}


def write_tasks(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps({"prompt": "How much?", **row}) + "\n" for row in rows))
    return path


def write_servers(path: Path, server: dict = SUMS) -> Path:
    path.write_text(json.dumps({"mcpServers": {"sums": server}}))
    return path


def test_tools_that_do_not_exist_are_told_all_at_once_each_with_the_nearest_name(shell: Shell, tmp_path: Path) -> None:
    step = {"calls": [{"name": "getQuot", "arguments": {}}]}
    tasks = write_tasks(
        tmp_path / "tasks.jsonl",
        *({"task_id": f"t{n}", "answer": 1, "tools": ["send_slack_message", "getQuote"]} for n in range(5)),
        {"task_id": "s", "servers": ["finanse"], "tools": ["tavily_qna_search"]},
        {"task_id": "own", "answer": 1, "solution": {"steps": [step], "final": "1"}},
    )
    said = shell.run_forked("mcp-grpo", "tasks", "check", tasks)
    assert said.status == 1
    assert "good form" not in said.terminal
    for words in (
        "7 tasks have the required columns",
        "tool 'send_slack_message' (5 tasks: 't0', 't1', 't2' and 2 more) does not exist. The nearest names are `slack_post_message`",
        "server 'finanse' (1 task: 's') is not configured. The nearest names are `finance`",
        "tool 'tavily_qna_search' (1 task: 's') does not exist. The nearest names are `tavily_qna`, `tavily_search`",
        "tool 'getQuot' in a `solution` (1 task: 'own') does not exist. The nearest names are `getQuote`",
        "with `--servers`",
        "The 1 solutions were not run",
        "1 task ('s'): Task 's' has neither an `answer` nor an `expected_state`",
    ):
        assert words in said.terminal


@pytest.mark.full
def test_a_check_says_what_it_checked_and_what_it_did_not(shell: Shell, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", {"task_id": "a", "answer": 5, "tools": ["add"]}, {"task_id": "b"})
    servers = write_servers(tmp_path / "servers.json")
    said = shell.run_forked("mcp-grpo", "tasks", "check", tasks, "--servers", servers)
    assert said.status == 0
    assert f"1 of them name servers or tools, and all of these exist on {servers} (sums: 1 tools)" in said.terminal
    assert "can only be judged by a reward function of your own: - `task_outcome`, 1 task ('b')" in said.terminal
    assert "nothing shows that the tasks can be solved" in said.terminal
    said = shell.run_forked("mcp-grpo", "tasks", "check", write_tasks(tasks, {"task_id": "b", "answer": 5}))
    assert said.status == 0
    assert "No task names servers or tools" in said.terminal
    assert "no server was started" in said.terminal


def test_servers_that_do_not_start_are_no_reason_to_say_that_tools_exist(shell: Shell, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", {"task_id": "a", "answer": 5, "tools": ["ad"]})
    servers = write_servers(tmp_path / "servers.json", {"command": sys.executable, "args": ["-c", "exit(3)"]})
    said = shell.run_forked("mcp-grpo", "tasks", "check", tasks, "--servers", servers)
    assert said.status == 1
    assert "could not be started" in said.terminal
    assert "were not checked" in said.terminal


@pytest.mark.full
def test_a_file_that_needs_importing_says_so_and_its_command_works(
    shell_in: Callable[[Path], Shell], tmp_path: Path
) -> None:
    shell, source = shell_in(tmp_path), tmp_path / "all.json"
    row = {"question": "How much?", "complexity": "Easy", "tools_available": ["add"], "ground_truth": 5}
    source.write_text(json.dumps({"train": [row, {**row, "question": "How many?"}], "validation": [row]}))
    said = shell.run_forked("mcp-grpo", "tasks", "check", "all.json")
    assert said.status == 1
    assert "more than one list: 'train' (2 rows), 'validation' (1 rows)" in said.terminal
    said = shell.run_forked("mcp-grpo", "tasks", "check", "all.json", "--split", "train")
    assert said.status == 1
    assert "seems to have column names of its own" in said.terminal
    command = next(line for line in said.err.splitlines() if "mcp-grpo tasks import" in line)
    assert shell.run_forked(*shlex.split(command)).status == 0
    (task, _) = map(json.loads, (tmp_path / "all_train.jsonl").read_text().splitlines())
    assert {name: task[name] for name in ("prompt", "difficulty", "tools", "answer")} == {
        "prompt": "How much?",
        "difficulty": "easy",
        "tools": ["add"],
        "answer": 5,
    }
    assert shell.run_forked("mcp-grpo", "tasks", "import", "all.json", "mixed.jsonl").status == 1
    assert not (tmp_path / "mixed.jsonl").exists()
    assert shell.run_forked("mcp-grpo", "tasks", "import", "all.json", "parts").status == 0
    lines = {path.name: len(path.read_text().splitlines()) for path in (tmp_path / "parts").iterdir()}
    assert lines == {"train.jsonl": 2, "validation.jsonl": 1}


def test_a_pre_flight_tells_everything_that_is_wrong_at_once(shell: Shell, tmp_path: Path) -> None:
    tasks = write_tasks(tmp_path / "tasks.jsonl", {"task_id": "a", "tools": ["ad"]}, {"task_id": "b"})
    flags = {
        "--config": shell.folder / "recipes" / "configs" / "cpu_debug.yaml",
        "--servers": write_servers(tmp_path / "servers.json"),
        "--tasks": tasks,
        "--rewards": "exact_answer",
        "--load_in_4bit": "true",
        "--top_p": "0.5",
    }
    words = [str(word) for flag in flags.items() for word in flag]
    said = shell.run_forked("recipes/grpo_qwen3.py", "--preflight", *words, timeout=600)
    assert said.status != 0
    assert "Traceback" not in said.err
    for sentence in (
        "settings: `top_p=0.5` samples from another distribution",
        "tool 'ad' (1 task: 'a') does not exist. The nearest names are `add`",
        "`exact_answer`, 2 tasks ('a', 'b'): Task 'a' has no `answer` to compare with. Give every task one",
        "not run trainer: needs settings and rewards and tools",
    ):
        assert sentence in said.terminal
    sentence = (
        "`load_in_4bit: true` needs `bitsandbytes`, which is not installed: `pip install 'mcp-grpo[quantization]'`"
    )
    assert (sentence in said.terminal) == (find_spec("bitsandbytes") is None)
