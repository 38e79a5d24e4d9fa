"""What the rows of a pass begin with, run once: the same numbers and gradients, from fewer tokens."""

from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconH1Config,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)
from trl.trainer import add_fused_lm_head

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning import PromptSharing, SharedPrompts, Unpadded, ValueRecorder, add_value_head, shared_prompts
from mcp_grpo.learning.shared_prompts import MIN_SHARED, PromptTree, tree_attention


TOOLS, PROMPTS, COMPLETIONS = 24, (20, 7, 30), ((7, 2, 0, 12), (5, 1, 3), (9,))
NUM_ROWS, WIDTH = 8, TOOLS + max(PROMPTS) + 12


def batch(tools: int = TOOLS) -> dict[str, torch.Tensor]:
    """Three groups whose prompts begin alike, padded on the left; completions, on the right. The rows are shuffled."""
    torch.manual_seed(1)
    common = torch.randint(5, 250, (tools,))
    end = tools + max(PROMPTS)
    ids, mask = torch.zeros(NUM_ROWS, end + 12, dtype=torch.long), torch.zeros(NUM_ROWS, end + 12, dtype=torch.long)
    rows = iter(torch.randperm(NUM_ROWS).tolist())
    for number, (size, lengths) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        prompt = torch.cat([common, torch.randint(5, 250, (size,))])
        prompt[tools] = number  # so that tasks begin to differ there
        for length, row in zip(lengths, rows, strict=False):
            ids[row, end - len(prompt) : end] = prompt
            ids[row, end : end + length] = torch.randint(5, 250, (length,))
            mask[row, end - len(prompt) : end + length] = 1
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :end] = -100
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def tree_of(inputs: dict[str, torch.Tensor]) -> PromptTree:
    return PromptTree(inputs["input_ids"], inputs["attention_mask"], num_tokens=12)


def made(kind: Any, **changes: Any) -> Any:
    """A small random model of a configuration, with an output layer as TRL gives it."""
    torch.manual_seed(0)
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    small |= {"num_key_value_heads": 1, "head_dim": 16, "vocab_size": 300, "initializer_range": 0.2}
    model = AutoModelForCausalLM.from_config(kind(**{**small, **changes}))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model.eval()


def test_what_rows_begin_with_is_in_the_tree_once() -> None:
    inputs = batch()
    tree = tree_of(inputs)
    own = sum(map(sum, COMPLETIONS)) + NUM_ROWS
    shared = TOOLS + PROMPTS[0] - 1 + PROMPTS[1] - 1 + PROMPTS[2] - 1
    # That of the second group is too short to be shared, and the third has one row.
    kept = shared + 2 * (PROMPTS[1] - 1)
    assert PROMPTS[1] - 1 < MIN_SHARED
    assert len(tree) == own + kept
    flat = inputs["input_ids"].flatten()[tree.places]
    for start, end, path in tree.segments:
        ranges = [*path, (start, end, ())]
        ids = torch.cat([flat[each[0] : each[1]] for each in ranges])
        row, first = divmod(int(tree.places[start]), inputs["input_ids"].size(1))
        begin = first - int(tree.positions[start])
        assert torch.equal(ids, inputs["input_ids"][row, begin : begin + len(ids)])
        assert inputs["attention_mask"][row, begin : begin + len(ids)].all()
    owners = tree.places[tree.own]
    assert len(owners.unique()) == len(owners)
    is_label = (inputs["labels"] != -100).flatten()
    assert torch.isin(is_label.nonzero().squeeze(1), owners).all()  # each is there, and in its own row
    before = is_label.view(NUM_ROWS, -1)[:, 1:] & ~is_label.view(NUM_ROWS, -1)[:, :-1]
    first = before.flatten().nonzero().squeeze(1)
    assert len(first) == 7


def test_attention_is_that_of_the_rows_to_the_last_digit() -> None:
    # The others compute norms and what TRL's output layer gives in float32, whatever they are given.
    model = made(GPT2Config, attn_pdrop=0.0).double()
    assert PromptSharing(True).is_possible(model)
    inputs = batch()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    tree, positions = tree_of(inputs), (mask.cumsum(dim=1) - 1).clamp(min=0)
    rows = model.base_model(input_ids=ids, attention_mask=mask, position_ids=positions).last_hidden_state
    packed = {"input_ids": ids.flatten()[tree.places][None], "position_ids": tree.positions[None]}
    dummy = torch.zeros(1, 1, 1, 1)
    found = model.base_model(**packed, attention_mask=dummy, prompt_tree=tree).last_hidden_state[0]
    rows = rows.flatten(0, 1)
    torch.testing.assert_close(found, rows[tree.places], atol=1e-12, rtol=1e-12)
    weights = torch.randn(len(tree.own), 32, dtype=torch.float64)
    gradients = []
    for hidden in (rows[tree.places], found):
        model.zero_grad()
        (hidden[tree.own] * weights).sum().backward()
        gradients.append([p.grad.clone() for p in model.transformer.h.parameters()])
    torch.testing.assert_close(*gradients, atol=1e-11, rtol=1e-11)


def sequence_by_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
) -> torch.Tensor:
    """What torch's attention for sequences of different lengths gives, causal from the lower right, written out."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(cu_seq_k.diff().max()))
    assert (len(query), len(key)) == (cu_seq_q[-1], cu_seq_k[-1])
    found = []
    for (start, end), (first, last) in zip(cu_seq_q.unfold(0, 2, 1), cu_seq_k.unfold(0, 2, 1), strict=True):
        queries, keys, values = query[start:end], key[first:last], value[first:last]
        keys, values = (each.repeat_interleave(query.size(1) // key.size(1), dim=1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (query.size(2) ** -0.5 if scale is None else scale)
        is_ahead = torch.ones_like(scores[0], dtype=torch.bool).triu(1 + len(keys) - len(queries))
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(is_ahead, -torch.inf).softmax(dim=2), values))
    return torch.cat(found)


@pytest.mark.parametrize("scaling", [None, 0.3])
@pytest.mark.parametrize("num_key_heads", [4, 2])
def test_one_kernel_for_all_segments_attends_as_segment_by_segment(
    num_key_heads: int, scaling: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On GPUs it is torch's; here is its place."""
    tree = tree_of(batch())
    assert max(len(segment.path) for segment in tree.segments) > 1
    torch.manual_seed(2)
    tokens = [torch.randn(1, heads, len(tree), 8, dtype=torch.float64) for heads in (4, num_key_heads, num_key_heads)]
    weights = torch.randn(1, len(tree), 4, 8, dtype=torch.float64)
    monkeypatch.setattr(shared_prompts, "_varlen_attn", lambda: sequence_by_sequence)
    found = []
    for has_kernel in (False, True):
        monkeypatch.setattr(shared_prompts, "_has_kernel", lambda *_, has_kernel=has_kernel: has_kernel)
        query, key, value = inputs = [each.clone().requires_grad_() for each in tokens]
        output, _ = tree_attention(None, query, key, value, None, prompt_tree=tree, scaling=scaling)
        (output * weights).sum().backward()
        found.append([output.detach(), *(each.grad for each in inputs)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


def test_the_kernel_is_asked_for_causal_attention_with_heads_that_share_keys() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    attend = cast("partial[Any]", shared_prompts._varlen_attn())
    known = signature(attend.func).parameters  # which are not the same in all versions
    causal = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    assert attend.keywords == causal | ({"enable_gqa": True} if "enable_gqa" in known else {})


def test_the_kernel_is_for_16_bits_on_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prompts, "_varlen_attn", lambda: sequence_by_sequence)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if device.index else (7, 5))
    has_kernel = shared_prompts._has_kernel.__wrapped__
    old, new, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    assert has_kernel(new, torch.bfloat16, 128)
    assert has_kernel(new, torch.float16, 256)
    for refused in ((old, torch.bfloat16, 128), (cpu, torch.bfloat16, 128), (new, torch.float32, 128)):
        assert not has_kernel(*refused)
    assert not has_kernel(new, torch.bfloat16, 264)
    assert not has_kernel(new, torch.bfloat16, 100)


@pytest.mark.parametrize("how", ["all weights", "adapter", "checkpointing", "reentrant checkpointing"])
def test_what_is_said_of_tokens_is_what_is_said_of_them_in_rows(how: str) -> None:
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    torch.nn.init.normal_(add_value_head(model).out.weight)
    if how == "adapter":
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if "checkpointing" in how:
        model.gradient_checkpointing_enable({"use_reentrant": how.startswith("reentrant")})
        model.enable_input_require_grads()
        model.train()
    assert PromptSharing(True).is_possible(model)
    assert model.training == ("checkpointing" in how or how == "adapter")
    inputs, length = batch(), 12
    found = []
    for called in (model, SharedPrompts(model, Unpadded(None), 12)):
        recorder = ValueRecorder(called, length)
        output = recorder(**inputs, fused_lm_head=True)
        mask = inputs["attention_mask"][:, -length:]
        loss = (output.log_probs[:, -length:] * mask * torch.arange(1, length + 1)).sum()
        loss = loss + output.entropy.sum() + (recorder.values() * mask).sum() + (recorder.values_after() * mask).sum()
        model.zero_grad()
        loss.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        values = recorder.values() * mask, recorder.values_after() * mask
        found.append((output.log_probs, output.entropy, *values, gradients))
    rows, tree = found
    assert rows[0].count_nonzero() == sum(map(sum, COMPLETIONS))
    assert sum(gradient.abs().sum() for gradient in rows[-1].values()) > 0
    torch.testing.assert_close(tree, rows, atol=2e-4, rtol=2e-4)


CAN: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "mistral without a window": (MistralConfig, {"sliding_window": None}),
    "gpt2": (GPT2Config, {"attn_pdrop": 0.0}),
    "experts": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
}


@pytest.mark.parametrize("name", CAN)
def test_families_that_can_share(name: str) -> None:
    kind, changes = CAN[name]
    model = made(kind, **changes)
    assert PromptSharing(True).is_possible(model)
    inputs = batch()
    expected = Unpadded(model)(**inputs, fused_lm_head=True)
    found = SharedPrompts(model, Unpadded(None), 12)(**inputs, fused_lm_head=True)
    torch.testing.assert_close(found.log_probs, expected.log_probs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.entropy, expected.entropy, atol=1e-4, rtol=1e-4)


HALF = {"use_sliding_window": True, "sliding_window": 64, "layer_types": ["full_attention", "sliding_attention"]}
STATES = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
CANNOT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a window in some layers": (Qwen3Config, HALF, "layers of sliding_attention"),
    "a window in all": (MistralConfig, {"sliding_window": 4096}, "sliding window"),
    "other attention": (LlamaConfig, {"attn_implementation": "eager"}, 'attention is "eager", and only "sdpa"'),
    "no attention": (MambaConfig, {}, "attention is"),
    "states beside it": (FalconH1Config, STATES, "layers of hybrid"),
    "biases by distance": (BloomConfig, {}, "attention is"),
    "dropout": (LlamaConfig, {"attention_dropout": 0.1}, "attention has dropout"),
}


@pytest.mark.parametrize("name", CANNOT)
def test_models_that_cannot_share_are_refused_with_the_reason(name: str) -> None:
    kind, changes, reason = CANNOT[name]
    check_refused(made(kind, **changes), reason)


def test_adapters_with_tokens_of_their_own_are_refused() -> None:
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    check_refused(get_peft_model(made(Qwen3Config), config), "tokens of its own")


def test_a_model_that_remembers_what_no_setting_tells_of_is_found_out() -> None:
    model = made(LlamaConfig)
    model.model.layers[0].register_forward_hook(lambda *call: call[-1] + 0.1 * call[-1].cumsum(dim=1))
    check_refused(model, "other log-probabilities for a tree of prompts, by")


def test_a_model_that_cannot_be_told_positions_is_found_out() -> None:
    model = made(LlamaConfig)
    model.base_model.forward = lambda input_ids, attention_mask=None, use_cache=None: None
    check_refused(model, "cannot run a tree of prompts (")


def test_a_compiled_model_is_refused() -> None:
    check_refused(torch.compile(made(LlamaConfig)), "the model is compiled")


def test_what_is_not_wanted_is_not_tried() -> None:
    model = made(LlamaConfig)
    assert not PromptSharing(False).is_possible(model)
    assert model.config._attn_implementation == "sdpa"


def test_other_passes_of_a_model_that_shares_are_as_before(tmp_path: Path) -> None:
    model, inputs = made(LlamaConfig), batch()
    rows = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    expected = model(**rows).logits, model.generate(**rows, max_new_tokens=4, do_sample=False)
    assert PromptSharing(True).is_possible(model)
    found = model(**rows).logits, model.generate(**rows, max_new_tokens=4, do_sample=False)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    model.save_pretrained(tmp_path)
    assert "shared_prompts" not in (tmp_path / "config.json").read_text()


def seen_shapes(model: Any, inputs: dict[str, torch.Tensor], **kwargs: Any) -> tuple[list[tuple[int, ...]], Any]:
    """The shapes of what the model is given in a pass that may share, and what it returns."""
    shapes: list[tuple[int, ...]] = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    output = SharedPrompts(model, Unpadded(model), 12)(**inputs, **kwargs, fused_lm_head=True)
    hook.remove()
    return shapes, output


def test_rows_stay_rows_where_little_is_saved() -> None:
    model, inputs = made(LlamaConfig), batch()
    assert PromptSharing(True).is_possible(model)
    assert seen_shapes(model, inputs)[0] == [(1, len(tree_of(inputs)))]
    alone = {name: values[:1] for name, values in inputs.items()}
    other = {name: values.clone() for name, values in inputs.items()}
    other["input_ids"] = torch.where(other["attention_mask"] > 0, torch.randint(5, 250, (NUM_ROWS, WIDTH)), 0)
    other["attention_mask"][:] = 1
    for few in (alone, other):
        [(num_rows, _)] = seen_shapes(model, few)[0]
        assert num_rows == len(few["input_ids"])


def test_the_load_of_experts_is_counted_of_rows() -> None:
    model, inputs = made(MixtralConfig, num_local_experts=4, sliding_window=None), batch()
    assert PromptSharing(True).is_possible(model)
    shapes, output = seen_shapes(model, inputs, output_router_logits=True)
    assert shapes == [(NUM_ROWS, int(inputs["attention_mask"].sum(dim=1).max()))]
    expected = model(**inputs, fused_lm_head=True, output_router_logits=True)
    torch.testing.assert_close(output.aux_loss, expected.aux_loss)


def check_refused(model: Any, reason: str) -> None:
    before = model.config._attn_implementation
    sharing = PromptSharing(None)
    assert sharing.sentence is None
    assert not sharing.is_possible(model)
    assert not sharing.is_possible(model)
    said = str(sharing.sentence)
    assert said.startswith("Prompts are run once for each attempt: ")
    assert reason in said
    assert model.config._attn_implementation == before
    with pytest.raises(SettingsError, match=r"`SHARE_PROMPTS` is `True`, which cannot be: .*Leave it at `None`"):
        PromptSharing(True).is_possible(model)
