"""Passes in which each prompt is run once: loss and gradients are those of rows, up to rounding."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.both_ways import Twice, rewards_by_place
from helpers.extras import needs, with_extras
from helpers.marks import full
from helpers.ranks import SCRIPTS
from helpers.runs import RELYING_AT_ONCE, OneByOne, make_trainer
from helpers.sums import ROWS
from peft import LoraConfig


ADAPTER = LoraConfig(r=4, target_modules="all-linear")
MASK = {"schema_mask": "syntax", "schema_mask_min_prob": 0.0, "min_unforced_fraction": 0.0}
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
OTHER_PROMPTS = [{**row, "prompt": f"{number} {'and one more ' * 4}2+3?"} for number, row in enumerate(ROWS)]


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
    assert trainer.depth == 1


def test_different_tasks_of_a_pass_share_their_tools_and_each_its_prompt(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(
        tmp_path,
        adding_model,
        Twice,
        reward=rewards_by_place,
        rows=OTHER_PROMPTS,
        per_device_train_batch_size=16,
        gradient_checkpointing=False,
        max_steps=1,
        max_completion_length=40,
        temperature=1.5,
    ) as trainer:
        trainer.train()
    assert trainer.num_compared["loss"] == 1
    assert sum(trainer.sizes.values()) > 1
    assert trainer.depth == 2


class Noting(OneByOne):
    """Notes how many passes had a tree of prompts."""

    num_shared = 0

    def note(self, _: Any, args: Any, kwargs: Any) -> None:
        self.num_shared += "prompt_tree" in kwargs


@pytest.mark.full
def test_updates_with_accumulated_gradients_are_those_of_rows(tmp_path: Path, adding_model: str) -> None:
    found = []
    for shares in (True, False):
        with make_trainer(
            tmp_path / str(shares),
            adding_model,
            Noting,
            reward=rewards_by_place,
            rows=OTHER_PROMPTS,
            constants={"mcp_grpo.learning.shared_prompts.SHARE_PROMPTS": shares},
            gradient_accumulation_steps=4,
            per_device_train_batch_size=4,
            max_completion_length=40,
            temperature=1.5,
            optim="sgd",  # with Adam, where a gradient is zero, rounding is all that counts
            learning_rate=0.01,
        ) as trainer:
            trainer.model.register_forward_pre_hook(trainer.note, with_kwargs=True)
            before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
            trainer.train()
        assert (trainer.num_shared > 0) == shares
        steps = [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]
        assert len(steps) == 2
        assert all(norm > 1e-3 for _, norm in steps), steps
        weights = trainer.model.named_parameters()
        found.append((steps, {name: weight.detach() - before[name] for name, weight in weights}))
    shared, rows = found
    assert any(update.abs().max() > 1e-4 for update in rows[1].values())
    torch.testing.assert_close(shared, rows, atol=1e-7, rtol=1e-3)


@pytest.mark.full
@needs("bitsandbytes")
def test_an_adapter_on_weights_in_4_bits_learns_what_it_learns_from_rows(tmp_path: Path, adding_model: str) -> None:
    command = [sys.executable, str(SCRIPTS / "share_quantized.py"), adding_model, str(tmp_path)]
    done = subprocess.run(command, env=with_extras(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said.pop("gradients") > 0.1
    assert said == {"kinds": ["Linear4bit"], "compared": {"loss": 2, "scoring": 1, "reference": 0}}
