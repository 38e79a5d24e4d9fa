"""Turn-level advantages: from the rewards of a batch, and from the values that its loss sees."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mcp_grpo.learning.advantages import (
    MixingWeight,
    first_tokens,
    returns_to_go,
    to_tokens,
    turn_baseline,
    turn_gae,
    turn_mask,
)
from mcp_grpo.learning.value_head import ValueHead, ValueRecorder
from mcp_grpo.learning.value_loss import value_loss


MIN_SCALE = 0.1  # smaller standard deviations are noise that must not be blown up
MIN_VARIANCE = 1e-8  # below which there is nothing to explain

Batch = dict[str, Any]
Sum = Callable[[torch.Tensor], torch.Tensor]


def turn_columns(
    turn_ids: torch.Tensor,
    rewards: torch.Tensor,
    group_size: int,
    *,
    gamma: float,
    scale: str,
    accelerator: Any,
    min_scale: float = MIN_SCALE,
) -> Batch:
    """
    What is known of each turn before the loss: its reward, its return, and what the group makes of that.

    Args:
        turn_ids (`torch.Tensor` of shape `(B, T)`):
            Turn of each token, from 0; -1 where the policy did not write it or is not to learn from it.
        rewards (`torch.Tensor` of shape `(B, K)`):
            Reward of each turn.
        group_size (`int`):
            Attempts per group. The groups of all ranks stand one after another.
        gamma (`float`):
            Discount from one turn to the next.
        scale (`str`):
            What advantages are to be divided by: `"batch"` for the population standard deviation of the group's over all
            turns that have a baseline, at least 0.1, or `"none"`. It is known before any value is.
        accelerator (`accelerate.Accelerator`):
            Knows the other ranks.
        min_scale (`float`, *optional*, defaults to `0.1`):
            Smallest divisor. Where values are to give advantages, too, it should be 1: groups that all did the same
            would otherwise blow those up.

    Returns:
        `dict[str, torch.Tensor]`: Columns of the batch:

            - `turn_ids`: as given, of shape `(B, T)`.
            - `turn_rewards`, `turn_returns`: of shape `(B, K)`, where `K` is that of the rank with most turns.
            - `turn_advantages`: returns less the group's baselines, of shape `(B, K)`; 0 where there is none.
            - `turn_has_baseline`: whether there is one, of shape `(B, K)`.
            - `advantage_scale`: what to divide by, a scalar.
            - `num_turns`: turns of all ranks, a scalar.
    """
    size = len(turn_ids)
    own = slice(accelerator.process_index * size, (accelerator.process_index + 1) * size)
    rewards = accelerator.gather(accelerator.pad_across_processes(rewards, dim=1))
    counts = accelerator.gather(turn_ids.amax(dim=1) + 1)
    returns = returns_to_go(rewards, counts, gamma)
    baseline, has_baseline = turn_baseline(returns, counts, group_size)
    advantages = torch.where(has_baseline, returns - baseline, 0.0)
    divisor = rewards.new_ones(())
    if scale == "batch" and has_baseline.any():
        divisor = advantages[has_baseline].std(correction=0).clamp(min=min_scale)
    return {
        "turn_ids": turn_ids,
        "turn_rewards": rewards[own],
        "turn_returns": returns[own],
        "turn_advantages": advantages[own],
        "turn_has_baseline": has_baseline[own],
        "advantage_scale": divisor,
        "num_turns": counts.sum().to(rewards.dtype),
    }


class Critic:
    """
    The value head at work: advantages from its values, its own loss, and how well it does.

    Args:
        head ([`ValueHead`]):
            Part of the model.
        mode (`str`):
            `"gae"`, `"hybrid"`, or any other to only train it.
        gamma (`float`):
            Discount from one turn to the next.
        lam (`float`):
            Lambda of generalised advantage estimation.
        warmup_steps (`int`):
            Steps before `"hybrid"` relies on it.
        clip_range (`float`, *optional*):
            How far a value may move in the loss.
    """

    def __init__(
        self,
        head: ValueHead,
        *,
        mode: str,
        gamma: float,
        lam: float,
        warmup_steps: int,
        clip_range: float | None = None,
    ) -> None:
        self.head = head
        self.mixing = MixingWeight(warmup_steps=warmup_steps)
        self._mode, self._gamma, self._lam, self._clip_range = mode, gamma, lam, clip_range
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def gives_advantages(self) -> bool:
        """Whether advantages come from its values, at least in part."""
        return self._mode in ("gae", "hybrid")

    def settle(self, batch: Batch, recorder: ValueRecorder, *, learn: bool) -> None:
        """
        Give a batch its advantages, and its returns what would have followed a cut, from the values of this pass or of
        the one that scored it.

        Args:
            batch (`dict[str, torch.Tensor]`):
                With [`turn_columns`]; changed in place. `old_values` and `old_values_after`, of shape `(B, T)`, are the
                values of the pass that scored it. `is_cut`, of shape `(B,)`, is 1 for rows that the values are to
                continue; what follows the last token of `completion_mask` then counts for the values, never for the
                group: its returns would not be comparable.
            recorder ([`ValueRecorder`]):
                Has the values of this pass.
            learn (`bool`):
                Whether the batch counts for [`end_step`].
        """
        turn_ids, rewards = batch["turn_ids"], batch["turn_rewards"]
        counts = turn_ids.amax(dim=1) + 1
        values = batch["old_values"] if "old_values" in batch else recorder.values().detach()
        values = first_tokens(values, turn_ids, rewards.size(1))
        bootstrap, targets = None, batch["turn_returns"]
        if "is_cut" in batch:
            is_kept = "old_values_after" in batch
            after = batch["old_values_after"] if is_kept else recorder.values_after().detach()
            last = (batch["completion_mask"].sum(dim=1) - 1).clamp(min=0)
            bootstrap = after.gather(1, last.unsqueeze(1)).squeeze(1) * batch["is_cut"]
            targets = returns_to_go(rewards, counts, self._gamma, bootstrap)
        if learn:
            self._count(values, targets, counts, batch)
        batch["turn_returns"] = targets
        if not self.gives_advantages:
            return
        weight = batch.get("mixing_weight", self.mixing.value) if self._mode == "hybrid" else 1.0
        estimate = turn_gae(rewards, values, counts, gamma=self._gamma, lam=self._lam, bootstrap=bootstrap)
        mixed = (1 - weight) * batch["turn_advantages"] + weight * estimate
        batch["advantages"] = to_tokens(mixed / batch["advantage_scale"], turn_ids)

    def _count(self, values: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, batch: Batch) -> None:
        # In double: a variance is a small difference of large sums.
        mask, has_baseline = turn_mask(counts, values.size(1)), batch["turn_has_baseline"]
        value, target = (torch.where(mask, each, 0).double() for each in (values, targets))
        left, error = (
            torch.where(has_baseline, each, 0).double()
            for each in (batch["turn_advantages"], batch["turn_returns"] - values)
        )
        shift = left - error  # the value less the group's baseline
        sums = {
            "num": mask.sum(),
            "values": value.sum(),
            "targets": target.sum(),
            "targets_squared": target.square().sum(),
            "errors": (target - value).sum(),
            "errors_squared": (target - value).square().sum(),
            "num_with_baseline": has_baseline.sum(),
            "errors_squared_where_group": error.square().sum(),
            "left_squared": left.square().sum(),
            "products": (left * shift).sum(),
            "squares": shift.square().sum(),
        }
        self._add(sums)

    def _add(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, figure in sums.items():
            self._sums[name] = self._sums.get(name, 0) + figure.double()

    def loss(
        self, batch: Batch, recorder: ValueRecorder, num_turns: torch.Tensor, *, learn: bool = True
    ) -> torch.Tensor:
        """
        The squared error of the values, each turn with the same weight.

        Args:
            batch (`dict[str, torch.Tensor]`):
                Settled.
            recorder ([`ValueRecorder`]):
                Has the values of this pass.
            num_turns (`torch.Tensor`):
                Turns in an update, per process.
            learn (`bool`, *optional*, defaults to `True`):
                Whether it counts for [`end_step`].

        Returns:
            `torch.Tensor`: A scalar.
        """
        turn_ids = batch["turn_ids"]
        loss = value_loss(
            recorder.values(),
            to_tokens(batch["turn_returns"], turn_ids),
            turn_ids,
            num_turns=num_turns,
            max_turns=batch["turn_returns"].size(1),
            old_values=batch.get("old_values"),
            clip_range=self._clip_range if "old_values" in batch else None,
        )
        if learn:
            self._add({"losses": loss.detach(), "num_losses": torch.ones_like(loss.detach())})
        return loss

    def end_step(self, add_up: Sum) -> dict[str, float]:
        """
        Learn from the batches of a step how far to rely on the value head.

        Args:
            add_up (`Callable[[torch.Tensor], torch.Tensor]`):
                Adds a tensor to those of all other ranks.

        Returns:
            `dict[str, float]`: How well it does. What is undefined is left out:

                - `value/loss`: mean loss of the micro-batches.
                - `value/explained_variance`: share of the variance of its targets that values explain.
                - `value/ev_vs_group`: share of what the group's baselines leave that values would explain instead.
                - `value/mixing_weight`: what `"hybrid"` will give it next.
                - `value/mean`, `value/return_mean`: means of values and of their targets.
        """
        if not self._sums:
            return {}
        # The order of the sums is that of the code, on every rank.
        total = add_up(torch.stack(list(self._sums.values()))).tolist()
        sums, self._sums = dict(zip(self._sums, total, strict=True)), {}
        metrics = {"value/loss": sums["losses"] / sums["num_losses"]} if "losses" in sums else {}
        if "num" not in sums:
            return metrics
        self.mixing.update(sums["products"], sums["squares"])
        metrics["value/mixing_weight"] = self.mixing.value
        if not (num := sums["num"]):
            return metrics
        metrics |= {"value/mean": sums["values"] / num, "value/return_mean": sums["targets"] / num}
        variance = sums["targets_squared"] / num - (sums["targets"] / num) ** 2
        if variance >= MIN_VARIANCE:
            unexplained = sums["errors_squared"] / num - (sums["errors"] / num) ** 2
            metrics["value/explained_variance"] = 1 - unexplained / variance
        if sums["left_squared"] >= MIN_VARIANCE * max(sums["num_with_baseline"], 1.0):
            metrics["value/ev_vs_group"] = 1 - sums["errors_squared_where_group"] / sums["left_squared"]
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """What it has learnt, beside the weights of the head."""
        return {"mixing": self.mixing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Go on from an earlier run.

        Args:
            state (`Mapping[str, Any]`):
                From [`state_dict`].
        """
        self.mixing.load_state_dict(state["mixing"])
