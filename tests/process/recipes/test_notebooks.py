"""The notebooks run: the first as it is, the second as far as that goes without a GPU."""

import ast
import asyncio
import inspect
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.pyplot
import pytest


pytestmark = pytest.mark.full

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
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


def num_cells_without_gpu(cells: list[dict[str, Any]]) -> int:
    """How many cells come before the heading of training."""
    return next(index for index, cell in enumerate(cells) if "".join(cell["source"]).startswith("## Training"))


def test_there_are_two_notebooks() -> None:
    assert NAMES == ["01_quickstart.ipynb", "02_qwen3_on_gpu.ipynb"]


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_compiles_and_every_name_that_is_used_was_made_before(name: str) -> None:
    known = {*dir(__builtins__), *dir(__import__("builtins")), "display"}
    for cell in code(name):
        compile(cell, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        nodes = list(ast.walk(ast.parse(cell)))
        known |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        known |= {n.name for n in nodes if isinstance(n, ast.FunctionDef)}
        known |= {n.arg for n in nodes if isinstance(n, ast.arg)}
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


@pytest.mark.parametrize("name", NAMES)
def test_what_is_shipped_has_pictures_and_no_trace_of_where_it_was_made(name: str) -> None:
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    text = json.dumps(
        [{**output, "data": {**output.get("data", {}), "image/png": ""}} for output in outputs], ensure_ascii=False
    )
    assert not re.search(r"(?<![\w<.])/(home|root|tmp|Users|work|usr|opt)/|Warning", text)


def test_the_first_notebook_s_text_is_true_of_the_outputs_it_ships_with() -> None:
    cells = json.loads((NOTEBOOKS / "01_quickstart.ipynb").read_text())["cells"]
    tables = ["".join(o["data"]["text/plain"]) for c in cells for o in c.get("outputs", []) if "data" in o]
    (before, after) = next(
        re.search(r"success +([\d.]+) +([\d.]+)", one) for one in tables if "success" in one
    ).groups()
    assert float(after) > float(before) + 0.2
    assert any(f"before training: {float(before):.0%}" in one for one in tables)


def test_the_second_notebook_ships_no_outputs_of_cells_that_need_a_gpu() -> None:
    cells = json.loads((NOTEBOOKS / "02_qwen3_on_gpu.ipynb").read_text())["cells"]
    start = num_cells_without_gpu(cells)
    assert all(cell["outputs"] for cell in cells[:start] if cell["cell_type"] == "code")
    assert not any(cell["outputs"] or cell["execution_count"] for cell in cells[start:] if cell["cell_type"] == "code")


def test_the_second_notebook_s_cells_that_need_no_gpu_run_in_a_loop_that_is_running(monkeypatch) -> None:
    matplotlib.use("Agg")
    num_shown = []
    monkeypatch.setattr(matplotlib.pyplot, "show", lambda: num_shown.append(1))
    cells = json.loads((NOTEBOOKS / "02_qwen3_on_gpu.ipynb").read_text())["cells"]
    names: dict[str, Any] = {}

    async def run() -> None:
        for cell in cells[: num_cells_without_gpu(cells)]:
            if cell["cell_type"] == "code":
                source = "".join(cell["source"])
                made = eval(compile(source, "cell", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
                if inspect.iscoroutine(made):
                    await made

    asyncio.run(run())
    matplotlib.pyplot.close("all")
    assert len(num_shown) == 2
    assert [solution.problems for solution in names["solutions"]] == [(), (), ()]


@pytest.mark.timeout(600)
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
        "--nbmake-timeout=550",
        "--overwrite",
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-c", os.devnull, str(copy)],
        cwd=tmp_path,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(NOTEBOOKS.parent)},
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
