"""Which solutions are imitated, and how."""

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig
from transformers import Qwen3Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import SFTTrainer

from mcp_grpo.environments import function_server
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.imitation import Imitation, WarmupConfig, conversations


def test_an_environment_judges_its_solutions_itself() -> None:
    rows: list[dict[str, Any]] = [  # without an answer or a state, as benchmarks with a check of their own have them
        {"task_id": name, "prompt": "Go on.", "solution": {"steps": [], "final": name}} for name in ("right", "wrong")
    ]
    servers = {"none": lambda task: function_server("none", [], lambda *_: "")}
    found = conversations(tasks_from_rows(rows), servers, is_success=lambda trajectory: trajectory.answer == "right")
    assert [task.task_id for task, _ in found] == ["right"]


def solutions(prompt: str, tokenizer: Any) -> Dataset:
    """Conversations that begin alike, those of a task also in what has labels; parts without labels are between."""
    rows = []
    for i, size in enumerate((3, 9, 1, 6, 2, 12, 7, 4)):
        ids = tokenizer(f"{prompt} Task {i // 2} of four, which two begin with: " + "go " * (i // 2)).input_ids
        labels = [-100] * len(ids)
        for written, told in ((size, 5), (2, 0)):
            ids += [(7 * (i // 2) + j) % 90 for j in range(written + told)]
            labels += ids[len(ids) - written - told : len(ids) - told] + [-100] * told
        rows.append({"input_ids": ids, "labels": labels})
    return Dataset.from_list(rows)


def with_experts(config: Qwen3Config) -> Qwen3MoeForCausalLM:
    """A model of the same size with four experts, whose load TRL balances."""
    torch.manual_seed(0)
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "router_aux_loss_coef": 0.1}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config.to_dict(), **experts}))


def imitated(
    folder: Path, adapter: LoraConfig | None, kind: type[SFTTrainer] = Imitation, **changes: Any
) -> tuple[list[Any], dict[str, Any], int]:
    """Imitate for three updates; return what was logged, the weights, and how many tokens the model was run on."""
    tokenizer = family_tokenizer("qwen3")
    torch.manual_seed(0)
    shape = changes.pop("shape", {})
    model = tiny_model(tokenizer, attention_dropout=changes.pop("attention_dropout", 0.0), **shape)
    if changes.pop("has_experts", False):
        model = with_experts(model.config)
    num_tokens = 0

    def count(module: Any, given: Any) -> None:
        nonlocal num_tokens
        num_tokens += given[0].numel() * torch.is_grad_enabled()  # not in the trial

    model.get_input_embeddings().register_forward_pre_hook(count)
    settings = {
        "max_steps": 3,
        "learning_rate": 1e-2,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
    }
    settings |= {"gradient_checkpointing": False, "logging_steps": 1, "save_strategy": "no", "report_to": "none"}
    config = WarmupConfig(output_dir=str(folder), use_cpu=True, **(settings | changes))
    data = solutions("What all of them know: " + "these are the tools. " * 6, tokenizer)
    trainer = kind(model, config, train_dataset=data, processing_class=tokenizer, peft_config=adapter)
    trainer.train()
    names = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "num_tokens")
    logged = [[entry[name] for name in names] for entry in trainer.state.log_history if "loss" in entry]
    return logged, {name: each.detach() for name, each in trainer.model.named_parameters()}, num_tokens


@pytest.mark.parametrize(
    ("adapter", "changes"),
    [
        (None, {}),
        (LoraConfig(r=4, target_modules="all-linear"), {}),
        (None, {"gradient_checkpointing": True}),
        (None, {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}),
        (None, {"loss_type": "dft"}),
    ],
    ids=["all weights", "adapter", "checkpointing", "reentrant checkpointing", "dft"],
)
def test_what_solutions_begin_with_is_run_once_and_teaches_the_same(
    tmp_path: Path, adapter: LoraConfig | None, changes: dict[str, Any]
) -> None:
    logged, weights, num_tokens = imitated(tmp_path, adapter, **changes)
    expected, expected_weights, num_padded = imitated(tmp_path, adapter, SFTTrainer, **changes)
    assert len(logged) == 3
    assert all(entry[1] > 1e-3 for entry in expected)
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)
    assert num_tokens < 0.6 * num_padded


@pytest.mark.filterwarnings("ignore:.label_smoothing_factor. is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attention_dropout": 0.1}, "attention has dropout"),
        ({"lora_dropout": 0.1}, "Set `lora_dropout` to 0"),
        ({"neftune_noise_alpha": 5.0}, "`neftune_noise_alpha` is set"),
        ({"has_experts": True}, "Set `router_aux_loss_coef` to 0"),
        ({"label_smoothing_factor": 0.1}, None),
        ({"pad_to_multiple_of": 64}, None),
    ],
)
def test_solutions_are_imitated_one_by_one_where_they_cannot_share(
    tmp_path: Path, changes: dict[str, Any], said: str | None, caplog: Any
) -> None:
    adapter = LoraConfig(r=4, lora_dropout=changes.pop("lora_dropout")) if "lora_dropout" in changes else None
    logged, weights, num_tokens = imitated(tmp_path, adapter, **dict(changes))
    told = [record.getMessage() for record in caplog.records if "by itself" in record.getMessage()]
    assert len(told) == (said is not None)
    assert all(str(said) in each for each in told)
    expected, expected_weights, num_padded = imitated(tmp_path, adapter, SFTTrainer, **dict(changes))
    assert num_tokens == num_padded
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)


def test_solutions_share_where_the_load_of_experts_is_not_balanced(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"has_experts": True, "router_aux_loss_coef": 0.0}
    logged, weights, num_tokens = imitated(tmp_path, None, **settings)
    expected, expected_weights, num_padded = imitated(tmp_path, None, SFTTrainer, **settings)
    assert num_tokens < 0.8 * num_padded
    torch.testing.assert_close(torch.tensor(logged), torch.tensor(expected), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-3, atol=1e-4)


def test_the_trial_goes_by_the_type_that_is_computed_in(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 12, "hidden_size": 256, "intermediate_size": 512}
    _, _, num_tokens = imitated(tmp_path, None, bf16=True, max_steps=1, shape=shape)
    _, _, num_alone = imitated(tmp_path, None, bf16=True, max_steps=1, shape=shape, neftune_noise_alpha=1e-9)
    assert num_tokens < 0.6 * num_alone
