"""The quickstart as a newcomer runs it, on a machine that has other work to do."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.shell import Said, Shell


BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # ends with whoever started it
# As the Makefile does.
LAUNCH = [
    "accelerate",
    "launch",
    "--cpu",
    "--num_processes",
    "1",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Two processes that keep two cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(2)]
    yield
    for process in processes:
        process.kill()
        process.wait()


OPTIONS = ("--max_steps", "2", "--num_held_out", "6", "--output_dir", "out")


def check_words(said: Said) -> None:
    moments = (
        "Loading torch, transformers and TRL",
        "Starting two MCP servers: people and office.",
        "Loading the warm start",
        "Attempting 6 held-out tasks twice each, before training.",
        "Solved before training:",
        "Training for 2 steps",
        "Attempting the held-out tasks again.",
        "Solved after training:",
        "Held-out tasks, before and after GRPO",
        'load_adapter("out")',
    )
    places = [said.out.find(moment) for moment in moments]
    assert -1 not in places, said.terminal
    assert places == sorted(places)
    for noise in ("Loading weights", "Writing model shards", "Learning to copy", "Warning"):
        assert noise not in said.terminal
    assert said.status == 1  # two steps are too few
    assert "The policy did not learn" in said.terminal


@pytest.mark.full
def test_the_quickstart_says_what_it_does_and_leaves_an_adapter(shell: Shell) -> None:
    check_words(shell.run_forked("recipes/quickstart.py", *OPTIONS))
    as_said = 'from mcp_grpo import load_adapter; model, tokenizer = load_adapter("out"); print(type(model).__name__)'
    assert "PeftModel" in shell.run_forked("-c", as_said).out


@pytest.mark.full
@pytest.mark.usefixtures("busy_machine")
@pytest.mark.timeout(960)
def test_the_quickstart_computes_on_one_thread_that_waits_asleep(shell: Shell) -> None:
    # OpenMP says how its threads wait as it is loaded.
    said = shell.run(*LAUNCH, "recipes/quickstart.py", *OPTIONS, timeout=900, OMP_DISPLAY_ENV="VERBOSE")
    summary = json.loads((shell.folder / "out" / "summary.json").read_text())
    assert summary["threads"] == 1  # although `accelerate launch --cpu` asks for as many as there are cores
    if sys.platform == "linux":
        assert "GOMP_SPINCOUNT = '0'" in said.terminal
    check_words(said)


def test_installation_uses_uv_where_it_is_there(shell: Shell, tmp_path: Path) -> None:
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "uv").write_text("#!/bin/sh\n")
    (bin_ / "uv").chmod(0o755)
    with_it = f"{bin_}:{os.environ['PATH']}"
    without = ":".join(part for part in os.environ["PATH"].split(":") if not (Path(part) / "uv").exists())
    for path, is_used in ((with_it, True), (without, False)):
        said = shell.run("make", "--dry-run", "test", "VENV=elsewhere", "PYTHON=python3", PATH=path)
        assert said.status == 0, said.terminal
        assert ("uv pip install" in said.out) == is_used
        assert ("elsewhere/bin/python -m pip install" in said.out) == (not is_used)
        assert said.out.count("--constraint constraints.txt --editable") == 1
