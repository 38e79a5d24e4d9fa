"""Devices without double precision, and CPUs without instructions for 16 bits."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import save_tiny_model, tiny_model

import mcp_grpo
from mcp_grpo import precision
from mcp_grpo.evaluation import LocalModel
from mcp_grpo.precision import in_double, is_slow_on_cpu, slowness_on_cpu, suited_to_cpu


def test_double_precision_is_asked_for_in_one_place() -> None:
    package = Path(mcp_grpo.__file__).parent
    pattern = re.compile(r"\.double\(\)|dtype=torch\.float64|\.to\(torch\.(?:float64|double)\)|torch\.double\b")
    asking = [str(path.relative_to(package)) for path in package.rglob("*.py") if pattern.search(path.read_text())]
    assert asking == ["precision.py"]


def test_on_mps_it_is_computed_on_the_cpu() -> None:
    tensor = torch.ones(2)
    on_mps = SimpleNamespace(device=torch.device("mps"), cpu=lambda: tensor)  # which knows nothing else
    for given in (tensor, on_mps):
        assert in_double(given).dtype is torch.float64  # type: ignore[arg-type]
        assert in_double(given).device.type == "cpu"  # type: ignore[arg-type]


@pytest.fixture(params=[True, False], ids=["with instructions", "without"])
def has_instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    for name in ("_is_mkldnn_bf16_supported", "_is_mkldnn_fp16_supported"):
        monkeypatch.setattr(torch.ops.mkldnn, name, lambda: request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_slow_where_a_cpu_has_no_instructions_for_them(
    has_instructions: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_slow_on_cpu(dtype) != has_instructions
    assert not is_slow_on_cpu(torch.float32)
    monkeypatch.setattr(precision, "_CHECKS", {dtype: "_of_another_build"})
    assert not is_slow_on_cpu(dtype)


def test_a_model_that_stays_on_a_cpu_is_computed_in_what_is_fast(has_instructions: bool) -> None:
    model = tiny_model(family_tokenizer("qwen3")).to(torch.bfloat16)
    assert suited_to_cpu(model).dtype == (torch.bfloat16 if has_instructions else torch.float32)
    quantized: Any = SimpleNamespace(dtype=torch.bfloat16, is_quantized=True)
    assert suited_to_cpu(quantized) is quantized


def test_a_local_model_is_loaded_so(has_instructions: bool, tmp_path: Path) -> None:
    tiny_model(family_tokenizer("qwen3")).to(torch.bfloat16).save_pretrained(save_tiny_model(tmp_path))
    local = LocalModel(str(tmp_path))
    assert local._generator._model.dtype == (torch.bfloat16 if has_instructions else torch.float32)


@pytest.mark.parametrize(
    ("dtype", "mixed_precision", "said"),
    [
        (torch.bfloat16, "no", 'for bfloat16: .*Load the model with `dtype="float32"`, or train'),
        (torch.float16, "no", "for float16"),
        (torch.float32, "bf16", "for bfloat16: .*Set `bf16=False` and"),
        (torch.float32, "no", None),
    ],
)
def test_training_so_is_said_to_be_slow(
    dtype: torch.dtype, mixed_precision: str, said: str | None, has_instructions: bool
) -> None:
    sentence = slowness_on_cpu(tiny_model(family_tokenizer("qwen3")).to(dtype), mixed_precision)
    if said is None or has_instructions:
        assert sentence is None
    else:
        assert re.search(said, sentence or "")
    on_gpu: Any = tiny_model(family_tokenizer("qwen3")).to("meta", dtype)
    assert slowness_on_cpu(on_gpu, mixed_precision) is None
