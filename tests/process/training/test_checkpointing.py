"""Passes of a run that keep their activations, where memory allows it: losses and gradients are the same to the bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import RELYING_AT_ONCE, make_trainer
from peft import LoraConfig

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import Checkpointing
from mcp_grpo.learning.checkpointing import DeviceMemory


class Memory(DeviceMemory):
    """Memory of a device that is not here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def free(self, device: torch.device) -> int:
        return self._size


class Twice(MCPGRPOTrainer):
    """Computes each loss with little and with plenty of memory, and compares."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_layers, self.num_shared, self.times = 0, 0, []
        layers = self.accelerator.unwrap_model(self.model).get_decoder().layers
        layers[0].register_forward_pre_hook(self.count)
        self.model.register_forward_pre_hook(self.note, with_kwargs=True)

    def count(self, *_: Any) -> None:
        self.num_layers += 1

    def note(self, _: Any, args: Any, kwargs: Any) -> None:
        self.num_shared += "prompt_tree" in kwargs

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        found = []
        for size in (10**3, 10**12):
            self._checkpointing = Checkpointing(is_possible=True, memory=Memory(size))
            self.model.zero_grad()
            before = self.num_layers
            loss = super()._compute_loss(model, inputs)
            loss.backward()
            self.times.append(self.num_layers - before)
            gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
            found.append([loss.detach(), *(gradient.clone() for gradient in gradients)])
        assert sum(gradient.abs().sum() for gradient in found[0][1:]) > 0
        assert all(torch.equal(*each) for each in zip(*found, strict=True))
        self.model.zero_grad()
        return super()._compute_loss(model, inputs)


def rewards_by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(place % 3) for place in range(len(completions))]


VALUES = {"advantage_mode": "hybrid", "constants": RELYING_AT_ONCE}
BY_ROW = {"mcp_grpo.learning.shared_prompts.SHARE_PROMPTS": False}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"peft_config": LoraConfig(r=4, target_modules="all-linear"), "beta": 0.1, "kl_hard_cap": None, **VALUES},
            [2, 1],
        ),
        full({"constants": BY_ROW}, [2, 1]),
        full({"gradient_checkpointing": False}, [1, 1]),
    ],
    ids=["adapter, value head, shared prompts", "all weights, rows", "no checkpointing"],
)
def test_losses_and_gradients_do_not_depend_on_memory(
    tmp_path: Path, adding_model: str, changes: dict[str, Any], expected: list[int]
) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": True,
        "max_steps": 1,
        "max_completion_length": 150,
        "reward": rewards_by_place,
    }
    with make_trainer(tmp_path, adding_model, Twice, **{**settings, **changes}) as trainer:
        trainer.train()
    assert trainer.times == 2 * expected
    assert bool(trainer.num_shared) == (changes.get("constants") is not BY_ROW)
