"""The command `mcp-grpo`."""

import json
import sys
from pathlib import Path

import pytest

from mcp_grpo.cli import main
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.tools import Catalog, Tool, catalog_differences


OTHER_SERVER = {"command": sys.executable, "args": [str(Path(__file__).parents[1] / "servers" / "sums.py")]}


def test_desk_prints_the_servers_as_a_file_that_can_be_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["desk", "--world", "3"]) == 0
    assert json.loads(capsys.readouterr().out) == desk_servers(seed=3)


def test_desk_takes_live_sources(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["desk", "--finance", "fmp", "--slack", "live"]) == 0
    servers = json.loads(capsys.readouterr().out)["mcpServers"]
    assert servers["finance"]["args"][-2:] == ["--backend", "fmp"]
    assert servers["slack"]["args"][-2:] == ["--backend", "live"]
    assert servers["search"]["args"][-2:] == ["--seed", "0"]


def test_sources_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'python'.*'finance', 'search' and 'slack'"):
        desk_servers(backends={"python": "live"})


@pytest.mark.full
def test_tasks_are_built_checked_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numbers = ["--train", "14", "--validation", "0", "--test", "17"]
    assert main(["tasks", "build", str(tmp_path), *numbers, "--check"]) == 0
    built = capsys.readouterr().out
    assert [line.split()[1::2] for line in built.splitlines() if "ranking" in line] == [["ranking", "0", "1"]]
    assert "14 of 14 solutions" in built
    assert "17 of 17 solutions" in built
    assert not (tmp_path / "validation.jsonl").exists()
    assert main(["tasks", "show", str(tmp_path / "test.jsonl"), "--number", "17"]) == 0
    shown = capsys.readouterr().out
    assert "17 tasks; by difficulty" in shown
    assert "Order these companies" in shown


@pytest.mark.full
def test_a_broken_solution_is_reported_and_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "build", str(tmp_path), "--train", "2", "--validation", "0", "--test", "0"]) == 0
    path = tmp_path / "train.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["solution"]["final"] = "Answer: 17"
    path.write_text("\n".join(map(json.dumps, rows)))
    capsys.readouterr()
    assert main(["tasks", "check", str(path)]) == 1
    said = capsys.readouterr().out
    assert rows[0]["task_id"] in said
    assert "1 of 2 solutions" in said


def test_a_file_of_one_s_own_becomes_tasks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output = tmp_path / "mine.json", tmp_path / "tasks" / "mine.jsonl"
    path.write_text(json.dumps([{"question": "How many?", "ground_truth": 3, "level": "easy"}]))
    assert main(["tasks", "import", str(path), str(output)]) == 0
    assert "question" in capsys.readouterr().out
    assert main(["tasks", "check", str(output)]) == 0
    assert "No task has a `solution`" in capsys.readouterr().out


def test_what_cannot_be_read_is_one_sentence_and_not_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tasks", "check", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err.replace("\n", "")


def test_what_looks_like_markup_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a[" / "b].jsonl"
    path.parent.mkdir()
    row = {"task_id": "[/a]", "prompt": "Mark it with :eyes: and [bold]x[/bold].", "answer": 3, "[/weird]": 1}
    path.write_text(json.dumps(row))
    assert main(["tasks", "show", str(path)]) == 0
    said = capsys.readouterr().out
    assert "[/a] (" in said
    assert row["prompt"] in said
    assert main(["tasks", "import", str(path), str(tmp_path / "out.jsonl")]) == 0
    assert "[/weird]" in capsys.readouterr().out
    assert main(["tasks", "check", str(tmp_path / "c[" / "d].jsonl")]) == 1
    assert "c[/d].jsonl" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["tasks", "build", str(tmp_path / "file" / "folder"), "--train", "1"]) == 1
    assert capsys.readouterr().err.startswith("error: ")


class TestCompare:
    @pytest.mark.full
    def test_other_servers_are_compared_with_the_desk_s(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = tmp_path / "servers.json"
        servers = desk_servers()["mcpServers"]
        path.write_text(json.dumps({"mcpServers": {"finance": OTHER_SERVER}}))
        assert main(["desk", "--compare", str(path)]) == 0
        said = capsys.readouterr().out
        assert "`getQuote` of server 'finance' is missing." in said
        assert "tavily" not in said
        # Under another name, beside one that the desk does not have: only what it takes the place of is compared.
        path.write_text(json.dumps({"mcpServers": {"fmp": servers["finance"], "mine": OTHER_SERVER}}))
        assert main(["desk", "--compare", str(path)]) == 0
        said = capsys.readouterr().out
        assert "missing" not in said
        assert "tools more" in said
        path.write_text(json.dumps({"mcpServers": {"fmp": servers["finance"]}}))
        assert main(["desk", "--compare", str(path)]) == 0
        assert "same arguments" in capsys.readouterr().out

    def test_arguments_count_by_name_type_and_need(self) -> None:
        def catalog(**schema: object) -> Catalog:
            tool = Tool(
                name="quote", server="s", tool="quote", description="", input_schema={"type": "object", **schema}
            )
            return Catalog(servers=("s",), tools=(tool,))

        text, number = {"type": "string"}, {"type": "number"}
        ours = catalog(properties={"symbol": text, "limit": number}, required=["symbol"])
        theirs = catalog(
            properties={"symbol": number, "day": text, "full": {"type": "boolean"}}, required=["symbol", "day"]
        )
        assert catalog_differences(ours, ours) == []
        assert catalog_differences(ours, theirs) == [
            "`quote` of server 's' does not take `limit`.",
            "`quote` of server 's' requires `day`.",
            "`quote` of server 's' takes `symbol` as number, not as string.",
            "`quote` of server 's' also takes `full`.",
        ]
        nullable = catalog(
            properties={"symbol": {"anyOf": [text, {"type": "null"}]}, "limit": number}, required=["symbol"]
        )
        assert catalog_differences(ours, nullable) == []
