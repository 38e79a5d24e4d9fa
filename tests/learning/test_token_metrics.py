"""Figures about the tokens of a loss: over all passes of an update, and quantiles of their ratios."""

import math

import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.token_metrics import TokenFigures, ratio_quantiles, token_sums


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


def test_every_token_of_an_update_counts_the_same_and_alignment_only_where_the_policy_is_still_the_sampler() -> None:
    figures = TokenFigures()
    for num_tokens, logp, is_on_policy in [(1, -1.0, True), (9, -1.5, False)]:
        logps, active = torch.full((1, num_tokens), logp), torch.ones(1, num_tokens)
        sums = token_sums(
            logps=logps,
            sampling_logps=torch.full_like(logps, -1.0),
            ref_logps=None,
            advantages=active,
            active=active,
            sampled=active,
            gated=torch.zeros_like(active),
            is_on_policy=is_on_policy,
        )
        figures.add({name: float(value) for name, value in sums.items()}, {"ratio/p50": math.exp(logp + 1)})
    found = figures.metrics()
    mean = (1 + 9 * math.exp(-0.5)) / 10
    assert (found["ratio/mean"], found["ratio/p50"]) == pytest.approx((mean, mean))
    assert (found["align/score"], found["align/logp_mae"]) == (1, 0)
    assert TokenFigures().metrics() == {}
