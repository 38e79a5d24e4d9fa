"""The package as a whole: what it exports, what it imports, and what it leans on in TRL."""

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import mcp_grpo
from mcp_grpo.errors import MCPGRPOError


def test_public_names_are_sorted_and_exist() -> None:
    assert mcp_grpo.__all__ == sorted(mcp_grpo.__all__)
    assert all(hasattr(mcp_grpo, name) for name in mcp_grpo.__all__)


def test_public_names_are_those_that_type_checkers_see() -> None:
    imports = ast.parse(inspect.getsource(mcp_grpo)).body[3]
    assert isinstance(imports, ast.If)
    seen = {
        alias.name: node.module.removeprefix("mcp_grpo.")
        for node in imports.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert seen == mcp_grpo._HOMES
    assert sorted(seen) == mcp_grpo.__all__
    assert set(mcp_grpo.__all__) <= set(dir(mcp_grpo))
    assert not hasattr(mcp_grpo, "MCPGRPOTrainer2")


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, mcp_grpo; sys.exit(str({'torch', 'transformers', 'trl'} & sys.modules.keys() or ''))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_the_desk_s_world_needs_nothing_but_the_standard_library() -> None:
    script = "import sys, mcp_grpo.desk.world.corpus; print(sorted({'mcp', 'pydantic', 'torch', 'anyio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_things_are_documented() -> None:
    assert [name for name in mcp_grpo.__all__ if not inspect.getdoc(getattr(mcp_grpo, name))] == []


@pytest.mark.full
def test_importing_the_trainer_does_not_import_what_it_can_do_without() -> None:
    # TRL imports vLLM where it is installed, and vLLM what it needs itself.
    code = (
        "import sys, trl.trainer.grpo_trainer; before = set(sys.modules); import mcp_grpo.trainer; "
        "sys.exit(str({'vllm', 'llguidance', 'deepspeed', 'wandb'} & (sys.modules.keys() - before) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


@pytest.mark.full
def test_the_package_works_without_the_desk(tmp_path: Path) -> None:
    package = Path(mcp_grpo.__file__).parent
    shutil.copytree(package, tmp_path / "mcp_grpo", ignore=shutil.ignore_patterns("desk", "__pycache__"))
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(json.dumps({"task_id": "a", "prompt": "How much?", "answer": 3, "tools": ["add"]}))
    code = (
        "import mcp_grpo, mcp_grpo.trainer; from mcp_grpo.cli import main; "
        f"assert mcp_grpo.__file__.startswith({str(tmp_path)!r}); assert main(['tasks', 'show', {str(tasks)!r}]) == 0; "
        f"assert main(['tasks', 'check', {str(tasks)!r}]) == 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "1 tasks; by difficulty" in done.stdout
    assert "with `--servers`" in done.stderr


def test_every_error_is_also_the_builtin_it_replaces() -> None:
    for error in (one for one in MCPGRPOError.__subclasses__() if one.__module__ == "mcp_grpo.errors"):
        assert len(error.__bases__) == 2
        assert issubclass(error.__bases__[1], (ValueError, RuntimeError, ConnectionError))
