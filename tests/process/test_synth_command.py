"""The command `mcp-grpo tasks synth`."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.endpoint import stand_in

from mcp_grpo.cli import main


CABINET = Path(__file__).parents[1] / "servers" / "cabinet.py"
WORDS = ("amber", "basalt", "cedar", "dune", "ember", "fjord", "grove", "heath")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small tables, and a file that names its server."""
    place = tmp_path_factory.mktemp("synth")
    (place / "office").mkdir()
    for number, word in enumerate(WORDS[:4]):
        rows = [
            f"{other},{number * 31 + 7 * index + 11},{200 + 13 * index - number}" for index, other in enumerate(WORDS)
        ]
        (place / "office" / f"{word}.csv").write_text("\n".join(["kind,units,weight", *rows]) + "\n")
    entry: dict[str, Any] = {"command": sys.executable, "args": [str(CABINET), str(place / "office")]}
    (place / "mcp.json").write_text(json.dumps({"mcpServers": {"cabinet": entry}}))
    entry["x-mcp-grpo"] = {"isolation": "exclusive", "scratch": "office", "pool_size": 2, "spares": 1}
    (place / "scratch.json").write_text(json.dumps({"mcpServers": {"cabinet": entry}}))
    return place


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def check(servers: Path, tasks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check all tasks of a folder on their servers."""
    found = rows(tasks)
    (tasks / "all.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in found))
    capsys.readouterr()
    assert main(["tasks", "check", str(tasks / "all.jsonl"), "--servers", str(servers)]) == 0
    assert f"{len(found)} of {len(found)} solutions solve" in capsys.readouterr().out


@pytest.mark.full
def test_tasks_are_made_and_pass_the_check(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, servers = place / "tasks", place / "mcp.json"
    assert main(["tasks", "synth", "--servers", str(servers), "--out", str(out), "--number", "30"]) == 0
    said = capsys.readouterr().out
    assert "30 tasks (" in said
    assert "`write_file` was not used: it may change things" in said
    assert {"train.jsonl", "README.md", "report.json"} <= {path.name for path in out.iterdir()}
    assert {"lookup", "chain"} <= {row["family"] for row in rows(out)}
    check(servers, out, capsys)


@pytest.mark.full
def test_changes_are_made_in_copies_of_the_folder_and_pass_the_check(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, servers = place / "changes", place / "scratch.json"
    arguments = ["tasks", "synth", "--servers", str(servers), "--out", str(out), "--number", "12", "--allow-writes"]
    assert main(arguments) == 0
    assert {"lookup", "change"} <= {row["family"] for row in rows(out)}
    check(servers, out, capsys)
    assert sorted(path.name for path in (place / "office").iterdir()) == [f"{word}.csv" for word in WORDS[:4]]
    assert all("kind,units,weight" in path.read_text() for path in (place / "office").iterdir())


@pytest.mark.full
def test_a_policy_tells_how_difficult_tasks_are(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "rated"
    arguments = ["tasks", "synth", "--servers", str(place / "mcp.json"), "--out", str(out), "--number", "6", "-k", "1"]
    with stand_in(lambda body: {"content": "Answer: no data available"}) as endpoint:
        assert main([*arguments, "--policy", endpoint.url, "--policy-name", "m"]) == 0
    found = rows(out)
    assert found
    assert {row["difficulty"] for row in found} == {"hard"}  # a refusal is paid only after a look
    assert {row["success_rate"] for row in found} == {0.0}


def test_wrong_settings_are_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["tasks", "synth", "--servers", str(place / "mcp.json"), "--out", str(place / "none")]
    (place / "values.json").write_text('{"city": "Oslo"}')
    assert main([*start, "--values", str(place / "values.json")]) == 1
    assert "must hold lists of values by the names of arguments" in capsys.readouterr().err
    assert main([*start, "--writer", "http://localhost:1/v1"]) == 1
    assert "--writer-name" in capsys.readouterr().err
    assert not (place / "none").exists()


def test_a_server_with_nothing_to_ask_about_is_told(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = {"mcpServers": {"sums": {"command": sys.executable, "args": [str(CABINET.with_name("sums.py"))]}}}
    (place / "sums.json").write_text(json.dumps(slow))
    assert main(["tasks", "synth", "--servers", str(place / "sums.json"), "--out", str(place / "empty")]) == 1
    told = capsys.readouterr()
    assert "Nothing was found that could be asked" in told.err
    assert "may change things" in told.out
