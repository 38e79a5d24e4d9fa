"""
With no servers it is `GRPOTrainer`: the same loss and the same gradients, bit by bit. With servers, what has nothing to do changes
no bit, either.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.marks import full
from helpers.policies import tiny_model
from helpers.runs import BRIEF, OneByOne, make_trainer
from helpers.sums import ROWS
from peft import LoraConfig
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
from mcp_grpo.learning import ValueEstimator, ValueRecorder, add_value_head


class _Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


def _count_vowels(completions: list, **kwargs: Any) -> list[float]:
    return [float(sum(completion[0]["content"].count(v) for v in "aeiou") % 7) for completion in completions]


def _train(trainer_class: type, config_class: type, folder: Path, lora: bool, settings: dict) -> tuple[list, list]:
    tokenizer = family_tokenizer("qwen3")
    model = tiny_model(tokenizer)
    dataset = Dataset.from_list(
        [
            {"prompt": [{"role": "user", "content": f"Say the word {word}."}]}
            for word in ("red", "green", "blue", "grey")
        ]
    )
    args = config_class(
        output_dir=str(folder),
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=12,
        max_steps=3,
        learning_rate=1e-2,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        seed=7,
        **settings,
    )
    gradients = _Gradients()
    trainer = trainer_class(
        model=model,
        reward_funcs=_count_vowels,
        args=args,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[gradients],
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if lora else None,
    )
    if lora:  # with B at zero, A has no gradient in the first step
        torch.manual_seed(1)
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, gradients.steps


@pytest.mark.parametrize(
    ("lora", "num_iterations"),
    [
        pytest.param(False, 1, id="full-1"),
        pytest.param(True, 2, id="lora-2"),
        full(False, 2, id="full-2"),
        full(True, 1, id="lora-1"),
    ],
)
@pytest.mark.parametrize("loss_type", ["dapo", full("grpo")])
def test_without_servers_losses_and_gradients_are_those_of_trl(
    tmp_path: Path, lora: bool, num_iterations: int, loss_type: str
) -> None:
    settings = {"num_iterations": num_iterations, "beta": 0.0, "loss_type": loss_type}
    expected_losses, expected = _train(GRPOTrainer, GRPOConfig, tmp_path / "trl", lora, settings)
    losses, gradients = _train(MCPGRPOTrainer, MCPGRPOConfig, tmp_path / "ours", lora, settings)
    assert losses == expected_losses
    assert len(gradients) == len(expected) == 3
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert sum(gradient.abs().sum() for gradient in theirs.values()) > 0


@pytest.mark.parametrize(
    "loss_type", ["dapo", *map(full, ["grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo"])]
)
def test_a_value_head_that_only_looks_on_leaves_the_policy_s_gradients_those_of_trl(
    tmp_path: Path, loss_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LooksOn(ValueEstimator):
        def settle(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return {}

        def loss(self, batch: Any, recorder: ValueRecorder, *args: Any, **kwargs: Any) -> torch.Tensor:
            return (recorder.values() - 1).square().mean()

    class Watched(MCPGRPOTrainer):
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return super()._generate_and_score_completions(inputs) | {"num_turns": torch.tensor(1.0)}

    monkeypatch.setattr(
        "mcp_grpo.trainer.make_value_estimator",
        lambda args, policy, gamma: LooksOn(add_value_head(policy), mode="gae", gamma=1.0, lam=1.0),
    )
    # An update over weights that differ by the value head's own: gradients after the first step would show any leak.
    settings = {"beta": 0.1, "loss_type": loss_type, "num_iterations": 2}
    _, expected = _train(GRPOTrainer, GRPOConfig, tmp_path / "trl", True, settings)
    _, gradients = _train(Watched, MCPGRPOConfig, tmp_path / "ours", True, settings)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        assert ours.keys() - theirs.keys() == {name for name in ours if "value_head" in name} != set()


# Mechanisms that are on by default, and have nothing to do in a short run on-policy whose rewards are of whole trajectories.
INERT = {
    "ratio_gate": 1e9,
    "kl_target": None,
    "kl_hard_cap": None,
    "record_trajectories": False,
    "keep_best": False,
    "advantage_mode": "group",
}


def _with_servers(folder: Path, policy: str, **changes: Any) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Train two steps with servers in this process and a reference, and evaluate; return losses and gradients."""
    gradients = _Gradients()
    settings = BRIEF | {"max_concurrent_trajectories": 1, "seed": 7, "beta": 0.1, "num_generations_eval": 2}
    settings |= {"num_generations": 4, "per_device_train_batch_size": 4}
    settings |= {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2} | changes
    with make_trainer(folder, policy, OneByOne, callbacks=[gradients], eval_rows=ROWS[:1], **settings) as trainer:
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, gradients.steps


@pytest.fixture(scope="module")
def by_default(tmp_path_factory: pytest.TempPathFactory, adding_model: str) -> Any:
    return _with_servers(tmp_path_factory.mktemp("default"), adding_model)


@pytest.mark.parametrize("names", [pytest.param([*INERT], id="all"), *(full([name], id=name) for name in INERT)])
def test_with_servers_what_has_nothing_to_do_changes_no_bit(
    tmp_path: Path, adding_model: str, by_default: Any, names: list[str]
) -> None:
    expected_losses, expected = by_default
    losses, gradients = _with_servers(tmp_path, adding_model, **{name: INERT[name] for name in names})
    assert losses == expected_losses
    assert len(gradients) == len(expected) == 2
    for ours, theirs in zip(gradients, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[each], theirs[each]) for each in theirs)
    assert all(sum(gradient.abs().sum() for gradient in step.values()) > 0 for step in expected)
