"""The notebooks run: the first as it is, the second as far as that can be said without a GPU."""

import ast
import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest


NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


def code(name: str) -> list[str]:
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def ours(name: str) -> dict[str, Any]:
    """What a notebook imports from the library and from the recipes, by the name it has there."""
    found: dict[str, Any] = {}
    for cell in code(name):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(("mcp_grpo", "quickstart")):
                module = import_module(node.module)
                found |= {alias.asname or alias.name: getattr(module, alias.name) for alias in node.names}
    return found


def test_there_are_two_notebooks() -> None:
    assert NAMES == ["01_quickstart.ipynb", "02_qwen3_on_gpu.ipynb"]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_compiles_and_every_name_that_is_used_was_made_before(name: str) -> None:
    known = {*dir(__builtins__), *dir(__import__("builtins")), "display"}
    for cell in code(name):
        compile(cell, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        nodes = list(ast.walk(ast.parse(cell)))
        known |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        known |= {
            a.asname or a.name.split(".")[0]
            for n in nodes
            if isinstance(n, (ast.Import, ast.ImportFrom))
            for a in n.names
        }
        used = {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        assert used <= known, f"{name} uses {used - known}"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_imported_exists_and_takes_the_arguments_it_is_given(name: str) -> None:
    imported = ours(name)
    assert imported
    num_checked = 0
    for cell in code(name):
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
                named = {keyword.arg: None for keyword in node.keywords if keyword.arg}
                inspect.signature(imported[node.func.id]).bind_partial(*node.args, **named)
                num_checked += 1
    assert num_checked > 5


@pytest.mark.parametrize("name", NAMES)
def test_the_trainer_has_the_methods_that_are_called_on_it(name: str) -> None:
    trainer = ours(name)["MCPGRPOTrainer"]
    called = {
        node.func.attr
        for cell in code(name)
        for node in ast.walk(ast.parse(cell))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "trainer"
    }
    assert {"train", "roll_out", "add_results", "save_model"} <= called
    assert all(hasattr(trainer, method) for method in called)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_small(name: str) -> None:
    assert (NOTEBOOKS / name).stat().st_size < 400_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    copy = tmp_path / "notebooks" / "01_quickstart.ipynb"
    copy.parent.mkdir()
    copy.write_text((NOTEBOOKS / copy.name).read_text())
    (tmp_path / "recipes").symlink_to(NOTEBOOKS.parent / "recipes")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--nbmake",
        "--nbmake-timeout=800",
        "--overwrite",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", os.devnull, str(copy)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(NOTEBOOKS.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outputs = [output for cell in json.loads(copy.read_text())["cells"] for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    text = json.dumps(outputs)
    assert "--tool-call-parser hermes" in text
    assert (tmp_path / "outputs" / "notebook" / "adapter_model.safetensors").exists()
