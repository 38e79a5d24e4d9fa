"""
The loss of a micro-batch: from inputs and one pass of the policy to what TRL's loss reads, terms beside it, and metrics.

TRL's `_compute_loss` stays in charge of the policy term. [`Objective.settle`] gives it its advantages, old and reference
log-probabilities, which depend on the pass; [`Objective.terms`] are added to what it returns. Nothing is changed in place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mcp_grpo.learning.kl import capped_reference, kl_of_active, kl_of_masked, robust_kl
from mcp_grpo.learning.token_metrics import ratio_quantiles, token_sums
from mcp_grpo.learning.value_head import ValueRecorder
from mcp_grpo.learning.values import ValueEstimator
from mcp_grpo.masking import Bootstrap, imitation_loss
from mcp_grpo.trl_compat import LossDenominator


Batch = dict[str, Any]


def outside_gate(logps: torch.Tensor, old_logps: torch.Tensor, gate: float) -> torch.Tensor:
    """
    Find the tokens whose ratio is too far off to learn from: below `1 / gate`, above `gate`, or not a number.

    PPO's clip leaves a token unbounded whose probability has risen although it did worse than expected; a gate does not.
    """
    ratios = torch.exp(logps.detach() - old_logps)
    return ~((ratios >= 1 / gate) & (ratios <= gate))


def with_scripted_logps(inputs: Mapping[str, Any], logps: torch.Tensor) -> Batch:
    """
    Give rows that the policy did not sample its own log-probabilities as those they were sampled with: those of before the
    update if they are known, else those of the pass at hand, which is then the first.
    """
    found = dict(inputs)
    if "is_scripted" in found:
        rows = found["is_scripted"].unsqueeze(1)
        before = found.get("trainer_logps", logps)
        for name in ("sampling_per_token_logps", "old_per_token_logps"):
            if name in found:
                found[name] = torch.where(rows, before, found[name])
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The inputs of a micro-batch as TRL's loss reads them, with sums over the tokens of all ranks for the metrics."""

    inputs: Batch
    sums: dict[str, float] = field(default_factory=dict)
    quantiles: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """
    What the loss of a run has beside TRL's own terms.

    Args:
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
        values ([`ValueEstimator`], *optional*):
            Gives advantages from a value head, and trains it.
        is_guarded (`bool`):
            Whether it is known what tokens were sampled with, so that ratios and KL are guarded.
        old_logps (`str`):
            What ratios are taken to: `"sampler"` or `"trainer"`.
        ratio_gate (`float`):
            Tokens whose ratio is outside of `[1 / ratio_gate, ratio_gate]` leave the policy term.
        ratio_edges (`tuple[float, ...]`):
            Where the bins of the histogram of ratios meet.
        kl_hard_cap (`float`, *optional*):
            Nats per token above which a micro-batch has no policy term, by [`robust_kl`].
        is_kl_corrected (`bool`):
            Whether the KL estimate is corrected for the policy that sampled (`use_bias_correction_kl`).
        importance_sampling_level (`str`):
            TRL's `"token"` or `"sequence"`.
        value_loss_coef (`float`):
            Weight of the value head's loss.
        bootstrap ([`Bootstrap`]):
            Help for a policy that cannot form tool calls yet.
    """

    accelerator: Any
    values: ValueEstimator | None
    is_guarded: bool
    old_logps: str
    ratio_gate: float
    ratio_edges: tuple[float, ...]
    kl_hard_cap: float | None
    is_kl_corrected: bool
    importance_sampling_level: str
    value_loss_coef: float
    bootstrap: Bootstrap

    @property
    def is_plain(self) -> bool:
        """Return whether the loss is TRL's, bit by bit."""
        return self.values is None and not self.is_guarded

    def settle(
        self,
        inputs: Mapping[str, Any],
        logps: torch.Tensor,
        recorder: ValueRecorder | None,
        *,
        learn: bool,
        is_on_policy: bool,
    ) -> Settled:
        """
        Give a micro-batch its advantages and its reference, from the pass of the policy over it.

        Args:
            inputs (`Mapping[str, Any]`):
                Columns of the micro-batch.
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities under the policy.
            recorder ([`ValueRecorder`], *optional*):
                Has the values of the same pass.
            learn (`bool`):
                Whether it counts for how far the value head is relied on.
            is_on_policy (`bool`):
                Whether the policy is still the one that sampled.
        """
        settled, logps = dict(inputs), logps.detach()
        if self.values is not None:
            assert recorder
            settled |= self.values.settle(settled, recorder, learn=learn)
        if "row_scale" in settled:
            settled["advantages"] = settled["advantages"] * settled["row_scale"]
        return self._guard(settled, logps, is_on_policy) if self.is_guarded else Settled(inputs=settled)

    def _guard(self, inputs: Batch, logps: torch.Tensor, is_on_policy: bool) -> Settled:
        """Take tokens out of the policy term whose ratio is too far off, and all of them if the KL divergence is."""
        inputs = with_scripted_logps(inputs, logps)
        sampling, reference = inputs["sampling_per_token_logps"], inputs.get("ref_per_token_logps")
        settled = dict(inputs)
        if self.old_logps == "trainer":
            old = inputs.get("old_per_token_logps", logps)
            gated = outside_gate(old, sampling, self.ratio_gate)
            weights = (old - sampling).exp().masked_fill(gated, 0)
        else:
            gated = outside_gate(logps, sampling, self.ratio_gate)
            weights = (~gated).float()
            # An advantage of 0 does not undo a ratio that is not finite.
            settled["old_per_token_logps"] = torch.where(gated, logps, inputs["old_per_token_logps"])
        advantages = per_token(inputs["advantages"]) * weights
        mask = inputs["completion_mask"] * inputs["tool_mask"]
        sums = token_sums(
            logps=logps,
            sampling_logps=sampling,
            ref_logps=reference,
            advantages=advantages,
            active=mask,
            sampled=((mask + inputs["masked"]) > 0) if "masked" in inputs else mask,
            gated=gated,
            is_on_policy=is_on_policy,
            edges=self.ratio_edges,
        )
        cap = self.kl_hard_cap
        if reference is not None and cap is not None:
            robust = robust_kl(logps.float(), reference.float(), cap)
            sums["kl_robust"] = torch.where(mask > 0, robust, 0).sum()
        total = self.accelerator.reduce(torch.stack(list(sums.values())), reduction="sum").tolist()
        total = dict(zip(sums, total, strict=True))
        total["idle"], metrics = total["gated"], {}
        if reference is not None and cap is not None and total["active"]:
            settled["ref_per_token_logps"] = capped_reference(logps, reference, cap)
            is_over = not total["kl_robust"] / total["active"] <= cap
            metrics["kl/hard_cap_hits"] = float(is_over)
            if is_over:
                advantages, total["idle"] = torch.zeros_like(advantages), total["active"]
        settled["advantages"] = advantages
        quantiles = ratio_quantiles(logps, sampling, mask, self.accelerator)
        return Settled(inputs=settled, sums=total, quantiles=quantiles, metrics=metrics)

    def terms(
        self,
        inputs: Batch,
        logps: torch.Tensor,
        recorder: ValueRecorder | None,
        *,
        beta: float,
        denominator: LossDenominator,
        strength: float,
        learn: bool,
    ) -> dict[str, torch.Tensor]:
        """
        Return what is added to TRL's loss: `kl_of_masked`, `value` and `imitation`, where they apply.

        Args:
            inputs (`dict[str, Any]`):
                Settled columns of the micro-batch.
            logps (`torch.Tensor` of shape `(B, T)`):
                Log-probabilities under the policy.
            recorder ([`ValueRecorder`], *optional*):
                Has the values of the same pass.
            beta (`float`):
                Weight of the KL term.
            denominator ([`LossDenominator`]):
                What TRL divides a sum over tokens by.
            strength (`float`):
                Strength of the bootstrap, from 1 to 0.
            learn (`bool`):
                Whether the value head's loss counts for its metrics.
        """
        terms: dict[str, torch.Tensor] = {}
        if "masked" in inputs and beta:
            kl = kl_of_masked(logps, inputs, denominator, is_corrected=self.is_kl_corrected)
            terms["kl_of_masked"] = beta * kl
        if self.values is not None:
            assert recorder
            num_turns = denominator.per_update(inputs["num_turns"])
            terms["value"] = self.value_loss_coef * self.values.loss(inputs, recorder, num_turns, learn=learn)
        if strength:
            num_imitated = denominator.per_update(inputs["num_imitated"])
            imitation = imitation_loss(logps, inputs["imitated"], num_imitated)
            terms["imitation"] = self.bootstrap.imitation_coef * strength * imitation
        return terms

    def policy_term(
        self, loss: torch.Tensor, logps: torch.Tensor, inputs: Batch, *, beta: float, denominator: LossDenominator
    ) -> torch.Tensor:
        """Return TRL's loss without its KL term, detached, given one that has no entropy bonus in it."""
        if not beta:
            return loss
        correction: Any = self.importance_sampling_level if self.is_kl_corrected else None
        return loss - beta * kl_of_active(logps, inputs, denominator, correction=correction)


def per_token(advantages: torch.Tensor) -> torch.Tensor:
    """Return advantages that can be multiplied by a quantity of each token."""
    return advantages.unsqueeze(1) if advantages.dim() == 1 else advantages
