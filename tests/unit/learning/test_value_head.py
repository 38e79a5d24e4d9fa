"""The value head: what it reads, what it leaves alone, and how it is saved."""

import copy
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.marks import full
from helpers.policies import tiny_model
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning.value_head import (
    VALUE_HEAD_FILE,
    ValueHead,
    ValueRecorder,
    add_value_head,
    load_value_head,
    save_value_head,
    value_head_from_pretrained,
    without_value_head,
)
from mcp_grpo.learning.values import value_loss


PROMPT, COMPLETION = 5, 6
LORA = LoraConfig(r=4, target_modules="all-linear")


def randomised(head: ValueHead, seed: int = 3) -> ValueHead:
    generator = torch.Generator().manual_seed(seed)
    for weight in head.parameters():
        with torch.no_grad():
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return head


def model_with_head(*, lora: bool = False, **settings: Any) -> tuple[Any, ValueHead]:
    model: Any = tiny_model(family_tokenizer("qwen3"))
    if lora:
        model = get_peft_model(model, LORA)
    add_fused_lm_head(model.get_base_model() if lora else model)
    head = add_value_head(model, **settings)
    return model, randomised(head)


def batch(rows: int = 3, seed: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 250, (rows, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def recorded(model: Any, inputs: dict[str, torch.Tensor], num_tokens: int = COMPLETION) -> ValueRecorder:
    recorder = ValueRecorder(model, num_tokens)
    recorder(**inputs, fused_lm_head=True)
    return recorder


class _Gradients(TrainerCallback):
    """Keeps the gradients of every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})


class _ValueTrainer(GRPOTrainer):
    """TRL's trainer with a value head that learns beside the policy."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        add_value_head(self.model)

    def _get_per_token_logps_and_entropies(self, model: Any, ids: Any, mask: Any, length: int, **kwargs: Any) -> Any:
        self.recorder = ValueRecorder(model, length)
        return super()._get_per_token_logps_and_entropies(self.recorder, ids, mask, length, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"].unsqueeze(1).expand(mask.shape)
        loss = super()._compute_loss(model, {**inputs, "advantages": advantages})
        values = self.recorder.values()
        return loss + 0.5 * value_loss(
            values, advantages, torch.where(mask == 1, 0, -1), num_turns=float(len(mask)), max_turns=1
        )


def _reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def _train(trainer_class: type, folder: Path, lora: bool, settings: dict[str, Any]) -> tuple[Any, list]:
    tokenizer = family_tokenizer("qwen3")
    words = ("red", "green", "blue", "grey")
    args = GRPOConfig(
        output_dir=str(folder),
        use_cpu=True,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=10,
        max_steps=2,
        learning_rate=1e-2,
        max_grad_norm=0.0,  # clipped together, the head's gradient would shrink the policy's
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        seed=7,
        **{"loss_type": "dapo", "bf16": False, "gradient_checkpointing": False, **settings},
    )
    gradients = _Gradients()
    trainer: Any = trainer_class(
        model=tiny_model(tokenizer),
        reward_funcs=_reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"Say {word}."}]} for word in words]),
        processing_class=tokenizer,
        callbacks=[gradients],
        peft_config=LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.1) if lora else None,
    )
    for index, (name, weight) in enumerate(trainer.model.named_parameters()):
        if "lora_B" in name:  # at zero, A would have no gradient in the first step
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(index)) * 0.05)
    trainer.train()
    return trainer, gradients.steps


@pytest.mark.parametrize(
    ("lora", "settings"),
    [
        *(
            full(False, {"loss_type": name}, id=name)
            for name in ("grpo", "bnpo", "dr_grpo", "cispo", "sapo", "vespo", "luspo")
        ),
        full(True, {}, id="lora"),
        full(False, {"gradient_checkpointing": True}, id="checkpointing"),
        pytest.param(True, {"gradient_checkpointing": True, "beta": 0.1}, id="lora-checkpointing-kl"),
        pytest.param(False, {"num_iterations": 2}, id="two-iterations"),
        full(True, {"bf16": True}, id="lora-bf16"),
    ],
)
def test_a_head_that_only_reads_leaves_the_policy_s_gradients_as_they_were_bit_by_bit(
    tmp_path: Path, lora: bool, settings: dict[str, Any]
) -> None:
    _, expected = _train(GRPOTrainer, tmp_path / "trl", lora, settings)
    trainer, steps = _train(_ValueTrainer, tmp_path / "ours", lora, settings)
    assert len(steps) == len(expected) == 2
    for ours, theirs in zip(steps, expected, strict=True):
        policy, head = without_value_head(ours)
        assert policy.keys() == theirs.keys()
        assert all(torch.equal(policy[name], theirs[name]) for name in theirs)
        assert sum(gradient.abs().sum() for gradient in theirs.values()) > 0
        assert head["out.weight"].abs().sum() > 0
    assert trainer.recorder.values().abs().sum() > 0


def test_values_line_up_with_the_log_probabilities_of_trl() -> None:
    model, _ = model_with_head()
    inputs = batch()
    before = recorded(model, inputs)
    for t in range(COMPLETION):
        ids = inputs["input_ids"].clone()
        ids[:, PROMPT + t] += 1
        after = recorded(model, {**inputs, "input_ids": ids})
        changed = (before.values() != after.values()).any(0)
        assert not changed[: t + 1].any()
        assert changed[t + 1 :].all()
        assert (before.values_after() != after.values_after()).any(0)[t:].all()
    assert torch.equal(before.values_after()[:, :-1], before.values()[:, 1:])
    output = model(**inputs, fused_lm_head=True)
    assert output.log_probs[:, -COMPLETION:].shape == before.values().shape


def test_padding_on_both_sides_does_not_change_values() -> None:
    model, _ = model_with_head()
    inputs = batch()
    padded = {
        "input_ids": torch.nn.functional.pad(inputs["input_ids"], (4, 3)),
        "attention_mask": torch.nn.functional.pad(inputs["attention_mask"], (4, 3)),
        "labels": torch.nn.functional.pad(inputs["labels"], (4, 3), value=-100),
    }
    expected, got = recorded(model, inputs), recorded(model, padded, COMPLETION + 3)
    torch.testing.assert_close(got.values()[:, :-3], expected.values())
    torch.testing.assert_close(got.values_after()[:, :-3], expected.values_after())


def test_the_parts_of_a_batch_are_recorded_in_order() -> None:
    model, _ = model_with_head()
    inputs, recorder = batch(4), ValueRecorder(model, COMPLETION)
    for rows in (slice(0, 3), slice(3, 4)):
        recorder(**{name: tensor[rows] for name, tensor in inputs.items()}, fused_lm_head=True)
    torch.testing.assert_close(recorder.values(), recorded(model, inputs).values())


def test_a_recorder_of_a_model_without_a_head_has_no_values() -> None:
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model)
    with pytest.raises(SettingsError, match="add_value_head"):
        recorded(model, batch()).values()


def test_a_new_head_gives_zero_and_can_learn() -> None:
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model)
    head = add_value_head(model)
    values = recorded(model, batch()).values()
    assert torch.equal(values, torch.zeros(3, COMPLETION))
    (values - 1).square().sum().backward()
    assert all(weight.requires_grad and weight.dtype == torch.float32 for weight in head.parameters())
    assert head.out.weight.grad.abs().sum() > 0
    assert {name for name in model.state_dict() if "value_head" in name} == {
        f"value_head.{name}" for name in head.state_dict()
    }


def test_the_gradient_of_values_does_not_reach_the_model_below() -> None:
    model, _ = model_with_head()
    (recorded(model, batch()).values() - 1).square().sum().backward()
    below, own = without_value_head({n: p.grad for n, p in model.named_parameters()})
    assert all(gradient is None for gradient in below.values())
    assert all(gradient.abs().sum() > 0 for gradient in own.values())


def test_adding_a_head_does_not_move_the_random_state() -> None:
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model)
    before = torch.get_rng_state()
    add_value_head(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_generation_and_other_forward_passes_are_untouched(lora: bool) -> None:
    plain: Any = tiny_model(family_tokenizer("qwen3"))
    torch.manual_seed(5)
    plain = get_peft_model(plain, LORA) if lora else plain
    torch.manual_seed(5)
    model, _ = model_with_head(lora=lora)
    inputs = batch()
    expected, got = plain(**inputs), model(**inputs)
    assert type(got) is type(expected)
    assert torch.equal(got.logits, expected.logits)
    assert torch.equal(got.loss, expected.loss)
    prompt = {name: inputs[name][:, :PROMPT] for name in ("input_ids", "attention_mask")}
    settings = {"max_new_tokens": 8, "do_sample": True}
    tokens = []
    for each in (plain, model):
        torch.manual_seed(9)
        tokens.append(each.generate(**prompt, **settings))
    assert torch.equal(*tokens)
    # `generate` refuses what it does not find there.
    lm, plain_lm = ((each.get_base_model() if lora else each) for each in (model, plain))
    assert inspect.signature(lm.forward) == inspect.signature(plain_lm.forward)


def test_log_probabilities_and_entropies_are_those_of_a_model_without_a_head() -> None:
    plain = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(plain)
    model, _ = model_with_head()
    expected, got = plain(**batch(), fused_lm_head=True), model(**batch(), fused_lm_head=True, num_values=3)
    assert list(got) == [*expected, "value_preds"]
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not model.model._forward_hooks


def test_values_are_computed_only_where_they_are_asked_for() -> None:
    model, head = model_with_head()
    seen: list[torch.Tensor] = []
    head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    whole = model(**batch(), fused_lm_head=True, num_values=PROMPT + COMPLETION).value_preds
    part = recorded(model, batch())
    assert [values.shape[1] for values in seen] == [PROMPT + COMPLETION, COMPLETION + 1]
    torch.testing.assert_close(part.values(), whole[:, -COMPLETION - 1 : -1])
    torch.testing.assert_close(part.values_after(), whole[:, -COMPLETION:])
    assert not hasattr(model(**batch(), fused_lm_head=True), "value_preds")
    assert len(seen) == 2


def test_a_copy_of_a_model_reads_its_own_hidden_states() -> None:
    model, _ = model_with_head()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.mul_(2)
    expected, got = (recorded(each, batch()).values() for each in (model, other))
    bias = model.value_head.out.bias
    torch.testing.assert_close(got - bias, 2 * (expected - bias))


def test_an_adapter_that_is_switched_off_and_on_leaves_the_head_trainable() -> None:
    model, head = model_with_head(lora=True)
    with model.disable_adapter():
        recorded(model, batch())
    model.set_adapter("default")
    assert all(weight.requires_grad for weight in head.parameters())


def test_a_second_head_is_refused() -> None:
    model, _ = model_with_head()
    with pytest.raises(SettingsError, match="already"):
        add_value_head(model)


def test_a_model_without_a_fused_lm_head_is_refused() -> None:
    with pytest.raises(SettingsError, match="add_fused_lm_head"):
        add_value_head(tiny_model(family_tokenizer("qwen3")))


def test_the_head_computes_in_its_own_type_under_autocast() -> None:
    model, head = model_with_head()
    model.to(torch.bfloat16)
    head.to(torch.float32)
    seen: list[torch.Tensor] = []
    head.out.register_forward_hook(lambda module, inputs, output: seen.append(output))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = recorded(model, batch()).values()
    assert seen[0].dtype == values.dtype == torch.float32
    assert values.isfinite().all()
    values.sum().backward()
    assert head.out.weight.grad.isfinite().all()


def test_a_head_of_the_policy_s_type_gives_values_in_full_precision() -> None:
    model, head = model_with_head(dtype=torch.bfloat16)
    assert head.out.weight.dtype == torch.bfloat16
    assert recorded(model, batch()).values().dtype == torch.float32


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_a_saved_model_and_head_give_the_same_values_again(tmp_path: Path, lora: bool) -> None:
    torch.manual_seed(5)
    model, head = model_with_head(lora=lora)
    expected = recorded(model, batch()).values()
    rest, head_part = without_value_head(model.state_dict())
    if lora:
        model.save_pretrained(tmp_path)
        assert all("value_head" not in name for name in load_file(tmp_path / "adapter_model.safetensors"))
        save_value_head(head, tmp_path)
        again: Any = PeftModel.from_pretrained(tiny_model(family_tokenizer("qwen3")), tmp_path)
    else:
        model.save_pretrained(tmp_path, state_dict=rest)
        assert all("value_head" not in name for name in load_file(tmp_path / "model.safetensors"))
        save_value_head(head, tmp_path, head_part)
        again, loading = Qwen3ForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert not loading["unexpected_keys"]
        assert not loading["missing_keys"]
    value_head_from_pretrained(again, tmp_path)
    torch.testing.assert_close(recorded(again.eval(), batch()).values(), expected)


def test_the_state_dict_is_split_by_name() -> None:
    weight = torch.ones(1)
    names = ["value_head.out.bias", "model.norm.weight", "my_value_head.out.bias", "value_heads.weight"]
    rest, head = without_value_head(dict.fromkeys(names, weight))
    assert list(rest) == names[1:]
    assert list(head) == ["out.bias"]
    model, added = model_with_head(lora=True)
    rest, head = without_value_head(torch.nn.Module.state_dict(model, prefix="module."))
    assert head.keys() == added.state_dict().keys()
    assert len(rest) + len(head) == len(torch.nn.Module.state_dict(model))


def test_there_may_be_nothing_to_load_when_training_starts_but_not_later(tmp_path: Path) -> None:
    model, head = model_with_head()
    before = copy.deepcopy(head.state_dict())
    assert not load_value_head(head, tmp_path)
    assert all(torch.equal(weight, before[name]) for name, weight in head.state_dict().items())
    with pytest.raises(SettingsError, match="trained with a value head"):
        value_head_from_pretrained(model, tmp_path)


def test_a_head_of_another_kind_or_size_is_not_loaded(tmp_path: Path) -> None:
    save_value_head(randomised(ValueHead(32)), tmp_path)
    (tmp_path / "other").mkdir()
    save_file({"weight": torch.ones(1)}, tmp_path / "other" / VALUE_HEAD_FILE, metadata={"kind": "mlp"})
    with pytest.raises(SettingsError, match="of kind 'mlp'"):
        load_value_head(ValueHead(32), tmp_path / "other")
    smaller = ValueHead(16)
    with pytest.raises(SettingsError, match=r"\(1, 32\).*\(1, 16\)"):
        load_value_head(smaller, tmp_path)
    assert not smaller.out.weight.any()
    same = ValueHead(32)
    assert load_value_head(same, tmp_path)
    assert torch.equal(same.out.weight, randomised(ValueHead(32)).out.weight)
