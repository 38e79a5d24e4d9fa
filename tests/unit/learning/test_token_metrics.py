"""Figures about the tokens of a loss: over all passes of an update, and quantiles of their ratios."""

import math

import pytest
import torch
from accelerate import Accelerator

from mcp_grpo.learning.token_metrics import TokenMetrics, ratio_edges, ratio_quantiles, token_metrics, token_sums


def sums_of(ratios: torch.Tensor, active: torch.Tensor | None = None, **changes: object) -> dict[str, float]:
    """Sums over tokens with these ratios."""
    active = torch.ones_like(ratios) if active is None else active
    arguments = {
        "logps": ratios.log() - 1,
        "sampling_logps": -torch.ones_like(ratios),
        "ref_logps": None,
        "advantages": active,
        "active": active,
        "sampled": torch.ones_like(ratios),
        "gated": torch.zeros_like(ratios),
        "is_on_policy": False,
        **changes,
    }
    return {name: float(value) for name, value in token_sums(**arguments).items()}  # pyright: ignore[reportArgumentType]


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
    figures = TokenMetrics()
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
    assert TokenMetrics().metrics() == {}


def test_mean_and_spread_of_the_ratio_are_those_of_all_tokens_of_an_update() -> None:
    torch.manual_seed(0)
    ratios = torch.exp(0.5 * torch.randn(4, 25))
    active = (torch.rand(4, 25) < 0.7).float()
    figures = TokenMetrics()
    for rows in (slice(0, 1), slice(1, 4)):  # two passes of unequal size
        figures.add(sums_of(ratios[rows], active[rows]), {})
    found, counted = figures.metrics(), ratios[active.bool()].double()
    assert found["ratio/mean"] == pytest.approx(counted.mean().item())
    assert found["ratio/std"] == pytest.approx(counted.std(correction=0).item())


def test_a_spread_that_is_hardly_there_is_found() -> None:
    ratios = torch.tensor([[0.9999, 1.0001]]).repeat(1, 50_000)
    assert token_metrics(sums_of(ratios))["ratio/std"] == pytest.approx(1e-4, rel=0.01)
    assert token_metrics(sums_of(torch.ones(1, 1000)))["ratio/std"] == 0.0


def test_a_histogram_of_ratios_has_the_limits_of_clip_and_gate_among_its_edges() -> None:
    edges = ratio_edges(0.8, 1.2, 0.25, 4.0, 0.0, math.inf)
    assert edges == (0.25, 0.5, 0.8, 0.95, 0.99, 1.01, 1.05, 1.2, 2.0, 4.0)
    ratios = torch.tensor([[0.1, 0.3, 0.7, 0.9, 1.0, 1.0, 1.1, 1.5, 3.0, 9.0, 1e-9, float("nan")]])
    active = torch.ones_like(ratios)
    active[0, 5] = 0  # not in the loss
    found = token_metrics(sums_of(ratios, active, edges=edges))
    histogram = {name.split("/")[-1]: value * 11 for name, value in found.items() if "histogram" in name}
    assert histogram == pytest.approx(
        {
            "below_0.25": 2,
            "0.25_to_0.5": 1,
            "0.5_to_0.8": 1,
            "0.8_to_0.95": 1,
            "0.95_to_0.99": 0,
            "0.99_to_1.01": 1,
            "1.01_to_1.05": 0,
            "1.05_to_1.2": 1,
            "1.2_to_2": 1,
            "2_to_4": 1,
            "above_4": 2,
        }
    )


def test_what_is_learnt_from_is_in_the_loss_and_neither_clipped_nor_gated() -> None:
    figures = TokenMetrics()
    for num_sampled, num_active, num_idle in [(10, 8, 2), (90, 32, 8)]:
        active = torch.zeros(1, num_sampled)
        active[0, :num_active] = 1
        figures.add(sums_of(torch.ones(1, num_sampled), active) | {"idle": num_idle}, {})
    found = figures.metrics()
    assert (found["mask/in_loss_fraction"], found["loss/active_fraction"]) == pytest.approx((0.4, 0.3))
