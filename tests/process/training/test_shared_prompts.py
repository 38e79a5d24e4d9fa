"""Passes in which each prompt is run once: loss and gradients are those of rows, up to rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.marks import full
from helpers.runs import RELYING_AT_ONCE, make_trainer
from peft import LoraConfig

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import PromptSharing


class Twice(MCPGRPOTrainer):
    """Runs each pass on rows and with prompts shared, and compares."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.num_compared = {"loss": 0, "scoring": 0, "reference": 0}
        self.num_shared = 0
        self.is_in_loss = False
        for model in filter(None, (self.model, self.ref_model)):
            model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, _: Any, args: Any, kwargs: Any) -> None:
        self.num_shared += "prompt_tree" in kwargs

    def both_ways(self, run: Any) -> Any:
        found = []
        for is_wanted in (False, True):
            self._sharing = PromptSharing(is_wanted)
            assert self._shares_prompts(self.model) == is_wanted
            before = self.num_shared
            found.append(run())
            assert (self.num_shared > before) == is_wanted
        torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-3)
        return found[1]

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        def run() -> Any:
            self.model.zero_grad()
            loss = super(Twice, self)._compute_loss(model, inputs)
            loss.backward()
            gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
            self.sizes = {name: gradient.abs().sum().item() for name, gradient in gradients.items()}
            return loss.detach(), gradients

        self.is_in_loss = True
        self.both_ways(run)
        self.num_compared["loss"] += sum(self.sizes.values()) > 0
        loss = super()._compute_loss(model, inputs)
        self.is_in_loss = False
        self.model.zero_grad()
        return loss

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        def run() -> Any:
            self._records_values = records
            return super(Twice, self)._get_per_token_logps_and_entropies(model, *args, **kwargs)

        records = self._records_values
        if self.is_in_loss:
            return run()
        self.num_compared["scoring" if model is self.model else "reference"] += 1
        return self.both_ways(run)


def rewards_by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(place % 3) for place in range(len(completions))]


ADAPTER = LoraConfig(r=4, target_modules="all-linear")
MASK = {"schema_mask": "syntax", "schema_mask_min_prob": 0.0, "min_unforced_tokens": 0, "min_unforced_fraction": 0.0}
EVERYTHING = {
    "per_device_train_batch_size": 4,  # half a group
    "gradient_accumulation_steps": 4,
    "num_iterations": 2,
    "beta": 0.1,
    "kl_hard_cap": None,
    "old_logps": "trainer",
    "ref_sync": "ema",
    "advantage_mode": "hybrid",
    "constants": RELYING_AT_ONCE,
    "peft_config": ADAPTER,
    **MASK,
}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"gradient_checkpointing": True}, {"loss": 2}),
        (EVERYTHING, {"loss": 4, "scoring": 2}),
        full({"per_device_train_batch_size": 16, "gradient_accumulation_steps": 1, "loss_type": "bnpo"}, {"loss": 1}),
        ({"beta": 0.1}, {"loss": 2, "reference": 1}),
    ],
    ids=["checkpointing", "half a group a pass, with everything", "two groups a pass", "another model as reference"],
)
def test_loss_and_gradients_of_passes_are_those_of_rows(
    tmp_path: Path, adding_model: str, changes: dict[str, Any], expected: dict[str, int]
) -> None:
    settings: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "max_steps": 1,
        "max_completion_length": 150,
        "reward": rewards_by_place,
    }
    with make_trainer(tmp_path, adding_model, Twice, **{**settings, **changes}) as trainer:
        trainer.train()
    assert trainer.num_compared == {"loss": 0, "scoring": 0, "reference": 0} | expected
