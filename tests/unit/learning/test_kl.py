"""The weight of the KL term, its cap, and what a policy held by it comes to."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
from mcp_grpo.errors import SettingsError
from mcp_grpo.learning.kl import KLControl, capped_reference, per_token_kl


@pytest.mark.parametrize(
    ("kls", "betas"),
    [
        ([0.44, 0.44], [0.0505, 0.051005]),  # 10 % over: by a tenth of that
        ([0.8, 100.0, math.inf], [0.051, 0.05202, 0.0530604]),  # never by more than 2 %
        ([0.4, 0.3, 0.0], [0.05, 0.05, 0.05]),  # never below the start
        ([0.8, 0.36, 0.0], [0.051, 0.05049, 0.05]),  # back to it, and no further
        ([0.8, math.nan, 0.8], [0.051, 0.051, 0.05202]),
    ],
)
def test_the_weight_follows_the_table(kls: list[float], betas: list[float]) -> None:
    control = KLControl(0.05)
    for kl, beta in zip(kls, betas, strict=True):
        control.update(kl)
        assert control.beta == pytest.approx(beta, rel=1e-12)


def test_the_weight_stays_between_its_start_and_its_maximum() -> None:
    control = KLControl(0.05, max_beta=0.2)
    rising, falling = [], []
    for kl, betas in ((2.0, rising), (0.0, falling)):
        for _ in range(200):
            control.update(kl)
            betas.append(control.beta)
    assert rising == sorted(rising)
    assert rising[-1] == 0.2
    assert falling == sorted(falling, reverse=True)
    assert falling[-1] == 0.05


def test_a_state_comes_back_within_the_limits_of_now() -> None:
    control = KLControl(0.05)
    for kl in (5.0, 5.0, math.nan):
        control.update(kl)
    for least, most in ((0.05, 1.0), (0.06, 1.0), (0.01, 0.02)):
        new = KLControl(least, max_beta=most)
        new.load_state_dict(control.state_dict())
        assert new.beta == min(max(control.beta, least), most)


@pytest.mark.parametrize(
    "settings",
    [
        *({"beta": 0.0}, {"beta": -0.1}, {"beta": math.nan}, {"target": 0.0}, {"gain": 0.0}),
        *({"beta": 0.3, "max_beta": 0.2}, {"max_beta": math.nan}),
    ],
)
def test_a_control_that_could_reach_zero_or_not_move_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(SettingsError):
        KLControl(**{"beta": 0.05, **settings})


def test_a_capped_reference_is_at_most_the_cap_away_and_bounds_the_kl_term() -> None:
    logps = torch.tensor([[-1.0, -1.0, -30.0, -0.1]], requires_grad=True)
    ref_logps = torch.tensor([[-1.5, -9.0, -1.0, -0.1]])
    capped = capped_reference(logps, ref_logps, 3.0)
    assert not capped.requires_grad
    torch.testing.assert_close(capped, torch.tensor([[-1.5, -4.0, -27.0, -0.1]]))
    kl = per_token_kl(logps, capped)
    assert kl.max() <= math.exp(3) - 3 - 1 + 1e-4
    assert per_token_kl(logps, ref_logps).max() > 1e12
    kl.sum().backward()
    expected = 1 - torch.exp(torch.tensor([[-0.5, -3.0, 3.0, 0.0]]))
    torch.testing.assert_close(logps.grad, expected, atol=1e-4, rtol=1e-4)


ANSWERS = 8
REWARDS = torch.tensor([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 0.5, 0.1])


def _save_bandit(folder: Path) -> str:
    """A model whose whole vocabulary is eight answers and a question."""
    words = [f"a{index}" for index in range(ANSWERS)]
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate([*words, "[?]"])}, "[?]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="a0", pad_token="a0").save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=ANSWERS,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
        initializer_range=0.2,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def _answers(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=torch.tensor([[1]])).logits[0, -1].double().softmax(-1)


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return 0.5 * (one - other).abs().sum().item()


def _with_bias_corrected(start: torch.Tensor, beta: float) -> torch.Tensor:
    """Where reward less `beta` times the KL divergence is highest."""
    weights = start * torch.exp(REWARDS.double() / beta)
    return weights / weights.sum()


def _without(start: torch.Tensor, beta: float) -> torch.Tensor:
    """Where the gradient of the estimate alone comes to rest: `beta * start / (beta - (reward - mean reward))`."""
    rewards = REWARDS.double()
    low, high = rewards.max() - beta, rewards.max()
    for _ in range(100):
        mean = (low + high) / 2
        answers = beta * start / (beta - (rewards - mean))
        low, high = (mean, high) if answers.sum() > 1 else (low, mean)
    return answers


@pytest.mark.full
@pytest.mark.parametrize("is_corrected", [True, False], ids=["corrected", "not corrected"])
def test_only_with_its_bias_corrected_does_the_kl_term_lead_to_the_optimum(tmp_path: Path, is_corrected: bool) -> None:
    beta = 0.3
    trainer = MCPGRPOTrainer(
        model=_save_bandit(tmp_path / "model"),
        reward_funcs=lambda completion_ids, **_: [REWARDS[ids[0]].item() for ids in completion_ids],
        args=MCPGRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            beta=beta,
            use_bias_correction_kl=is_corrected,
            scale_rewards="none",
            per_device_train_batch_size=256,
            num_generations=256,
            max_completion_length=1,
            max_steps=100,
            learning_rate=0.04,
            max_grad_norm=0.0,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            seed=3,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a1"}] * 4),
    )
    start = _answers(trainer.ref_model)
    optimum, elsewhere = _with_bias_corrected(start, beta), _without(start, beta)
    assert _distance(start, optimum) > 0.3
    assert _distance(optimum, elsewhere) > 0.15
    trainer.train()
    assert _distance(_answers(trainer.model), optimum if is_corrected else elsewhere) < 0.02
