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


@pytest.fixture(autouse=True)
def joining(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let passes be joined."""
    monkeypatch.setattr("mcp_grpo.learning.checkpointing.JOIN_PASSES", True)


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


class Growing(Memory):
    """Memory that each pass takes something of."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self._taken = 0

    def taken(self, device: torch.device) -> int:
        self._taken += 1000
        return self._taken


class Joined(MCPGRPOTrainer):
    """Has memory for passes that several became; computes the loss of each also as that of several, and compares."""

    def _add_parts(self) -> None:
        super()._add_parts()
        self._checkpointing = Checkpointing(is_possible=True, memory=Growing(10**12))
        self.num_rows: list[int] = []

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        self.num_rows.append(len(inputs["prompt_ids"]) if inputs else 0)
        num, index = self._num_joined, self._step % len(self._buffered_inputs)
        if not inputs or num == 1:
            return super()._compute_loss(model, inputs)
        together = self.learnt(model, [inputs])
        self._num_joined = 1
        apart = self.learnt(model, self._buffered_inputs[index + 1 - num : index + 1])
        self._num_joined = num
        assert sum(gradient.abs().sum() for gradient in apart[1].values()) > 0
        torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-3)
        return super()._compute_loss(model, inputs)

    def learnt(self, model: Any, passes: list[Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss and the gradients of some passes."""
        self.model.zero_grad()
        losses = []
        for inputs in passes:
            losses.append(super()._compute_loss(model, inputs))
            losses[-1].backward()
        gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
        self.model.zero_grad()
        return torch.stack(losses).detach().sum(), gradients


EVERYTHING = {
    "advantage_mode": "hybrid",
    "beta": 0.1,
    "kl_hard_cap": None,
    "num_iterations": 2,
    "old_logps": "trainer",
    "gradient_checkpointing": False,
    "schema_mask": "syntax",
    "constants": RELYING_AT_ONCE,
    "peft_config": LoraConfig(r=4, target_modules="all-linear"),
}


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "grpo", **EVERYTHING},
        full({"loss_type": "dapo"}),
        *(full({"loss_type": name, **EVERYTHING}) for name in ("dapo", "dr_grpo", "sapo", "cispo", "vespo", "luspo")),
    ],
    ids=lambda changes: "-".join([changes["loss_type"], *(["everything"] if "beta" in changes else [])]),
)
@pytest.mark.full
def test_an_update_is_the_same_if_passes_become_one(
    tmp_path: Path, adding_model: str, changes: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "gradient_checkpointing": True,
        "max_steps": 2 * changes.get("num_iterations", 1),
        "max_completion_length": 150,
        "reward": rewards_by_place,
    }
    with make_trainer(tmp_path, adding_model, Joined, **{**settings, **changes}) as trainer:
        trainer.train()
    # What a token takes is known only after the first batch.
    num_iterations = changes.get("num_iterations", 1)
    assert trainer.num_rows == num_iterations * [4, 4, 4, 4] + num_iterations * [0, 0, 0, 16]
