"""The package as a whole: what it exports, what it imports, and what it leans on in TRL."""

import ast
import inspect
import re
import subprocess
import sys

from transformers import trainer as transformers_trainer
from trl import GRPOTrainer

import mcp_grpo
from mcp_grpo import MCPGRPOTrainer, _trl
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


def test_public_things_are_documented() -> None:
    assert [name for name in mcp_grpo.__all__ if not inspect.getdoc(getattr(mcp_grpo, name))] == []


def test_importing_the_trainer_does_not_import_what_it_can_do_without() -> None:
    # TRL imports vLLM where it is installed, and vLLM what it needs itself.
    code = (
        "import sys, trl.trainer.grpo_trainer; before = set(sys.modules); import mcp_grpo.trainer; "
        "sys.exit(str({'vllm', 'llguidance', 'deepspeed', 'wandb'} & (sys.modules.keys() - before) or ''))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == ""


def test_every_error_is_also_the_builtin_it_replaces() -> None:
    for error in (one for one in MCPGRPOError.__subclasses__() if one.__module__ == "mcp_grpo.errors"):
        assert len(error.__bases__) == 2
        assert issubclass(error.__bases__[1], (ValueError, RuntimeError, ConnectionError))


def test_trl_still_has_the_methods_that_are_overridden() -> None:
    for name in (
        "_calculate_rewards",
        "_clip_grad_norm",
        "_compute_loss",
        "_generate",
        "_generate_and_score_completions",
        "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
        "_push_from_checkpoint",
        "_save",
        "_save_rng_state",
        "create_optimizer",
        "log",
        "save_model",
    ):
        ours, theirs = (inspect.signature(getattr(owner, name)) for owner in (MCPGRPOTrainer, GRPOTrainer))
        assert list(ours.parameters) == list(theirs.parameters), f"TRL changed the parameters of `{name}`"


def test_trl_still_returns_what_is_read_by_position_and_name() -> None:
    generate = inspect.getsource(GRPOTrainer._generate)
    assert "return prompt_ids, completion_ids, tool_mask, completions, logprobs, extra_fields" in generate
    assert 'extra_fields.pop("env_mask", None)' in generate
    score = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    assert 'output["sampling_per_token_logps"]' in score
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'inputs.get("old_per_token_logps")' in loss
    for name in ("policy_loss", "aux_loss", *_trl._CLIPPED.values()):
        assert f'self._metrics[mode]["{name}"].append(' in loss


def test_every_upload_of_the_trainer_is_one_that_is_made_clean() -> None:
    source = inspect.getsource(transformers_trainer)
    assert source.count("hf_api().upload_folder(") == 3
    assert "upload_file(" not in source
    assert "logging_backend.Table(dataframe=df)" in inspect.getsource(GRPOTrainer.log)


def test_trl_s_row_mean_losses_are_the_ones_that_are_rescaled() -> None:
    loss = inspect.getsource(GRPOTrainer._compute_loss)
    assert 'if self.loss_type in ["grpo", "sapo"]:' in loss
    assert 'elif self.loss_type == "dr_grpo":' in loss
    assert 'elif self.loss_type == "luspo":' in loss
    assert set(_trl.ROW_MEAN_LOSSES) <= set(re.findall(r'"(\w+)"', loss))
    # Read after the forward pass, and nowhere before: that is when they are settled.
    forward = loss.index("self._get_per_token_logps_and_entropies(")
    for name in ("advantages", "old_per_token_logps", "ref_per_token_logps"):
        assert forward < loss.index(f'"{name}"'), f"TRL reads `{name}` before its forward pass"
    assert "self.beta * per_token_kl" in loss
    assert 'advantages = inputs["advantages"]' in loss
    init = inspect.getsource(GRPOTrainer.__init__)
    for name in (
        "self._dist =",
        "self._metrics =",
        "self._tokenizer =",
        "self.eos_token_ids =",
        "self.rollout_func =",
    ):
        assert name in init, f"TRL no longer sets `{name}`"
