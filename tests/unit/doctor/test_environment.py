"""What the doctor says of a machine, and of the memory that a run takes."""

from pathlib import Path
from typing import Any

import pytest
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from transformers import Gemma3nTextConfig, Qwen3Config
from trl import ModelConfig

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.environment import (
    examine_disk,
    examine_environment,
    examine_memory,
    examine_optional,
    examine_python,
    examine_versions,
)
from mcp_grpo.doctor.findings import Finding, Findings
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.doctor.memory import Estimate, compare_memory, estimate_memory


GPU = Machine(gpu="Card", memory=24.0, has_bf16=True)


def only(findings: Findings) -> Finding:
    (found,) = findings.report().findings
    return found


def test_versions_that_do_not_fit_are_told_with_the_command_that_mends_them() -> None:
    findings = Findings()
    examine_versions(findings, ["trl>=99", "no-such-package>=1", "peft>=0.1", "vllm>=0.1; extra == 'vllm'"])
    found = only(findings)
    assert found.status == "wrong"
    assert "no-such-package is not installed, and no-such-package>=1 is required" in found.found
    assert "and trl>=99 is required" in found.found
    assert "vllm" not in found.found or "vllm 0" in found.found
    assert found.remedy == "pip install 'trl>=99' 'no-such-package>=1'"


def test_an_optional_package_of_a_wrong_version_is_told_and_a_missing_one_explained() -> None:
    findings = Findings()
    examine_versions(findings, ["llguidance>=99; extra == 'grammar'"])
    assert "llguidance>=99 is required" in only(findings).found
    findings = Findings()
    examine_optional(findings)
    found = {one.name: one for one in findings.report().findings}
    assert found.keys() == {"vllm", "bitsandbytes", "deepspeed", "llguidance"}
    assert all(one.status == "ok" for one in found.values())


def test_a_checkout_that_is_not_installed_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mcp_grpo.doctor.environment.PACKAGE", "no-such-package")
    findings = Findings()
    examine_environment(findings, Machine(), tmp_path)
    (found,) = [one for one in findings.report().findings if one.name == "versions"]
    assert found.status == "warning"
    assert "`pip install -e .`" in (found.remedy or "")


def test_an_old_python_is_told() -> None:
    findings = Findings()
    examine_python(findings, ">=3.11", "3.10.4")
    assert (only(findings).status, only(findings).found) == (
        "wrong",
        "Python 3.10.4 is running, and >=3.11 is required.",
    )


def test_a_disk_without_room_is_told(tmp_path: Path) -> None:
    findings = Findings()
    examine_disk(findings, tmp_path / "new" / "run", needed=1e9)
    assert only(findings).status == "wrong"
    assert "a run needs 1000000000.0 at least" in only(findings).found
    assert "save_total_limit" in only(findings).remedy
    findings = Findings()
    examine_disk(findings, tmp_path / "new" / "run", needed=0.0)
    assert only(findings).status == "ok"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    findings = Findings()
    examine_disk(findings, tmp_path / "file" / "run")
    assert "Nothing can be written" in only(findings).found


def test_little_memory_is_a_warning() -> None:
    findings = Findings()
    examine_memory(findings, needed=1e9)
    assert only(findings).status == "warning"


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", "14.0 of 24.0 GiB"),
        ({"activations": 20.0}, "warning", "It may not fit: 32.0 of 24.0 GiB"),
        ({"weights": 30.0}, "wrong", "It does not fit"),
        ({"vllm": 0.5}, "warning", "26.0 of 24.0 GiB"),
        ({"vllm": 0.5, "sleeps": True}, "ok", "24.0 of 24.0 GiB"),
    ],
)
def test_the_estimate_is_compared_with_the_card(changes: dict[str, Any], status: str, words: str) -> None:
    given = {"weights": 8.0, "training": 4.0, "activations": 2.0, "vllm": 0.0, "sleeps": False, **changes}
    findings = Findings()
    compare_memory(findings, Estimate(**given), GPU)
    assert only(findings).status == status
    assert words in only(findings).found
    assert "estimate" in only(findings).found


def test_sharded_weights_are_no_reason_to_refuse() -> None:
    findings = Findings()
    estimate = Estimate(weights=30.0, training=0.0, activations=0.0, vllm=0.0, sleeps=False)
    compare_memory(findings, estimate, GPU, is_sharded=True)
    assert only(findings).status == "warning"


def test_the_estimate_counts_weights_of_the_run(tmp_path: Path) -> None:
    policy = tiny_model(family_tokenizer("qwen3"), hidden_size=64)
    number = policy.num_parameters()
    settings = MCPGRPOConfig(str(tmp_path), report_to="none", use_cpu=True, max_completion_length=100)

    def estimate(**model: Any) -> Estimate:
        return estimate_memory(policy.config, settings, ModelConfig(dtype="float32", **model))

    whole, adapter = estimate(), estimate(use_peft=True, lora_r=4)
    assert whole.weights * 2**30 == pytest.approx(4 * number)
    assert whole.training * 2**30 == pytest.approx(12 * number)
    assert 0 < adapter.training < whole.training / 2
    assert adapter.weights == whole.weights
    assert estimate(use_peft=True, load_in_4bit=True).weights < adapter.weights
    assert whole.activations > 0


# What a pass of so many tokens took on an H200, by `benchmarks/shared_prefix.py`: Qwen3-0.6B with LoRA (r = 16) in bf16.
@pytest.mark.parametrize(
    ("tokens", "checkpointing", "measured"),
    [(27_617, True, 6.5), (12_828, True, 3.4), (19_666, True, 4.4), (12_828, False, 27.3), (19_666, False, 42.2)],
)
def test_the_estimate_is_near_what_a_card_took(
    tokens: int, checkpointing: bool, measured: float, tmp_path: Path
) -> None:
    shape = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151_936,
        tie_word_embeddings=True,
    )
    settings = MCPGRPOConfig(
        str(tmp_path),
        report_to="none",
        use_cpu=True,
        max_completion_length=tokens,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=checkpointing,
    )
    adapter = ModelConfig(dtype="bfloat16", use_peft=True, lora_r=16, lora_target_modules=["all-linear"])
    assert estimate_memory(shape, settings, adapter).needed(139.8) == pytest.approx(measured, rel=0.2)


def test_a_width_for_each_layer_is_no_reason_to_fail(tmp_path: Path) -> None:
    shape = Gemma3nTextConfig(
        vocab_size=64,
        hidden_size=16,
        num_hidden_layers=2,
        intermediate_size=[32, 64],
        vocab_size_per_layer_input=64,
        hidden_size_per_layer_input=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_kv_shared_layers=0,
        layer_types=["full_attention"] * 2,
        activation_sparsity_pattern=[0.0, 0.0],
        laurel_rank=4,
    )
    settings = MCPGRPOConfig(str(tmp_path), report_to="none", use_cpu=True, max_completion_length=100)
    assert estimate_memory(shape, settings, ModelConfig(dtype="float32")).activations > 0


def test_without_a_gpu_there_is_nothing_to_compare_with() -> None:
    findings = Findings()
    compare_memory(findings, Estimate(weights=1, training=1, activations=1, vllm=0, sleeps=False), Machine())
    assert "there is no GPU here" in only(findings).found
