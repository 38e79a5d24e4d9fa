"""The command that serves a policy means the same whatever the policy is called."""

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import save_tiny_model
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from mcp_grpo import export_for_serving, serve_command
from mcp_grpo.errors import SettingsError
from mcp_grpo.train.imitation import train_rows


FLAG = "--trust-remote-code"


def parse(command: str) -> argparse.Namespace:
    """Read a command as `vllm serve` reads it."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model")
    parser.add_argument(FLAG, action="store_true")
    parser.add_argument("--lora-modules", nargs="*")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--chat-template")
    program, _, *words = shlex.split(command)
    assert program == "vllm"
    return parser.parse_known_args(words)[0]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = Path(FLAG)
    family_tokenizer("qwen3").save_pretrained(tmp_path / folder)
    return folder


def test_a_model_in_a_folder_that_looks_like_a_flag_is_served_from_it_under_its_name(folder: Path) -> None:
    read = parse(serve_command(folder))
    assert read.trust_remote_code is False
    assert read.model == f"./{FLAG}"
    assert read.served_model_name == [FLAG]
    assert Path(read.chat_template).is_file()


@pytest.mark.parametrize("name", [FLAG, "a=b", "a,b", "$(touch x); `y`"])
def test_an_adapter_keeps_its_name_whatever_it_is(folder: Path, name: str) -> None:
    LoraConfig(base_model_name_or_path="-x", target_modules=["q_proj"], r=4).save_pretrained(folder)
    read = parse(serve_command(folder, name=name))
    assert read.trust_remote_code is False
    assert read.model == "./-x"
    (module,) = read.lora_modules
    # As vLLM tells the two forms apart.
    served, path = module.split("=") if "," not in module and "=" in module else json.loads(module).values()
    assert (served, path) == (name, f"./{FLAG}")


@pytest.mark.parametrize("is_tied", [True, False])
def test_an_adapter_that_trains_rows_of_tokens_is_refused_and_exported_as_the_policy_it_is(
    tmp_path: Path, is_tied: bool
) -> None:
    base = save_tiny_model(tmp_path / "base", tie_word_embeddings=is_tied)
    tokenizer = AutoTokenizer.from_pretrained(base)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    tags = ("<tool_call>", "</tool_call>")
    train_rows(config, tokenizer, tags, base, None)  # as the warm start does it
    policy: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    torch.manual_seed(0)
    trained = [weight for name, weight in policy.named_parameters() if "trainable_tokens" in name]
    assert len(trained) >= (1 if is_tied else 2)
    for weight in trained:
        torch.nn.init.normal_(weight)
    policy.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        SettingsError,
        match=r"another policy: `trainable_token_indices` are rows of an embedding\. Call `export_for_serving`",
    ):
        serve_command(tmp_path / "adapter")
    command = export_for_serving(tmp_path / "adapter", tmp_path / "whole")
    assert parse(command).model == str(tmp_path / "whole")
    assert "--enable-lora" not in command
    whole: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "whole")
    assert whole.config.tie_word_embeddings == is_tied
    ids = torch.tensor([[*tokenizer.convert_tokens_to_ids(list(tags)), 1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, policy(ids).logits, atol=1e-4, rtol=1e-4)
    # Its rows are those of the policy, not of the base, also where they are written.
    merged, below = policy.merge_and_unload(), AutoModelForCausalLM.from_pretrained(base)
    rows = tokenizer.convert_tokens_to_ids(list(tags))
    for part in ("get_input_embeddings", "get_output_embeddings"):
        found, expected, before = (getattr(model, part)().weight for model in (whole, merged, below))
        assert torch.equal(found, expected)
        assert not torch.isclose(found[rows], before[rows]).all(dim=1).any()
