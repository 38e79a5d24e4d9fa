"""The command `mcp-grpo train`, on the quickstart's servers and model."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.policies import save_tiny_model
from helpers.sums import ROWS
from helpers.sums import SERVERS as SUMS

from mcp_grpo.cli import main
from mcp_grpo.environments import Environment, function_server
from mcp_grpo.quickstart.files import write_world
from mcp_grpo.quickstart.servers import SERVERS
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.quickstart.warm_start import WARM_START
from mcp_grpo.train import stages
from mcp_grpo.train.arguments import TrainArguments
from mcp_grpo.train.ledger import LEDGER_FILE, Ledger
from mcp_grpo.train.plan import STAGES
from mcp_grpo.train.settings import warm_up_settings
from mcp_grpo.types import Trajectory


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with servers and tasks."""
    place = tmp_path_factory.mktemp("train")
    train, held_out = build_tasks(num_train=60, num_held_out=6)
    write(place / "tasks.jsonl", with_solutions(train))
    write(place / "held_out.jsonl", with_solutions(held_out))
    (place / "mcp.json").write_text(json.dumps(SERVERS))
    return place


def command(place: Path, out: str, *more: str) -> list[str]:
    files = ["--servers", str(place / "mcp.json"), "--tasks", str(place / "tasks.jsonl")]
    files += ["--eval-tasks", str(place / "held_out.jsonl"), "--model", str(WARM_START), "--out", str(place / out)]
    return ["train", *files, "--steps", "2", *more]


def forget(folder: Path, *stages: str) -> None:
    """Let stages be taken again, as if the command had been killed before them."""
    content = json.loads((folder / LEDGER_FILE).read_text())
    for name in stages:
        del content["stages"][name]
    (folder / LEDGER_FILE).write_text(json.dumps(content))


@pytest.mark.full
def test_one_command_trains_and_shows_what_was_learnt(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "whole"
    assert main(command(place, "whole")) == 0
    said = capsys.readouterr().out
    assert [name for name in STAGES if re.search(rf"^\[\d/7\] {name}$", said, re.MULTILINE)] == list(STAGES)
    assert "Success before training" in said
    assert re.search(
        r"^2 steps; the policy of step \d, .*, is kept\. .*from before training to step \d, the reward",
        said,
        re.MULTILINE,
    )
    assert "doing nothing 0.0%, scripted solutions 100.0%" in said
    assert f"--lora-modules whole={out}" in said
    assert f"mcp-grpo chat --adapter {out}" in said
    for name in ("adapter_model.safetensors", "README.md", "report.html", "results.json", "doctor.json", "train.json"):
        assert (out / name).stat().st_size > 0
    card = (out / "README.md").read_text()
    assert "| success, with 95 % interval | " in card
    assert "6 tasks, 12 attempts before and 12 after." in card

    # Done is done, and other arguments are another run.
    assert main(command(place, "whole")) == 0
    assert capsys.readouterr().out.count("done earlier") == len(STAGES)
    assert main(command(place, "whole", "--seed", "5")) == 1
    assert "`--seed` was 0 and is 5 now" in capsys.readouterr().err

    # A run that was killed after training goes on with the adapter that was kept.
    attempts = (out / "after" / "attempts.jsonl").read_text().splitlines()
    (out / "after" / "attempts.jsonl").write_text(f"{attempts[0]}\n")
    before = json.loads((out / "results.json").read_text())
    forget(out, "after", "report")
    assert main(command(place, "whole")) == 0
    assert capsys.readouterr().out.count("done earlier") == len(STAGES) - 2
    again = json.loads((out / "results.json").read_text())
    assert (again["kept_step"], again["num_steps"]) == (before["kept_step"], before["num_steps"])
    assert again["before"] == before["before"]
    assert (out / "README.md").read_text().count("curves.png") == card.count("curves.png")


def make_world(number: str) -> Environment:
    train, held_out = build_tasks(num_train=int(number), num_held_out=4)
    splits = {"train": with_solutions(train), "test": with_solutions(held_out)}
    return Environment(name="Quickstart", servers=SERVERS, splits=splits, max_turns=5)


@pytest.mark.full
def test_one_command_trains_in_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--environment", f"{__name__}:make_world", "--option", "number", "60"]
    out = tmp_path / "out"
    more = ["--eval-temperature", "0", "--minutes", "0.01"]  # one step is taken all the same
    assert main(["train", *where, *more, "--model", str(WARM_START), "--steps", "2", "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "on Quickstart, in " in said
    assert "which is more than 0.01 minutes: there will be one step of training. Raise `--minutes`" in said
    assert re.search(
        r"^1 of 2 steps, as the 0.01 minutes are nearly over; the policy of step 1, .*, is kept.", said, re.MULTILINE
    )
    assert "doing nothing 0.0%, scripted solutions 100.0%" in said
    assert f"mcp-grpo bench {__name__}:make_world --option number 60 --split test --policy {out}" in said
    assert "4 tasks, 4 attempts before and 4 after." in (out / "README.md").read_text()


def make_questions() -> Environment:
    rows = [{"task_id": str(number), "prompt": f"{number}?", "answer": str(number)} for number in range(24)]
    return Environment(
        name="Questions",
        servers={"none": lambda task: function_server("none", [], lambda *_: "")},
        splits={"all": rows},
    )


@pytest.mark.full
def test_one_command_trains_where_there_are_no_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--environment", f"{__name__}:make_questions", "--model", str(WARM_START)]
    # Nothing may be learnt, and it says so; but not for want of calls, which would end it after ten batches.
    main(["train", *where, "--steps", "12", "--out", str(tmp_path / "out")])
    said = capsys.readouterr()
    assert "There are no tools to call." in said.out
    assert "called no tool" not in said.out + said.err
    assert "No tool was called" not in said.out + said.err
    assert re.search(r"^12 steps; the policy of step \d+", said.out, re.MULTILINE), said.out
    assert "Success after training" in said.out, said.err


@pytest.mark.full
def test_a_run_that_was_killed_in_training_goes_on(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = place / "killed"
    arguments = command(place, "killed")
    arguments[arguments.index("--steps") + 1] = "4"
    code = "import sys; from mcp_grpo.cli import main; sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen([sys.executable, "-c", code, *arguments], start_new_session=True) as process:
        deadline = time.monotonic() + 200
        while not (out / "checkpoint-2").exists():
            assert process.poll() is None, "it ended by itself"
            assert time.monotonic() < deadline
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.count("done earlier") == 4
    assert re.search(r"The run goes on from .*checkpoint-[23]", said.err)
    assert "4 steps; the policy of step" in said.out
    assert (out / "adapter_model.safetensors").exists()


def test_without_servers_it_is_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    world = write_world(tmp_path / "world")
    few = write(
        tmp_path / "few.jsonl", [json.loads(line) for line in Path(world.eval_tasks).read_text().splitlines()[:6]]
    )
    assert main(["tasks", "check", few, "--servers", world.servers]) == 0
    assert "6 of 6 solutions solve their tasks" in capsys.readouterr().out
    assert main(["train", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "240 attempts at 120 tasks to judge by" in said
    assert "30 steps of 64 attempts each" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_quickstart_learns_by_one_command(tmp_path: Path) -> None:
    assert main(["train", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["before"]["success"] <= 0.6
    assert results["after"]["success"] >= 0.9


def test_what_is_interrupted_says_how_to_go_on(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: stages.Stages) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages.Stages, "doctor", interrupt)
    assert main(command(place, "interrupted")) == 130
    assert "Stopped. The same command goes on from here." in capsys.readouterr().out


def started(tmp_path: Path, rows: list[dict[str, Any]], model: str) -> list[str]:
    """Return a command whose first two stages are done."""
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": SUMS}))
    files = {"servers": str(tmp_path / "mcp.json"), "tasks": write(tmp_path / "tasks.jsonl", rows), "model": model}
    ledger = Ledger(tmp_path / "out", TrainArguments(**files, steps=1).told())
    for stage in STAGES[:2]:
        ledger.finish(stage, "Fine.", 1.0)
    flags = [each for name, value in files.items() for each in (f"--{name}", value)]
    return ["train", *flags, "--steps", "1", "--out", str(tmp_path / "out")]


@pytest.mark.full
def test_a_policy_that_cannot_call_without_solutions_to_imitate_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_model(tmp_path / "model", max_position_embeddings=1024)
    assert main(started(tmp_path, ROWS, model)) == 1
    said = capsys.readouterr()
    assert "0% of the calls could be made" in said.out
    assert "cannot call tools, and there are no solutions to imitate" in said.err


@pytest.mark.full
def test_a_policy_that_cannot_call_is_warmed_up_and_refused_if_that_is_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = {"calls": [{"name": "add", "arguments": {"a": 2, "b": 3}}]}
    rows = [{**row, "solution": {"steps": [step], "final": "5"}} for row in ROWS]
    rows += [{**row, "task_id": f"more-{index}"} for index, row in enumerate(rows * 3)]
    model = save_tiny_model(tmp_path / "model", hidden_size=64, intermediate_size=128, max_position_embeddings=1024)
    arguments = started(tmp_path, rows, model)
    chosen = {"max_steps": 1, "learning_rate": 5e-3, "lr_scheduler_type": "linear"}
    monkeypatch.setattr(stages, "warm_up_settings", lambda *args, **how: warm_up_settings(*args, **how) | chosen)
    assert main(arguments) == 1
    assert "has not taught the policy to call tools" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / LEDGER_FILE).read_text())
    content["facts"] = {}  # another folder would begin anew likewise
    (tmp_path / "out" / LEDGER_FILE).write_text(json.dumps(content))
    chosen["max_steps"] = 150
    assert main([*arguments, "--minutes", "0.01"]) == 1
    said = capsys.readouterr()
    assert "There was time for 1 of 150 steps of the warm start" in said.out
    assert "There was time for 1 of 150 steps" in said.err
    assert "Give the same command with more minutes" in said.err
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "After a warm start: Of" in said
    assert "the model before its warm start 0.0%" in said


@pytest.mark.full
def test_a_policy_that_calls_and_never_succeeds_is_warmed_up(
    place: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at, look = list[int](), stages.Stages._look

    def fails_at_first(self: stages.Stages) -> list[Trajectory]:
        attempts = look(self)
        looked_at.append(len(attempts))
        return (
            [replace(each, task=replace(each.task, answer="never")) for each in attempts]
            if len(looked_at) == 1
            else attempts
        )

    monkeypatch.setattr(stages.Stages, "_look", fails_at_first)
    chosen = {"max_steps": 1, "learning_rate": 1e-6}
    monkeypatch.setattr(stages, "warm_up_settings", lambda *args, **how: warm_up_settings(*args, **how) | chosen)
    assert main(command(place, "unlucky")) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "The policy succeeded in none of these attempts." in said
    assert "Warming up on the solutions of 54 tasks, 1 steps." in said
    assert "After a warm start: Of" in said
