"""What is used of TRL and Transformers without their promise to keep it. The list is that of `mcp_grpo/trl_compat.py`."""

import ast
import inspect
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer
from transformers import trainer as transformers_trainer

import mcp_grpo
from mcp_grpo import MCPGRPOTrainer, trl_compat
from mcp_grpo.trl_compat import ATTRIBUTES, NUM_UPLOADS, OVERRIDES, SOURCES, GRPOTrainer


PACKAGE = Path(mcp_grpo.__file__).parent


@cache
def names_of_both() -> set[str]:
    """Attributes that TRL's trainer and that of Transformers use of themselves."""
    return set(re.findall(r"self\.(\w+)", inspect.getsource(GRPOTrainer) + inspect.getsource(Trainer)))


@pytest.mark.parametrize("name", OVERRIDES)
def test_a_method_that_is_overridden_is_still_there_with_the_same_parameters(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(owner, name)).parameters for owner in (MCPGRPOTrainer, GRPOTrainer))
    if not any(each.kind is each.VAR_POSITIONAL for each in ours.values()):
        assert list(ours) == list(theirs), f"TRL changed the parameters of `{name}`"


def test_every_method_that_is_overridden_is_listed() -> None:
    overridden = {name for name, value in vars(MCPGRPOTrainer).items() if inspect.isfunction(value)}
    assert sorted(name for name in overridden if hasattr(GRPOTrainer, name) and name != "__init__") == list(OVERRIDES)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_used_is_still_there(name: str) -> None:
    assert hasattr(GRPOTrainer, name) or name in names_of_both(), f"TRL no longer has `{name}`"


def test_every_private_attribute_that_is_used_is_listed() -> None:
    """Those of the trainer that are not its own."""
    tree = ast.parse((PACKAGE / "trainer.py").read_text())
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("_")}
    own = {name for name in vars(MCPGRPOTrainer) if not hasattr(GRPOTrainer, name)}
    own |= {
        target.attr
        for node in ast.walk(tree)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for each in (node.targets if isinstance(node, ast.Assign) else [node.target])
        for target in ast.walk(each)
        if isinstance(target, ast.Attribute) and target.attr not in names_of_both()
    }
    known = {*ATTRIBUTES, *OVERRIDES, "__init__", "_trainer", "_name_or_path"}
    assert used - own - known == set()


@pytest.mark.parametrize(
    ("function", "text"), [(function, text) for function, texts in SOURCES.items() for text in texts]
)
def test_a_source_still_has_what_is_relied_on(function: Callable[..., Any], text: str) -> None:
    assert text in inspect.getsource(function), f"TRL no longer has `{text}` in `{function.__qualname__}`"


def test_the_pass_of_the_loss_is_asked_for_as_trl_asks() -> None:
    """`policy_pass` gives the columns that TRL's loss gives, and the loss reads what is settled only after it."""
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    start = loss.index("self._get_per_token_logps_and_entropies(")
    call: Any = ast.parse(loss[start : loss.index("\n        )\n", start) + 10]).body[0]
    given = {keyword.arg for keyword in call.value.keywords} - {"compute_entropy", "compute_aux_loss"}
    parameters = inspect.signature(GRPOTrainer._get_per_token_logps_and_entropies).parameters
    assert given == {name for name in parameters if name not in trl_compat._OF_THE_PASS}
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        assert start < loss.index(f'"{name}"'), f"TRL reads `{name}` before its forward pass"


def test_every_upload_of_the_trainer_is_one_that_is_made_clean() -> None:
    source = inspect.getsource(transformers_trainer)
    assert source.count("hf_api().upload_folder(") == NUM_UPLOADS
    assert "upload_file(" not in source


def test_private_names_and_patches_are_in_one_module() -> None:
    """No other module imports from inside TRL or patches a module, but for the settings' base class."""
    allowed = {"trl_compat.py": None, "config.py": {"trl.trainer.grpo_config"}}
    for path in PACKAGE.rglob("*.py"):
        if path.name in allowed and allowed[path.name] is None:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "trl":
                assert node.module in (allowed.get(path.name) or set()), f"{path}: {node.module}"
