"""Tokens that are too far from the sampler: which they are, and that nothing is learnt from them."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mcp_grpo.learning.loss import outside_gate


def test_a_gate_shuts_out_ratios_outside_its_limits_and_those_that_are_no_numbers() -> None:
    ratios = torch.tensor([[0.0, 0.2499, 0.25, 1.0, 4.0, 4.001, 1e30, math.inf, math.nan]])
    logps = ratios.double().log().requires_grad_()
    gated = outside_gate(logps, torch.zeros_like(ratios).double(), 4.0)
    assert gated.tolist() == [[True, True, False, False, False, True, True, True, True]]


def test_a_log_prob_that_the_sampler_did_not_give_is_gated() -> None:
    logps = torch.tensor([[-1.0, -1.0]])
    assert outside_gate(logps, torch.tensor([[math.nan, -1.0]]), 4.0).tolist() == [[True, False]]


class _Steps(TrainerCallback):
    """Keeps the largest gradient of every step."""

    def __init__(self) -> None:
        self.gradients: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        largest = torch.stack([p.grad.abs().max() for p in model.parameters() if p.grad is not None])
        self.gradients.append(largest.max().item())  # NaN if any is


class _Gated(GRPOTrainer):
    """Says that every token was sampled with another probability, and gates the tokens for which that is too far off."""

    shift = 0.0
    keeps_old_logps = False

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        self._captured = dict(inputs)
        return super()._compute_loss(model, self._captured)

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        found = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        logps, inputs = found[0].detach(), self._captured
        old_logps = logps + self.shift
        gated = outside_gate(logps, old_logps, 4.0)
        inputs["advantages"] = inputs["advantages"].unsqueeze(1).expand_as(gated).masked_fill(gated, 0.0)
        inputs["old_per_token_logps"] = old_logps if self.keeps_old_logps else torch.where(gated, logps, old_logps)
        return found


def _gradients(folder: Path, shift: float, max_steps: int = 2, keeps_old_logps: bool = False) -> list[float]:
    tokenizer = family_tokenizer("qwen3")
    steps = _Steps()
    trainer = _Gated(
        model=tiny_model(tokenizer),
        reward_funcs=lambda completions, **_: [float(len(set(text))) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            beta=0.0,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=max_steps,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_list([{"prompt": "Say red."}] * 4),
        processing_class=tokenizer,
        callbacks=[steps],
    )
    trainer.shift, trainer.keeps_old_logps = shift, keeps_old_logps
    trainer.train()
    return steps.gradients


@pytest.mark.parametrize("shift", [math.log(5), -math.log(5), -1000.0, 1000.0, math.nan])
def test_nothing_is_learnt_from_gated_tokens(tmp_path: Path, shift: float) -> None:
    assert _gradients(tmp_path, shift) == [0.0, 0.0]


def test_something_is_learnt_from_tokens_that_are_not_gated(tmp_path: Path) -> None:
    """The control of the test above: as far off as the gate allows."""
    assert min(_gradients(tmp_path, math.log(3.9))) > 0


def test_an_advantage_of_zero_does_not_undo_a_ratio_without_end(tmp_path: Path) -> None:
    """Why the old log-probability of a gated token is replaced, too."""
    (gradient,) = _gradients(tmp_path, -1000.0, max_steps=1, keeps_old_logps=True)
    assert math.isnan(gradient)
