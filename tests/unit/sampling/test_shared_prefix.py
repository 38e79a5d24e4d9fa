"""Sampling on a CPU from a cache that has once what all rows begin with: the same policy, and only where a model can."""

import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from transformers import (
    Gemma3Config,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Qwen2Config,
    Qwen2ForCausalLM,
)
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from mcp_grpo.sampling import shared_prefix
from mcp_grpo.sampling.shared_prefix import SharedPrefixCache, has_lasting_keys, shared_cache, shares_prefix
from mcp_grpo.trl_compat import TREE_ATTENTION, attention_name, use_attention


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
    "Granite, with a scale of its own": lambda: GraniteForCausalLM(
        GraniteConfig(**SIZES, attention_multiplier=0.9)
    ).eval(),
    "Llama, with an adapter": lambda: get_peft_model(
        llama(), LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval(),
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
    steps = [12, *[1] * 88]  # more than the first place of the rows' own keys has room for
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


def test_room_for_more_tokens_does_not_double() -> None:
    model = llama()
    ids, _ = rows_with_padding()
    layer: Any = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])).layers[0]
    new = torch.zeros(3, 2, 1000, 8)
    keys, _ = layer.update(new, new)
    for _ in range(65):
        keys, _ = layer.update(new[:, :, :1], new[:, :, :1])
    assert keys.size(2) == 1065
    assert keys.untyped_storage().nbytes() < 1.3 * keys.numel() * keys.element_size()


def test_what_is_attended_to_in_two_parts_is_kept_in_32_bits() -> None:
    model = llama().to(torch.bfloat16)
    ids, _ = rows_with_padding()
    layer: Any = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])).layers[0]
    new = torch.zeros(3, 2, 4, 8, dtype=torch.bfloat16)
    assert {each.dtype for each in (*layer.shared, *layer.update(new, new))} == {torch.float32}


@torch.no_grad()
def test_only_the_first_pass_may_have_more_than_one_token() -> None:
    with pytest.raises(ValueError, match="only the first pass"):
        logits_with(llama(), *rows_with_padding(), [12, 5])


@torch.no_grad()
def test_padding_may_not_follow_a_row_s_own_tokens() -> None:
    ids, mask = rows_with_padding()
    mask[1, SHARED + 5] = 0
    with pytest.raises(ValueError, match="padding after"):
        logits_with(llama(), ids, mask, [12, 1])


@torch.no_grad()
def test_threads_that_sample_from_one_model_do_not_disturb_each_other() -> None:
    model = llama()
    ids, mask = rows_with_padding()
    new = {"input_ids": ids[:, SHARED : SHARED + 12], "attention_mask": mask[:, : SHARED + 12]}
    new["position_ids"] = (mask.cumsum(-1) - 1)[:, SHARED : SHARED + 12]
    expected = model(ids[:, : SHARED + 12], attention_mask=mask[:, : SHARED + 12]).logits[:1, -1]
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other, ExitStack() as first, ExitStack() as second:
        caches = [SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])) for _ in range(2)]
        one.submit(first.enter_context, caches[0].attending(model)).result()
        other.submit(second.enter_context, caches[1].attending(model)).result()
        plain = model(ids[:1, : SHARED + 12]).logits[:, -1]  # a third thread, which has no cache
        one.submit(first.close).result()
        found = other.submit(model, **new, past_key_values=caches[1], use_cache=True).result().logits[:1, -1]
        assert attention_name(model) == "sdpa"
        assert shares_prefix(model)
        other.submit(second.close).result()
    assert model.config._attn_implementation == "sdpa"
    assert torch.allclose(plain, expected, atol=2e-5)
    assert torch.allclose(found, expected, atol=2e-5)


@torch.no_grad()
def test_while_one_thread_samples_another_may_change_how_the_model_attends() -> None:
    model = llama()
    ids, _ = rows_with_padding()
    cache, used = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])), []

    def attend(*args: Any, **kwargs: Any) -> Any:
        used.append(kwargs.get("prompt_tree"))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](*args)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(1) as other:
        patch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, TREE_ATTENTION, attend)
        with cache.attending(model):
            use_attention(model, TREE_ATTENTION)
            other.submit(model, ids, prompt_tree="a tree").result()
    assert used == ["a tree"] * 2
    assert model.config._attn_implementation == TREE_ATTENTION


def test_afterwards_no_cache_is_left() -> None:
    model = llama()
    ids, _ = rows_with_padding()
    cache = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED]))
    with pytest.raises(KeyboardInterrupt), cache.attending(model):
        raise KeyboardInterrupt
    assert shared_prefix._present.get() is None
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("what", [{"position_bias": torch.zeros(1)}, {"dropout": 0.1}])
def test_what_the_cache_does_not_know_is_refused(what: dict[str, Any]) -> None:
    model = llama()
    ids, _ = rows_with_padding()
    cache, some = SharedPrefixCache(shared_cache(model, ids[:1, :SHARED])), torch.zeros(1, 4, 1, 8)
    attend, attended_to = ALL_ATTENTION_FUNCTIONS["shared_prefix"], ALL_MASK_ATTENTION_FUNCTIONS["shared_prefix"]
    with cache.attending(model):
        with pytest.raises(ValueError, match="dropout, or a bias"):
            attend(model.model.layers[0].self_attn, some, some, some, None, **what)
        with pytest.raises(ValueError, match="a mask of its own"):
            attended_to(mask_function=bidirectional_mask_function)


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
            lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=64)).eval(), id="a window, of all layers"
        ),
        pytest.param(
            lambda: Qwen2ForCausalLM(
                Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1)
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
        pytest.param(lambda: llama(attention_dropout=0.1).train(), id="dropout"),
    ],
)
def test_models_that_attend_otherwise_cannot(model: Any) -> None:
    assert not shares_prefix(model())


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(lambda: LlamaConfig(rope_parameters=DYNAMIC), id="dynamic"),
        pytest.param(
            lambda: Phi3Config(
                rope_parameters={
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0] * 48,
                    "long_factor": [2.0] * 48,
                    "original_max_position_embeddings": 4096,
                }
            ),
            id="longrope",
        ),
        pytest.param(Gemma3Config, id="a model that reads pictures"),
        pytest.param(lambda: MistralConfig(sliding_window=64), id="a window, of all layers"),
        pytest.param(
            lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=64, max_window_layers=1),
            id="a window, of some layers",
        ),
    ],
)
def test_keys_that_depend_on_more_than_what_is_before_are_not_shared(config: Any) -> None:
    assert not has_lasting_keys(config())


def test_positions_of_each_kind_of_layer_are_looked_at() -> None:
    config: Any = LlamaConfig()
    assert has_lasting_keys(config)
    config.rope_parameters = {"full_attention": DYNAMIC, "other": {"rope_type": "default"}}
    assert not has_lasting_keys(config)


def test_a_model_that_is_not_on_a_cpu_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "_trial", lambda *args: None)
    assert shares_prefix(llama())
    assert not shares_prefix(llama().to("meta"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", ["values", "scale", "error"])
def test_a_model_that_says_something_else_with_it_cannot(
    wrong: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model, right = llama().to(dtype), SharedPrefixCache.attend

    def attend(self: Any, layer: int, query: torch.Tensor, *args: Any) -> torch.Tensor:
        if wrong == "error":
            raise RuntimeError("no such kernel")
        return right(self, layer, -query if wrong == "values" else 1.3 * query, *args)

    monkeypatch.setattr(SharedPrefixCache, "attend", attend)
    with caplog.at_level(logging.INFO, "mcp_grpo"):
        assert not shares_prefix(model)
    assert ("no such kernel" if wrong == "error" else "logits are off by") in caplog.text
    assert model.config._attn_implementation == "sdpa"


def test_a_model_is_tried_once_for_each_way_in_which_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    monkeypatch.setattr(shared_prefix, "_trial", lambda model, dtype: tried.append((dtype, model.training)))
    model = llama()
    for _ in range(2):
        assert shares_prefix(model)
        with torch.autocast("cpu", torch.bfloat16):
            assert shares_prefix(model)
        assert shares_prefix(model.train())
        model.eval()
    assert tried == [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)]


def test_a_model_that_attends_otherwise_meanwhile_is_asked_again() -> None:
    model = llama(attn_implementation="eager")
    assert not shares_prefix(model)
    use_attention(model, "sdpa")
    assert shares_prefix(model)
    use_attention(model, "eager")
    assert not shares_prefix(model)


def test_a_trial_changes_no_mode() -> None:
    model = llama().train()
    model.model.layers[0].eval()
    assert shares_prefix(model)
    assert model.training
    assert not model.model.layers[0].training
