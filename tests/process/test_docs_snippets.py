"""What the documentation shows runs as it is written; only the model is replaced by one that needs no download."""

import ast
import builtins
import json
import os
import re
import runpy
import sys
import tomllib
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import fields
from fnmatch import fnmatch
from importlib import import_module
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import Any

import grpo_qwen3
import pytest
import quickstart
import sft_warmup
import yaml
from datasets import load_dataset
from helpers.policies import save_tiny_model
from helpers.runs import make_trainer
from helpers.snippets import FILES, ROOT, Snippet, snippets
from helpers.workbench import write_workbench
from recipe_parts.command_line import StrictParser

import mcp_grpo
from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, cli, exact_answer
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.tools import load_servers


SMALL = ', use_cpu=True, report_to="none", max_completion_length=16, '  # five hundred random tokens would take minutes
GIVEN = {"trainer", "tasks", "trajectories", "before", "after"}
"""Names that a snippet may use without having made them."""
PYTHON = snippets("python")
SHELL = snippets("bash")


def by_page(found: list[Snippet], slow: tuple[str, ...] = ()) -> list[Any]:
    """Return the snippets of each page as one case; those of slow pages are only for `make test-all`."""
    return [
        pytest.param(list(group), id=(name := str(page.relative_to(ROOT))), marks=[pytest.mark.full] * (name in slow))
        for page, group in groupby(found, key=lambda snippet: snippet.page)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of the documentation, and a model to train."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "recipes").symlink_to(ROOT / "recipes")
    write_workbench(folder / "WorkBench")
    model = save_tiny_model(folder / "model")
    for name, text in FILES.items():
        text = text.replace("Qwen/Qwen3-0.6B", model).replace("max_steps=100", "max_steps=1")
        text = re.sub(r"\s*max_completion_length=\d+,", "", text)
        (folder / name).write_text(re.sub(r'(output_dir="outputs/\w+"),?\s*', rf"\1{SMALL}", text))
    return folder


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[Path]:
    """The same, as the working directory, with `python` the one of the environment that is active."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
        patch.setenv("SHOP_KEY", "key")
        patch.setenv("WEB_TOKEN", "token")
        yield folder


def test_a_file_that_is_shown_on_several_pages_is_the_same_there() -> None:
    for snippet in snippets("python", "json", "yaml"):
        assert snippet.title is None or FILES[snippet.title] == snippet.text, snippet


def test_what_is_not_run_has_one_of_few_reasons() -> None:
    reasons = ("needs a GPU", "needs the Hub", "needs vLLM", "needs a key", "needs a checkpoint", "needs a recording")
    reasons += ("needs a server from the network", "opens a browser", "it takes minutes; a test of its own runs")
    assert not [str(s) for s in PYTHON + SHELL if s.reason is not None and not s.reason.startswith(reasons)]


@pytest.mark.parametrize("snippet", snippets("json"), ids=str)
def test_json_is_read(snippet: Snippet, place: Path) -> None:
    if (snippet.title or "").endswith(".jsonl"):
        assert tasks_from_rows([json.loads(line) for line in snippet.text.splitlines()])
    elif "mcpServers" in (content := json.loads(snippet.text)):
        assert load_servers(content)


@pytest.mark.parametrize("snippet", snippets("yaml"), ids=str)
def test_yaml_is_read(snippet: Snippet) -> None:
    assert yaml.safe_load(snippet.text)


def test_the_training_script_trains_and_saves(place: Path) -> None:
    runpy.run_path(str(place / "train.py"), run_name="__main__")
    assert (place / "outputs" / "shop" / "adapter_model.safetensors").exists()


@pytest.mark.full
def test_the_environment_trains_and_its_state_earns_the_reward(place: Path) -> None:
    names = runpy.run_path(str(place / "drawer.py"), run_name="__main__")
    assert list((place / "outputs" / "drawer" / "trajectories").iterdir())
    row = names["make_row"](3)
    calls = [{"name": "rename", "arguments": {"old": "draft3.txt", "new": "final.txt"}}]
    row["solution"] = {"steps": [{"calls": calls}], "final": "Done."}
    servers = {"drawer": {"server": names["make_drawer"], "x-mcp-grpo": {"state_tool": "content"}}}
    (solution,) = run_solutions(tasks_from_rows([row]), servers)
    assert not solution.problems
    assert len(next(s.text for s in PYTHON if s.title == "drawer.py").splitlines()) < 60


@pytest.mark.full
def test_a_benchmark_is_trained_on(place: Path) -> None:
    runpy.run_path(str(place / "office.py"), run_name="__main__")
    assert list((place / "outputs" / "workbench" / "trajectories").iterdir())


@pytest.mark.full
def test_looking_at_trajectories_shows_them(place: Path) -> None:
    with redirect_stdout(StringIO()) as output:
        runpy.run_path(str(place / "look.py"), run_name="__main__")
    assert "num_trajectories=12" in output.getvalue()


@pytest.mark.full
def test_python_runs_page_by_page(place: Path) -> None:
    tasks = load_dataset("json", data_files="tasks.jsonl", split="train")
    settings = MCPGRPOConfig("given", use_cpu=True, report_to="none", max_completion_length=16)
    # One trainer for all: what guides take for granted.
    with MCPGRPOTrainer(str(place / "model"), exact_answer, settings, tasks, servers="mcp.json") as trainer:
        trajectories = trainer.roll_out(tasks, num_generations=2)
        given = {"trainer": trainer, "tasks": tasks, "trajectories": trajectories, "MCPGRPOConfig": MCPGRPOConfig}
        run = [snippet for snippet in PYTHON if snippet.reason is None and snippet.title is None]
        needing = {snippet.page for snippet in run if "trainer." in snippet.text}
        run.sort(key=lambda snippet: snippet.page not in needing)  # settings that are made later reset the accelerator
        for _, page in groupby(run, key=lambda snippet: snippet.page):
            names = dict(given)
            for snippet in page:
                exec(compile(snippet.text, str(snippet), "exec"), names)


@pytest.mark.parametrize("snippet", [s for s in PYTHON if s.reason is not None], ids=str)
def test_python_that_is_not_run_names_what_there_is(snippet: Snippet) -> None:
    tree = compile(snippet.text, str(snippet), "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    known = GIVEN | set(dir(builtins)) | {"MCPGRPOConfig"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert all(hasattr(import_module(str(node.module)), alias.name) for alias in node.names)
            known |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    assert not {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)} - known
    settings = {field.name for field in fields(MCPGRPOConfig)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "MCPGRPOConfig":
            assert not {keyword.arg for keyword in node.keywords} - settings
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "trainer":
            assert hasattr(MCPGRPOTrainer, node.attr)


def test_the_reward_functions_of_the_guide_reward() -> None:
    names: dict[str, Any] = {}
    for snippet in PYTHON:
        if snippet.page.name == "rewards.md" and snippet.text.startswith("def "):
            exec(snippet.text, names)

    class Attempt:
        class task:
            answer = "5"

        class fault:
            turn = 1

            class result:
                class kind:
                    is_policy_fault = True

        answer, exchanges, num_turns, states = "5", (fault, fault), 2, {"notes": ["one"]}

    assert names["fewer_calls"]([Attempt]) == [pytest.approx(0.96)]
    assert names["faults"]([Attempt]) == [[0, -0.1]]
    assert names["has_note"]([Attempt]) == [1.0]


@pytest.mark.parametrize("page", by_page(SHELL, slow=("docs/guides/making-tasks.md",)))
def test_commands_are_understood_and_those_of_the_library_run(page: list[Snippet], place: Path) -> None:
    for snippet in page:
        for words in snippet.commands():
            check_command(words, snippet)


def check_command(words: list[str], snippet: Snippet) -> None:
    """Run a command of the library; of another, check that it means something here."""
    program, *rest = words
    if program == "mcp-grpo":
        argv, target = (rest[: rest.index(">")], rest[-1]) if ">" in rest else (rest, None)
        if snippet.reason is not None:
            cli._parser().parse_args(argv)
            return
        with redirect_stdout(StringIO()) as output:
            assert cli.main(argv) == 0, words
        if target:
            Path(target).write_text(output.getvalue())
    elif program in ("accelerate", "sbatch", "python"):
        check_script(rest)
    elif program == "make":
        assert re.search(rf"^{rest[-1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        assert rest[0] == "install"
        assert set(re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", rest[-1])))) <= extras.keys(), words
    else:
        assert snippet.reason is not None or program in ("export", "source"), f"{snippet}: {words}"


def check_script(words: list[str]) -> None:
    """Check that a script exists, and that it takes its flags."""
    parsers = {
        "grpo_qwen3.py": grpo_qwen3.parse,
        "train.sbatch": grpo_qwen3.parse,
        "sft_warmup.py": sft_warmup.parse,
        "quickstart.py": lambda flags: StrictParser([quickstart.Arguments], "").parse(flags),
    }
    place = next(i for i, word in enumerate(words) if word.endswith((".py", ".sbatch")))
    script = words[place]
    if script in FILES:
        assert not words[place + 1 :]
        return
    assert (ROOT / script).exists()
    parsers[Path(script).name](words[place + 1 :])


@pytest.mark.full
def test_every_metric_that_a_run_logs_is_described(tmp_path: Path, adding_model: str) -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    described = reference["described_metrics"]()
    trainer = make_trainer(
        tmp_path,
        adding_model,
        beta=0.05,
        ref_sync="ema",
        ref_sync_steps=1,
        schema_mask="syntax",
        advantage_mode="hybrid",
        bootstrap_steps=5,
        dynamic_sampling=1,
    )
    with trainer:
        trainer.measure_phases()
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(1)))
    logged = {name.removeprefix("eval_") for entry in trainer.state.log_history for name in entry} - {"step"}
    assert len(logged) > 80
    assert not {name for name in logged if not any(fnmatch(name, each) for each in described)}


def test_the_reference_has_everything() -> None:
    reference = runpy.run_path(str(ROOT / "docs" / "reference.py"))
    pages = reference["pages"]()
    assert all(f"`{field.name}`{{ #{field.name} }}" in pages["settings"] for field in reference["own_settings"]())
    assert all(f"### `{name}`" in pages["python"] for name in mcp_grpo.__all__)
    assert all(f"`{name}`{{ #{name} }}" in pages["servers"] for name in ("isolation", "call_timeout", "state_tool"))
    assert all(f"`mcp-grpo {name}`" in pages["command-line"] for name in ("desk", "tasks build", "tasks check"))
    assert not [
        line for page in pages.values() for line in page.splitlines() if line.startswith("|") and line.endswith("|  |")
    ]
