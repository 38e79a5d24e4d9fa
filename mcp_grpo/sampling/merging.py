"""Merge an adapter into copies of the weights below it, one layer at a time."""

from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer


_ROWS = "trainable_tokens_delta"


class Merged:
    """
    The weights of a model with its adapter merged into them.

    The model's own weights stay as they are. Merged and unmerged in place, they would be rounded each time, and drift.

    Args:
        model (`PeftModel`):
            The policy.

    Attributes:
        rounded_away (`float`, *optional*):
            Share of the adapter's change, as a norm over all layers, that the last merge lost to rounding. Weights of 16 bits
            do not hold a change of less than half of their last digit, so that early in training it may be nearly all.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.rounded_away: float | None = None

    def weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> Generator[tuple[str, torch.Tensor]]:
        """Yield named weights of the model as they come, those below an adapter merged with it."""
        layers: dict[int, Any] = {}
        for layer in self._model.modules():
            weight: Any = (
                getattr(layer.get_base_layer(), "weight", None) if isinstance(layer, BaseTunerLayer) else None
            )
            if weight is not None:
                layers.setdefault(weight.data_ptr(), layer)  # two may share one weight
        changes: list[torch.Tensor] = []
        for full_name, value in named:
            if _ROWS in full_name:
                continue  # they come with the embedding they are rows of
            name = full_name.replace(".token_adapter", "")
            layer = layers.get(value.data_ptr())
            if layer is None:
                yield name, value
                continue
            merged = _merged(layer)
            if isinstance(getattr(layer, "lora_A", None), torch.nn.ModuleDict):
                change = torch.stack([layer.get_delta_weight(each).float() for each in layer.active_adapters]).sum(
                    dim=0
                )
                error = merged.float() - value.float() - change
                changes.append(torch.stack([error.square().sum(), change.square().sum()]))
            yield name, merged
        if changes:
            error, change = torch.stack(changes).sum(dim=0).sqrt().tolist()
            self.rounded_away = error / change if change else 0.0


@contextmanager
def not_merging(model: Any) -> Generator[None]:
    """Let a model's `merge_adapter` and `unmerge_adapter` do nothing while active."""
    model.merge_adapter = model.unmerge_adapter = lambda *args, **kwargs: None
    try:
        yield
    finally:
        del model.merge_adapter, model.unmerge_adapter


@torch.no_grad()
def _merged(layer: Any) -> torch.Tensor:
    """Return the weight below an adapter, merged with it, and leave the layer as it was."""
    base = layer.get_base_layer()
    kept = base.weight.data
    base.weight.data = kept.clone()
    try:
        layer.merge()
        return base.weight.data
    finally:
        base.weight.data = kept
        layer.merged_adapters.clear()
