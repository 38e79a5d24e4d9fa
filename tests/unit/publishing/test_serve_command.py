"""The command that serves a policy means the same whatever the policy is called."""

import argparse
import json
import shlex
from pathlib import Path

import pytest
from helpers.families import family_tokenizer
from peft import LoraConfig

from mcp_grpo import serve_command


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
