"""Metrics of the tokens of a loss that say whether the policy learns from what it sampled."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from mcp_grpo.learning.kl import per_token_kl


ALIGNED_WITHIN = 0.1  # nats between the sampler's and the trainer's log-probability of a token
MAX_DIFFERENCE = 20.0
QUANTILES = (0.1, 0.5, 0.9)
MAX_SAMPLES = 2**16  # of each rank, for `torch.quantile` takes 2**24 in all
EDGES = (0.5, 0.95, 0.99, 1.01, 1.05, 2.0)  # of the histogram of ratios, beside the limits of clip and gate


def token_sums(
    *,
    logps: torch.Tensor,
    sampling_logps: torch.Tensor,
    ref_logps: torch.Tensor | None,
    advantages: torch.Tensor,
    active: torch.Tensor,
    sampled: torch.Tensor,
    gated: torch.Tensor,
    is_on_policy: bool,
    edges: Sequence[float] = (),
) -> dict[str, torch.Tensor]:
    """
    Return sums over the tokens of one rank, to be added to those of the others; the keys do not depend on the tokens.

    All tensors have shape `(B, T)`. `active` is 1 for the tokens in the policy loss, `sampled` for all that the policy wrote,
    `gated` for those whose ratio is too far off. `is_on_policy` says that the policy is still the one that sampled, so that any
    difference is one between sampler and trainer. `edges` are the ratios at which the bins of their histogram meet.
    """
    logps, sampling_logps, active, sampled = (x.detach().float() for x in (logps, sampling_logps, active, sampled))
    # Bounded, so that one token that is off without end leaves something to read.
    difference = (logps - sampling_logps).nan_to_num(nan=MAX_DIFFERENCE).clamp(
        -MAX_DIFFERENCE, MAX_DIFFERENCE
    ) * sampled
    ratios = torch.exp(difference)
    positive, negative = active * (advantages > 0), active * (advantages < 0)
    sums = {
        "active": active.sum(),
        "sampled": sampled.sum(),
        "gated": (gated * active).sum(),
        "ratios": (ratios * active).sum(),
        "ratios_squared": (ratios.square() * active).sum(),
        "off_squared": (torch.expm1(difference).square() * active).sum(),  # around 1: near it, squares cancel out
        "ratios_positive": (ratios * positive).sum(),
        "positive": positive.sum(),
        "ratios_negative": (ratios * negative).sum(),
        "negative": negative.sum(),
    }
    if edges:
        # Not by `bincount`, which makes the device wait.
        up_to = [((difference <= math.log(edge)) * active).sum() for edge in edges]
        bounds = [torch.zeros_like(sums["active"]), *up_to, sums["active"]]
        sums |= {name: high - low for name, (low, high) in zip(_bins(edges), pairwise(bounds), strict=True)}
    if is_on_policy:
        sums["compared"] = active.sum()
        sums["difference"] = (difference.abs() * active).sum()
        sums["aligned"] = ((difference.abs() < ALIGNED_WITHIN) * active).sum()
    if ref_logps is not None:
        kl = per_token_kl(logps, ref_logps.detach().float())
        # Not times the mask: a divergence without end of a token that does not count is not a number even then.
        sums["kl_active"], sums["kl_sampled"] = (torch.where(mask > 0, kl, 0).sum() for mask in (active, sampled))
    return sums


def ratio_edges(*limits: float) -> tuple[float, ...]:
    """Return where the bins of a histogram of ratios meet: about evenly on a logarithmic scale, and at `limits`."""
    return tuple(sorted({*EDGES, *(limit for limit in limits if 0 < limit < math.inf)}))


def _bins(edges: Sequence[float]) -> list[str]:
    inner = [f"histogram/{low:g}_to_{high:g}" for low, high in pairwise(edges)]
    return [f"histogram/below_{edges[0]:g}", *inner, f"histogram/above_{edges[-1]:g}"]


def token_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """
    Return metrics from the sums of all ranks.

    Args:
        sums (`Mapping[str, float]`):
            From [`token_sums`], added up; and `idle`, how many tokens in the loss were clipped or gated, if that is known.

    Returns:
        `dict[str, float]`: Metric keys and their values:

            - `mask/in_loss_fraction`: share of the sampled tokens that the policy loss sees.
            - `loss/active_fraction`: share of the sampled tokens that the policy loss sees, and that are neither clipped nor
              gated.
            - `ratio/mean`, `ratio/mean_positive`, `ratio/mean_negative`: ratio of the policy to the one that sampled,
              over all tokens in the loss and over those with an advantage of either sign.
            - `ratio/std`: its standard deviation, over all tokens in the loss.
            - `ratio/histogram/...`: share of the tokens in the loss in each bin of it; they add up to 1.
            - `ratio/gated_fraction`: share of the tokens in the loss whose ratio was too far off to learn from.
            - `ratio/ess`: effective sample size, as a share of the tokens in the loss.
            - `align/logp_mae`, `align/score`: on-policy, the mean difference between sampler and trainer, and the share
              of tokens where it is small.
            - `kl/active`, `kl/forced`, `kl/all`: estimate of the KL divergence from the reference, over the tokens in
              the policy loss, those that it leaves out, and all that were sampled.
    """
    found = {
        "mask/in_loss_fraction": ("active", "sampled"),
        "ratio/mean": ("ratios", "active"),
        "ratio/mean_positive": ("ratios_positive", "positive"),
        "ratio/mean_negative": ("ratios_negative", "negative"),
        "ratio/gated_fraction": ("gated", "active"),
        "align/logp_mae": ("difference", "compared"),
        "align/score": ("aligned", "compared"),
        "kl/active": ("kl_active", "active"),
        "kl/all": ("kl_sampled", "sampled"),
    }
    metrics = {
        key: sums[total] / sums[count] for key, (total, count) in found.items() if total in sums and sums[count]
    }
    if sums["ratios_squared"]:
        metrics["ratio/ess"] = sums["ratios"] ** 2 / (sums["active"] * sums["ratios_squared"])
        off = sums["ratios"] / sums["active"] - 1
        metrics["ratio/std"] = math.sqrt(max(0.0, sums["off_squared"] / sums["active"] - off**2))
        bins = (name for name in sums if name.startswith("histogram/"))
        metrics |= {f"ratio/{name}": sums[name] / sums["active"] for name in bins}
    if "idle" in sums and sums["sampled"]:
        metrics["loss/active_fraction"] = (sums["active"] - sums["idle"]) / sums["sampled"]
    if "kl_active" in sums and sums["sampled"] > sums["active"]:
        forced = sums["kl_sampled"] - sums["kl_active"]
        metrics["kl/forced"] = forced / (sums["sampled"] - sums["active"])
    return metrics


class TokenMetrics:
    """Metrics of the tokens of one update, each token with the same weight, whichever pass it was in."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = {}

    def add(self, sums: Mapping[str, float], quantiles: Mapping[str, float]) -> None:
        """Add the sums and the quantiles of a pass, of all ranks."""
        weighted = {name: value * sums["active"] for name, value in quantiles.items()}
        for name, value in {**sums, **weighted}.items():
            self._sums[name] = self._sums.get(name, 0.0) + value

    def metrics(self) -> dict[str, float]:
        """Return [`token_metrics`] and the means of the quantiles; nothing if no pass was added."""
        if not self._sums:
            return {}
        quantiles = {name: value for name, value in self._sums.items() if name.startswith("ratio/")}
        return token_metrics(self._sums) | {name: value / self._sums["active"] for name, value in quantiles.items()}


def ratio_quantiles(
    logps: torch.Tensor, sampling_logps: torch.Tensor, active: torch.Tensor, accelerator: Any
) -> dict[str, float]:
    """Return `ratio/p10`, `ratio/p50` and `ratio/p90` over the tokens in the loss of all ranks; of very many, every n-th."""
    found = (logps.detach() - sampling_logps)[active.bool()].float()
    found = found[:: max(1, -(-len(found) // MAX_SAMPLES))]
    if accelerator.num_processes > 1:
        found = accelerator.gather(accelerator.pad_across_processes(found, dim=0, pad_index=torch.nan))
    found = found[~found.isnan()]
    if not len(found):
        return {}
    quantiles = torch.quantile(found, torch.tensor(QUANTILES, device=found.device)).exp().tolist()
    return {f"ratio/p{q * 100:.0f}": value for q, value in zip(QUANTILES, quantiles, strict=True)}
