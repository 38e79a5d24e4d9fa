"""Devices without double precision: what is computed in it goes to the CPU first, in one place."""

import re
from pathlib import Path
from types import SimpleNamespace

import torch

import mcp_grpo
from mcp_grpo.precision import in_double


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
