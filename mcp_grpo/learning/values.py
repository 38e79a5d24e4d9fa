"""The value head at work: advantages from its values, its own loss, and how well it does."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from mcp_grpo.learning.advantages import (
    MODES_WITH_VALUES,
    MixingWeight,
    first_tokens,
    returns_to_go,
    to_tokens,
    turn_gae,
    turn_mask,
)
from mcp_grpo.learning.value_head import ValueHead, ValueRecorder
from mcp_grpo.precision import in_double


MIN_VARIANCE = 1e-8  # below which there is nothing to explain

Batch = dict[str, Any]


def turn_weights(turn_ids: torch.Tensor, max_turns: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """
    Return weights with which every turn counts the same, however long it is: their sum is the number of turns.

    Example:

        # turn_ids: [0, 0, -1, -1, 1, -1]
        [0.5, 0.5, 0, 0, 1, 0]
    """
    slots = turn_ids.clamp(min=-1) + 1
    counts = turn_ids.new_zeros((turn_ids.size(0), 1 + max_turns))
    counts.scatter_add_(1, slots, torch.ones_like(slots))
    return counts.gather(1, slots).to(dtype).reciprocal().masked_fill(turn_ids < 0, 0.0)


def value_loss(
    values: torch.Tensor,
    returns: torch.Tensor,
    turn_ids: torch.Tensor,
    *,
    num_turns: float | torch.Tensor,
    max_turns: int,
) -> torch.Tensor:
    """
    Return the squared error of values: the mean over the tokens of a turn, summed over turns, divided by `num_turns`.

    Tokens that the policy had no choice in count, for they are states like any other; those of tools do not. `num_turns` is
    that of all micro-batches of one update, over the number of processes, so that the gradient of an update is the same for
    every way to split it. Without any sampled token the loss is 0 and still has a gradient, as DDP needs.
    """
    errors = (values - returns).masked_fill(turn_ids < 0, 0.0).square()
    return (errors * turn_weights(turn_ids, max_turns, errors.dtype)).sum() / num_turns


class ValueEstimator:
    """
    The value head of a run, with what it has learnt beside its weights.

    Args:
        head ([`ValueHead`]):
            Part of the model.
        mode (`str`):
            `"gae"`, or `"hybrid"`.
        gamma (`float`):
            Discount from one turn to the next.
        lam (`float`):
            Lambda of generalised advantage estimation.
        warmup (`int`, *optional*):
            Batches before `"hybrid"` relies on it.
    """

    def __init__(self, head: ValueHead, *, mode: str, gamma: float, lam: float, warmup: int | None = None) -> None:
        assert mode in MODES_WITH_VALUES
        self.head = head
        self.mixing = MixingWeight(warmup)
        self._mode, self._gamma, self._lam = mode, gamma, lam
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def weight(self) -> float:
        """Return how much of the next batch's advantages comes from values, between 0 and 1."""
        return self.mixing.value if self._mode == "hybrid" else 1.0

    def settle(self, batch: Batch, recorder: ValueRecorder, *, learn: bool) -> Batch:
        """
        Return the `advantages` of a batch, and its `turn_returns` with what would have followed a cut.

        Args:
            batch (`dict[str, torch.Tensor]`):
                With [`turn_columns`]. `old_values` and `old_values_after`, of shape `(B, T)`, are the values of the pass that
                scored it, if there was one. `is_cut`, of shape `(B,)`, is 1 for rows that the values are to continue: what
                follows their last token counts for the values, never for the group, whose returns would not be comparable.
                `ends_turn`, of shape `(B,)`, is 1 for those that end with the end of a turn: after it stands what tools write,
                where the head learns nothing, so that the value before it is taken.
            recorder ([`ValueRecorder`]):
                Has the values of this pass.
            learn (`bool`):
                Whether the batch counts for [`end_step`].
        """
        turn_ids, rewards = batch["turn_ids"], batch["turn_rewards"]
        counts = turn_ids.amax(dim=1) + 1
        before = batch["old_values"] if "old_values" in batch else recorder.values().detach()
        values = first_tokens(before, turn_ids, rewards.size(1))
        bootstrap, targets = None, batch["turn_returns"]
        if "is_cut" in batch:
            is_kept = "old_values_after" in batch
            after = batch["old_values_after"] if is_kept else recorder.values_after().detach()
            last = (batch["completion_mask"].sum(dim=1, keepdim=True) - 1).clamp(min=0)
            following = after.gather(1, last).squeeze(1)
            if "ends_turn" in batch:
                following = torch.where(batch["ends_turn"] > 0, before.gather(1, last).squeeze(1), following)
            bootstrap = following * batch["is_cut"]
            targets = returns_to_go(rewards, counts, self._gamma, bootstrap)
        if learn:
            self._count(values, targets, counts, batch)
        weight = batch.get("mixing_weight", self.weight) if self._mode == "hybrid" else 1.0
        estimate = turn_gae(rewards, values, counts, gamma=self._gamma, lam=self._lam, bootstrap=bootstrap)
        mixed = (1 - weight) * batch["turn_advantages"] + weight * estimate
        return {"turn_returns": targets, "advantages": to_tokens(mixed / batch["advantage_scale"], turn_ids)}

    def loss(
        self, batch: Batch, recorder: ValueRecorder, num_turns: torch.Tensor, *, learn: bool = True
    ) -> torch.Tensor:
        """Return the squared error of the values of a settled batch, each turn with the same weight."""
        turn_ids = batch["turn_ids"]
        loss = value_loss(
            recorder.values(),
            to_tokens(batch["turn_returns"], turn_ids),
            turn_ids,
            num_turns=num_turns,
            max_turns=batch["turn_returns"].size(1),
        )
        if learn:
            self._add({"losses": loss.detach(), "num_losses": torch.ones_like(loss.detach())})
        return loss

    def end_step(self, add_up: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, float]:
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
        """Return what a checkpoint must keep, beside the weights of the head."""
        return {"mixing": self.mixing.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.mixing.load_state_dict(state["mixing"])

    def _count(self, values: torch.Tensor, targets: torch.Tensor, counts: torch.Tensor, batch: Batch) -> None:
        # In double: a variance is a small difference of large sums.
        mask, has_baseline = turn_mask(counts, values.size(1)), batch["turn_has_baseline"]
        value, target = (in_double(torch.where(mask, each, 0)) for each in (values, targets))
        left, error = (
            in_double(torch.where(has_baseline, each, 0))
            for each in (batch["turn_advantages"], batch["turn_returns"] - values)
        )
        shift = left - error  # the value less the group's baseline
        self._add(
            {
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
        )

    def _add(self, sums: Mapping[str, torch.Tensor]) -> None:
        for name, each in sums.items():
            self._sums[name] = self._sums.get(name, 0) + in_double(each)
