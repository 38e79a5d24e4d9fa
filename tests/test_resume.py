"""A run that was stopped and goes on ends where it would have ended, and what is saved is what it should be."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.runs import OneByOne, make_trainer
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers import trainer as transformers_trainer

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import value_head_from_pretrained


EVERYTHING: dict[str, Any] = {
    "advantage_mode": "hybrid",
    "value_warmup_steps": 0,
    "value_learning_rate": 1e-2,
    "learning_rate": 1e-2,
    "beta": 0.05,
    "kl_target": 1e-6,  # so that the weight of the KL term moves
    "ref_sync": "ema",
    "ref_sync_steps": 1,
    "ref_ema_decay": 0.5,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 3,
}
LORA = LoraConfig(r=4, target_modules="all-linear")


class Stop(TrainerCallback):
    """Ends a run after some steps, as if it had been interrupted."""

    def __init__(self, after: int) -> None:
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == self._after


def train(folder: Path, model: str, stop_after: int | None = None, resume: bool = False, **changes: Any) -> Any:
    callbacks = None if stop_after is None else [Stop(stop_after)]
    with make_trainer(folder, model, OneByOne, callbacks=callbacks, **{**EVERYTHING, **changes}) as trainer:
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer: MCPGRPOTrainer) -> dict[str, torch.Tensor]:
    """Those of the policy, the value head and the reference."""
    found = dict(trainer.model.named_parameters())
    if trainer.ref_model is not None:
        found |= {f"reference.{name}": p for name, p in trainer.ref_model.named_parameters()}
    return found


@pytest.mark.parametrize(
    ("stop_after", "changes"),
    [
        (1, {"peft_config": LORA}),
        pytest.param(2, {}, marks=pytest.mark.slow),
        (1, {"peft_config": LORA, "num_iterations": 2}),  # in the middle of a batch
        pytest.param(2, {"peft_config": LORA, "num_iterations": 2, "dynamic_sampling": 1}, marks=pytest.mark.slow),
    ],
    ids=["adapter", "full weights", "within a batch", "between batches"],
)
def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(
    tmp_path: Path, adding_model: str, stop_after: int, changes: dict[str, Any]
) -> None:
    whole = train(tmp_path / "whole", adding_model, **changes)
    train(tmp_path / "parts", adding_model, stop_after=stop_after, **changes)
    resumed = train(tmp_path / "parts", adding_model, resume=True, **changes)
    assert resumed.state.global_step == whole.state.global_step == 3
    expected, found = weights(whole), weights(resumed)
    assert expected.keys() == found.keys()
    assert any("value_head" in name for name in found)
    assert any("ref" in name for name in found)
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
    assert resumed.beta == whole.beta > 0.05
    assert resumed._critic.state_dict() == whole._critic.state_dict()
    assert resumed._num_rollouts == whole._num_rollouts
    assert resumed._reference.num_syncs == 3


def test_a_checkpoint_holds_the_adapter_and_beside_it_the_value_head_and_the_reference(
    tmp_path: Path, adding_model: str
) -> None:
    trainer = train(tmp_path, adding_model, peft_config=LORA, max_steps=1)
    folder = tmp_path / "checkpoint-1"
    assert not (folder / "ref").exists()
    assert not any("ref" in name or "value_head" in name for name in load_file(folder / "adapter_model.safetensors"))
    assert {"value_head.safetensors", "reference.safetensors"} <= {file.name for file in folder.iterdir()}
    loaded = value_head_from_pretrained(AutoModelForCausalLM.from_pretrained(adding_model), folder)
    for name, weight in trainer._critic.head.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert any(weight.abs().max() > 0 for weight in loaded.state_dict().values())


def test_full_weights_are_saved_without_the_value_head(tmp_path: Path, adding_model: str) -> None:
    trainer = train(tmp_path, adding_model, max_steps=1)
    trainer.save_model()
    assert not any("value_head" in name for name in load_file(tmp_path / "model.safetensors"))
    assert (tmp_path / "value_head.safetensors").exists()
    AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("asked", [False, True])
def test_the_value_head_is_pushed_only_if_asked_for(
    tmp_path: Path, adding_model: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: set[str] = set()

    class Hub:
        def upload_folder(self, folder_path: str, **kwargs: Any) -> None:
            pushed.update(file.name for file in Path(folder_path).iterdir())

    trainer = train(tmp_path, adding_model, peft_config=LORA, max_steps=1, push_value_head=asked)
    trainer.save_model()
    monkeypatch.setattr(transformers_trainer, "hf_api", Hub)
    trainer.hub_model_id = "somebody/sums"
    trainer.push_to_hub()
    assert "adapter_model.safetensors" in pushed
    assert ("value_head.safetensors" in pushed) == asked
    assert (tmp_path / "value_head.safetensors").exists()
