"""Sampling on a CPU from a cache that has once what all rows begin with: the same policy, and only where a model can."""

from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from mcp_grpo.sampling import shared_prefix
from mcp_grpo.sampling.shared_prefix import SharedPrefixCache, shared_cache, shares_prefix


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "initializer_range": 0.2,
}
SHARED = 40


def llama(**settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **settings})).eval()


MODELS = {
    "Llama": llama,
    "Llama, a key for each head": lambda: llama(num_key_value_heads=4),
    "Qwen3": lambda: tiny_model(family_tokenizer("qwen3")),
    "Qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)).eval(),
}


def rows_with_padding() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows with the same beginning, and then padding of 0, 3 and 9 columns."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(200, (3, SHARED + 100), generator=generator)
    ids[:, :SHARED] = ids[0, :SHARED]
    mask = torch.ones_like(ids)
    for row, width in enumerate((0, 3, 9)):
        mask[row, SHARED : SHARED + width] = 0
    return ids, mask


@torch.no_grad()
def logits_with(model: Any, ids: torch.Tensor, mask: torch.Tensor, steps: list[int]) -> torch.Tensor:
    """Logits of the last column of each step, with the cache."""
    cache, start, found = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])), SHARED, []
    positions = mask.cumsum(-1) - 1
    with cache.attending(model):
        for step in steps:
            end = start + step
            output = model(
                input_ids=ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                past_key_values=cache,
                use_cache=True,
            )
            found.append(output.logits[:, -1])
            start = end
    return torch.stack(found, dim=1)


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_logits_are_those_of_rows_without_a_cache(name: str) -> None:
    model = MODELS[name]()
    ids, mask = rows_with_padding()
    steps = [12, 5, *[1] * 83]  # more than the first place of the rows' own keys has room for
    found = logits_with(model, ids, mask, steps)
    expected = model(input_ids=ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
    columns = torch.tensor(steps).cumsum(0) + SHARED - 1
    assert expected.std() > 0.1
    assert torch.allclose(found, expected[:, columns], atol=2e-5)


@torch.no_grad()
def test_without_padding_a_row_sees_its_own_past_alone() -> None:
    model = llama()
    ids, mask = rows_with_padding()
    mask[:] = 1
    found = logits_with(model, ids, mask, [12, 1])
    expected = model(input_ids=ids[:, : SHARED + 13]).logits[:, [-2, -1]]
    assert torch.allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize("name", MODELS)
def test_what_all_rows_begin_with_is_kept_once(name: str) -> None:
    model = MODELS[name]()
    ids, _ = rows_with_padding()
    cache = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED]))
    new = torch.zeros(3, cache.layers[0].shared[0].size(1), 7, cache.layers[0].shared[0].size(3))
    keys, _ = cache.layers[0].update(new, new)
    assert cache.layers[0].shared[0].shape[0] == 1
    assert keys.shape == new.shape
    assert cache.get_seq_length() == SHARED + 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_that_attend_fully_can(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype)
    was = model.config._attn_implementation
    assert shares_prefix(model)
    assert model.config._attn_implementation == was


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(
            lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=8)).eval(), id="a window, of all layers"
        ),
        pytest.param(
            lambda: Qwen2ForCausalLM(
                Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=8, max_window_layers=1)
            ).eval(),
            id="a window, of some layers",
        ),
        pytest.param(
            lambda: MambaForCausalLM(
                MambaConfig(vocab_size=300, hidden_size=16, state_size=4, num_hidden_layers=2)
            ).eval(),
            id="a state instead of keys",
        ),
        pytest.param(lambda: llama(attn_implementation="eager"), id="attention that cannot be replaced"),
        pytest.param(lambda: llama(attention_dropout=0.1), id="dropout"),
    ],
)
def test_models_that_attend_otherwise_cannot(model: Any) -> None:
    assert not shares_prefix(model())


@pytest.mark.parametrize("wrong", ["values", "error"])
def test_a_model_that_says_something_else_with_it_cannot(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, right = llama(), SharedPrefixCache.attend

    def attend(self: Any, layer: int, query: torch.Tensor, *args: Any) -> torch.Tensor:
        if wrong == "error":
            raise RuntimeError("no such kernel")
        return right(self, layer, -query, *args)

    monkeypatch.setattr(SharedPrefixCache, "attend", attend)
    assert not shares_prefix(model)
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(shared_prefix, "_trial", lambda model: not tried.append(model))
    model = llama()
    assert shares_prefix(model)
    assert shares_prefix(model)
    assert len(tried) == 1
