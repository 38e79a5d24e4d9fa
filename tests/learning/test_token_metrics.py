"""Figures about the tokens of a loss: quantiles of their ratios."""

import math

import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.token_metrics import ratio_quantiles


def quantiles(ratios: torch.Tensor, active: torch.Tensor) -> dict[str, float]:
    return ratio_quantiles(ratios.log(), torch.zeros_like(ratios), active, Accelerator())


def test_quantiles_are_those_of_the_tokens_in_the_loss() -> None:
    ratios = torch.linspace(1, 2, 11).repeat(2, 1)
    ratios[1] = 100.0
    active = torch.tensor([[1.0], [0.0]]).expand(2, 11)
    assert quantiles(ratios, active) == pytest.approx({"ratio/p10": 1.1, "ratio/p50": 1.5, "ratio/p90": 1.9})
    assert quantiles(ratios, torch.zeros(2, 11)) == {}


def test_more_tokens_than_a_quantile_can_be_taken_of_are_thinned_out() -> None:
    size = 2**24 + 5
    logps = torch.linspace(-1, 1, size)[None]
    found = ratio_quantiles(logps, torch.zeros(1, size), torch.ones(1, size), Accelerator())
    expected = {"ratio/p10": math.exp(-0.8), "ratio/p50": 1.0, "ratio/p90": math.exp(0.8)}
    assert found == pytest.approx(expected, rel=1e-3)
