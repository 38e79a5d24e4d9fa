"""An adapter is merged beside the weights below it: they stay as they are, to the bit, and what rounding takes is known."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model

from mcp_grpo.sampling.merging import Merged, not_merging
from mcp_grpo.sampling.vllm_backend import chosen_weight_sync
from mcp_grpo.trl_compat import VLLMGeneration


def policy(size: float, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """A tiny model with an adapter in float32 that changes its weights by about `size`."""
    model = tiny_model(family_tokenizer("qwen3")).to(dtype)
    adapted: Any = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", **settings))
    torch.manual_seed(1)
    for name, weight in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=size)
    return adapted


def named(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, weight.data) for name, weight in model.named_parameters() if "lora" not in name]


@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"use_rslora": True}], ids=["lora", "dora", "rslora"])
def test_weights_are_merged_as_peft_merges_them(settings: dict[str, Any]) -> None:
    model = policy(0.1, torch.float32, **settings)
    found = dict(Merged(model).weights(named(model)))
    model.merge_adapter()
    expected = dict(named(model))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("is_tied", [True, False])
def test_rows_of_embeddings_that_are_trained_are_merged_too(is_tied: bool) -> None:
    tokenizer = family_tokenizer("qwen3")
    rows: Any = [3, 4] if is_tied else {"embed_tokens": [3, 4], "lm_head": [3, 5]}
    model: Any = get_peft_model(
        tiny_model(tokenizer, tie_word_embeddings=is_tied),
        LoraConfig(r=4, target_modules="all-linear", trainable_token_indices=rows, init_lora_weights=False),
    )
    for name, weight in model.named_parameters():
        if "trainable_tokens" in name:
            torch.nn.init.normal_(weight)
    backend = SimpleNamespace(
        model=model,
        _dist=SimpleNamespace(gather_params=lambda weights: nullcontext(), is_fsdp=False),
        _fix_param_name_to_vllm=lambda name, extra_prefixes: name,
    )
    with not_merging(model):
        found = dict(Merged(model).weights(VLLMGeneration._iter_named_params(cast("Any", backend))))
    whole = model.merge_and_unload()
    expected = dict(whole.named_parameters())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_the_weights_below_stay_as_they_are_to_the_bit() -> None:
    model = policy(0.01)
    before = {name: weight.clone() for name, weight in named(model)}
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        logits = model(ids).logits
    for _ in range(20):
        list(Merged(model).weights(named(model)))
    assert all(torch.equal(weight, before[name]) for name, weight in named(model))
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits)  # the adapter is applied as before
    for _ in range(20):  # which is not so in place
        model.merge_adapter()
        model.unmerge_adapter()
    assert not all(torch.equal(weight, before[name]) for name, weight in named(model))


def test_what_rounding_takes_is_known() -> None:
    lost = {}
    for size, dtype in ((1e-5, torch.bfloat16), (1e-1, torch.bfloat16), (1e-5, torch.float32)):
        merged = Merged(policy(size, dtype))
        list(merged.weights(named(merged._model)))
        assert merged.rounded_away is not None
        lost[size, dtype] = merged.rounded_away
    assert lost[1e-5, torch.bfloat16] > 0.9
    assert lost[1e-1, torch.bfloat16] < 0.2
    assert lost[1e-5, torch.float32] < 0.01


def test_an_adapter_that_changes_nothing_loses_nothing() -> None:
    merged = Merged(policy(0.0))
    list(merged.weights(named(merged._model)))
    assert merged.rounded_away == 0.0


def test_while_it_must_not_merge_a_model_does_not() -> None:
    model = policy(0.1)
    before = [weight.clone() for _, weight in named(model)]
    with not_merging(model):
        model.merge_adapter()
        assert all(torch.equal(*pair) for pair in zip((weight for _, weight in named(model)), before, strict=True))
        model.unmerge_adapter()
    model.merge_adapter()
    assert not all(torch.equal(*pair) for pair in zip((weight for _, weight in named(model)), before, strict=True))


@pytest.mark.parametrize(
    ("dtype", "mode", "chosen"),
    [
        (torch.bfloat16, "colocate", "adapter"),
        (torch.float32, "colocate", "merge"),
        (torch.float32, "server", "adapter"),
    ],
)
def test_an_adapter_is_merged_only_where_nothing_is_lost(dtype: torch.dtype, mode: str, chosen: str) -> None:
    model = policy(0.1, dtype)
    assert chosen_weight_sync("auto", model, mode) == chosen
    assert chosen_weight_sync("merge", model, mode) == "merge"


def test_what_vllm_cannot_apply_is_merged_whatever_is_lost() -> None:
    assert chosen_weight_sync("auto", policy(0.1, use_dora=True), "colocate") == "merge"
    assert chosen_weight_sync("auto", tiny_model(family_tokenizer("qwen3")).bfloat16(), "colocate") == "merge"
