"""A reference that follows the policy: what moves, how far, and what is left alone."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from helpers.families import family_tokenizer
from helpers.policies import save_tiny_model
from helpers.references import IDS, KINDS, LORA, full, logps, with_lora
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import nn
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl.trainer.utils import use_adapter

from mcp_grpo.errors import SettingsError
from mcp_grpo.learning.reference import MovingReference


def nudge(model: nn.Module, seed: int = 1, size: float = 0.02) -> None:
    """What an optimizer step does, as far as the reference is concerned."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_an_average_in_float32_is_the_closed_form_of_all_past_policies() -> None:
    policy, reference, decay, num_steps = full(), full(), 0.9, 40
    moving = MovingReference(policy, reference, decay=decay)
    expected = {name: decay**num_steps * p.double() for name, p in snapshot(reference).items()}
    for step in range(num_steps):
        nudge(policy, seed=step)
        moving.sync()
        for name, parameter in snapshot(policy).items():
            expected[name] += (1 - decay) * decay ** (num_steps - 1 - step) * parameter.double()
    assert moving.num_syncs == num_steps
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(parameter.double(), expected[name], atol=1e-6, rtol=0)


def test_a_bfloat16_reference_is_averaged_as_exactly_as_a_float32_one() -> None:
    policy, reference = full(), full(torch.bfloat16)
    start = snapshot(reference)
    for name, parameter in policy.named_parameters():
        parameter.data = 1.02 * start[name].float()
    moving = MovingReference(policy, reference)
    for _ in range(500):
        moving.sync()
    state = moving.state_dict()
    for name, parameter in reference.named_parameters():
        expected = (1.02 - 0.02 * 0.99**500) * start[name].double()
        torch.testing.assert_close(state[f"reference.{name}"].double(), expected, atol=1e-6, rtol=1e-6)
        assert torch.equal(parameter, state[f"reference.{name}"].to(torch.bfloat16))


def test_an_average_held_in_bfloat16_does_not_move() -> None:
    """The control of the test above: the same arithmetic, without a shadow."""
    start = next(full(torch.bfloat16).parameters()).detach()
    target, average = 1.02 * start.float(), start.clone()
    for _ in range(500):
        average.mul_(0.99).add_(target.to(torch.bfloat16), alpha=0.01)
    gap = (target - average.float()).norm() / (target - start.float()).norm()
    assert gap > 0.9


@pytest.mark.parametrize("decay", [0.99, 0.5, 0.3])
def test_parameters_that_move_together_move_as_each_would_alone(monkeypatch: pytest.MonkeyPatch, decay: float) -> None:
    policy, references = full(), [full(), full()]
    nudge(policy)
    found = []
    for reference, max_at_once in zip(references, (2**18, 1), strict=True):
        monkeypatch.setattr("mcp_grpo.learning.reference._MAX_AT_ONCE", max_at_once)
        moving = MovingReference(policy, reference, decay=decay)
        expected = snapshot(reference)
        moving.sync()
        found.append(moving.difference())
        for name, parameter in reference.named_parameters():
            expected[name].add_(policy.get_parameter(name).detach() - expected[name], alpha=1 - decay)
            assert torch.equal(parameter, expected[name])
    (distance, num_differing), (alone, num_alone) = found
    assert distance == pytest.approx(alone, rel=1e-6)
    assert num_differing == num_alone > 0


def test_a_parameter_that_was_replaced_is_read_where_it_was() -> None:
    policy, reference = full(), full()
    moving = MovingReference(policy, reference, mode="hard")
    policy.model.norm.weight = nn.Parameter(torch.full_like(policy.model.norm.weight, 3.0))
    reference.model.norm.weight = nn.Parameter(torch.zeros_like(reference.model.norm.weight))
    moving.sync()
    assert torch.equal(reference.model.norm.weight, policy.model.norm.weight)


def test_only_a_coarse_reference_has_a_second_copy_in_float32() -> None:
    for dtype, num_shadows in ((torch.float32, 0), (torch.bfloat16, len(list(full().parameters())))):
        moving = MovingReference(full(), full(dtype))
        moving.sync()
        assert len(moving._shadows) == num_shadows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_hard_sync_leaves_no_difference(dtype: torch.dtype) -> None:
    policy, reference = full(), full(dtype)
    moving = MovingReference(policy, reference, mode="hard")
    nudge(policy)
    difference = [(p.to(dtype) - r).float() for p, r in zip(policy.parameters(), reference.parameters(), strict=True)]
    distance, num_differing = moving.difference()
    assert num_differing == sum(int((d != 0).sum()) for d in difference) > 0
    assert distance == pytest.approx(torch.cat([d.flatten() for d in difference]).norm().item(), rel=1e-5)
    moving.sync()
    assert moving.difference() == (0, 0)


def test_the_reference_adapter_gives_the_policys_log_probs_after_a_hard_sync() -> None:
    policy = with_lora()
    moving = MovingReference(policy, mode="hard")
    nudge(policy)
    policy.eval()
    with use_adapter(policy, None):
        base = logps(policy)
    with use_adapter(policy, "ref"):
        before = logps(policy)
    assert torch.equal(before, base)  # a new adapter changes nothing
    moving.sync()
    with use_adapter(policy, "ref"):
        after = logps(policy)
    assert torch.equal(after, logps(policy))
    assert (after - base).abs().max() > 0.01


def test_the_reference_adapter_has_no_dropout() -> None:
    policy = with_lora(init_lora_weights=False).train()
    MovingReference(policy)
    with use_adapter(policy, "ref"):
        assert torch.equal(logps(policy), logps(policy))
    assert not torch.equal(logps(policy), logps(policy))


def test_the_reference_adapter_is_not_trained_after_adapters_were_switched() -> None:
    policy = with_lora(modules_to_save=["norm"])
    MovingReference(policy)

    def trained() -> set[str]:
        return {part for n, p in policy.named_parameters() if p.requires_grad for part in n.split(".")[-3:-1]}

    assert "default" in trained()
    assert "ref" not in trained()
    with use_adapter(policy, "ref"), torch.no_grad():
        logps(policy)
    assert "ref" not in trained()
    policy.set_adapter("ref")
    policy.set_adapter("default")
    assert "default" in trained()
    assert "ref" not in trained()


def test_adding_the_adapter_leaves_the_random_state_and_all_other_parameters_alone() -> None:
    policy = with_lora(init_lora_weights="pissa")
    policy.get_base_model().value_head = nn.Linear(32, 1)
    before, trained = snapshot(policy), {n for n, p in policy.named_parameters() if p.requires_grad}
    state = torch.get_rng_state()
    MovingReference(policy)
    assert torch.equal(torch.get_rng_state(), state)
    after = snapshot(policy)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == trained
    assert any("value_head" in name for name in trained)
    added = after.keys() - before.keys()
    assert added
    assert all(torch.equal(after[name], before[name.replace(".ref.", ".default.")]) for name in added)


def test_modules_to_save_are_averaged_with_the_adapter() -> None:
    policy = with_lora(modules_to_save=["norm"])
    moving = MovingReference(policy, mode="hard")
    nudge(policy)
    moving.sync()
    parameters = dict(policy.named_parameters())
    saved = [name for name in parameters if ".modules_to_save.ref." in name]
    assert saved
    for name in saved:
        assert torch.equal(parameters[name], parameters[name.replace(".ref.", ".default.")])
        assert not torch.equal(parameters[name], parameters[name.replace("modules_to_save.ref", "original_module")])


def under_autocast(policy: PeftModel, adapter: str = "ref") -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad(), use_adapter(policy, adapter):
        return policy(input_ids=IDS).logits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32 base", "bfloat16 base"])
@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["norm", "lm_head"]},
        {"use_dora": True},
    ],
    ids=["linear", "embedding and saved modules", "dora"],
)
def test_under_autocast_the_reference_is_the_same_to_the_bit_with_factors_in_bfloat16(
    settings: dict[str, Any], dtype: torch.dtype
) -> None:
    base = full(dtype, tie_word_embeddings=False)
    config = LoraConfig(**{**LORA, "init_lora_weights": False, **settings})
    policies = [get_peft_model(copy.deepcopy(base), config) for _ in range(2)]
    policies[1].load_state_dict(policies[0].state_dict())
    wide, narrow = (
        MovingReference(policy, decay=0.9, autocast_dtype=dtype)
        for policy, dtype in zip(policies, (None, torch.bfloat16), strict=True)
    )
    before = under_autocast(policies[0])
    for seed in range(3):
        assert torch.equal(under_autocast(policies[1]), under_autocast(policies[0]))
        for policy, moving in zip(policies, (wide, narrow), strict=True):
            nudge(policy.eval(), seed)
            moving.sync()
    assert not torch.equal(under_autocast(policies[0]), before)
    assert narrow.difference() == pytest.approx(wide.difference())
    for name, value in wide.state_dict().items():
        assert torch.equal(narrow.state_dict()[name], value), name
    narrowed = {name for name, p in policies[1].named_parameters() if p.dtype != policies[0].get_parameter(name).dtype}
    assert all(".ref." in name and ("lora_A" in name or "lora_B" in name) for name in narrowed)
    assert bool(narrowed) == (not config.use_dora)


def test_an_average_moves_by_less_than_its_factors_in_bfloat16_can_show() -> None:
    policy = with_lora(init_lora_weights=False)
    moving = MovingReference(policy, autocast_dtype=torch.bfloat16)
    factors = {name: value for name, value in snapshot(policy).items() if ".ref." in name}
    start = {name: value.double() for name, value in moving.state_dict().items()}
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1 + 1e-3)
    moving.sync()
    unmoved = [torch.equal(value, policy.get_parameter(name)) for name, value in factors.items()]
    for name, value in moving.state_dict().items():
        if name != "num_syncs":
            torch.testing.assert_close(value.double(), start[name] * (1 + 1e-5), rtol=1e-7, atol=0)
    assert all(value.dtype == torch.bfloat16 for value in factors.values())
    moved_a_little = sum(unmoved)
    for _ in range(500):
        moving.sync()
    assert sum(torch.equal(value, policy.get_parameter(name)) for name, value in factors.items()) < moved_a_little


def test_a_hard_sync_leaves_no_difference_to_factors_in_bfloat16_and_is_saved_with_all_digits(tmp_path: Path) -> None:
    policy = with_lora(init_lora_weights=False)
    moving = MovingReference(policy, mode="hard", autocast_dtype=torch.bfloat16)
    assert moving.difference() == (0, 0)
    nudge(policy, size=1e-6)  # which bfloat16 does not show
    assert moving.difference()[1] > 0
    moving.sync()
    assert moving.difference() == (0, 0)
    moving.save(tmp_path)
    for name, value in load_file(tmp_path / "reference.safetensors").items():
        if name != "num_syncs":
            assert torch.equal(value, policy.get_parameter(name.removeprefix("reference.")))
    assert torch.equal(under_autocast(policy.eval()), under_autocast(policy, "default"))


def trl_trainer(
    folder: Path, model: Any, callbacks: list | None = None, cls: type = GRPOTrainer, **kwargs: Any
) -> Any:
    return cls(
        model=model,
        reward_funcs=lambda completions, **_: [float(sum(map(text.count, "aeiou"))) for text in completions],
        args=GRPOConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            beta=0.1,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            max_steps=3,
            learning_rate=5e-2,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": "Say red."}] * 4),
        processing_class=family_tokenizer("qwen3"),
        callbacks=callbacks,
        **kwargs,
    )


def test_a_reference_adapter_that_trl_made_is_used_and_completed(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False)
    policy = get_peft_model(full(tie_word_embeddings=False), lora)
    trl_trainer(tmp_path, policy)
    reference = {n: p for n, p in policy.named_parameters() if "ref" in n.split(".")}
    factors = [n for n in reference if n.endswith("lora_embedding_B.ref")]
    policies = dict(policy.named_parameters())
    assert factors
    assert not any(torch.equal(reference[n], policies[n.removesuffix("ref") + "default"]) for n in factors)
    with torch.no_grad():
        (kept := next(p for n, p in reference.items() if "lora_A" in n)).add_(1.0)
    MovingReference(policy)
    now = {n: p for n, p in policy.named_parameters() if "ref" in n.split(".")}
    assert all(now[name] is parameter for name, parameter in reference.items())
    for name, parameter in now.items():
        counterpart = policies[".".join("default" if part == "ref" else part for part in name.split("."))]
        assert torch.equal(parameter, counterpart + 1.0 if parameter is kept else counterpart)


class _Capture(GRPOTrainer):
    """Keeps the reference's log-probabilities, and those of the model without adapters for the same tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def _generate_and_score_completions(self, inputs: list) -> dict[str, Any]:
        batch = super()._generate_and_score_completions(inputs)
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        with torch.no_grad(), use_adapter(self.model, None):
            base, _, _ = self._get_per_token_logps_and_entropies(
                self.model, ids, mask, batch["completion_ids"].size(1)
            )
        shown = batch["completion_mask"].bool()
        self.captured.append((batch["ref_per_token_logps"][shown], base[shown]))
        return batch


class _Sync(TrainerCallback):
    def __init__(self) -> None:
        self.moving: MovingReference | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.moving is not None:
            self.moving.sync()


@pytest.mark.parametrize("is_moving", [True, False], ids=["moving", "still"])
def test_the_log_probs_that_trl_holds_the_policy_to_move_only_if_the_reference_does(
    tmp_path: Path, is_moving: bool
) -> None:
    callback = _Sync()
    lora = LoraConfig(r=4, target_modules="all-linear")
    trainer = trl_trainer(tmp_path, full(), [callback], _Capture, peft_config=lora)
    if is_moving:
        callback.moving = MovingReference(trainer.model, mode="hard")
    trainer.train()
    gaps = [(reference - base).abs().max().item() for reference, base in trainer.captured]
    kls = [entry["kl"] for entry in trainer.state.log_history if "kl" in entry]
    assert gaps[0] == 0
    if is_moving:
        assert callback.moving.num_syncs == 3
        assert min(gaps[1:]) > 0.01
        assert max(kls) < 1e-6  # every step begins at its reference
    else:
        assert max(gaps) == 0
        assert min(kls[1:]) > 1e-3


def test_full_weights_are_matched_by_name_and_a_value_head_is_left_out(tmp_path: Path) -> None:
    policy = Qwen3ForCausalLM.from_pretrained(save_tiny_model(tmp_path / "model"), dtype=torch.float32)
    trainer = trl_trainer(tmp_path, policy)
    policy.value_head = nn.Linear(32, 1)
    policy.model.value_head_norm = nn.LayerNorm(32)
    policy.model.layers[0].requires_grad_(False)
    moving = MovingReference(policy, trainer.ref_model, mode="hard")
    nudge(policy)
    with torch.no_grad():
        policy.model.layers[0].mlp.up_proj.weight.add_(1.0)
    before = snapshot(trainer.ref_model)
    moving.sync()
    assert moving.difference() == (0, 0)
    for name, parameter in trainer.ref_model.named_parameters():
        is_frozen = ".layers.0." in name
        assert torch.equal(parameter, before[name] if is_frozen else policy.get_parameter(name))
        assert is_frozen or not torch.equal(parameter, before[name])


@pytest.mark.parametrize("side", ["policy", "reference"])
def test_a_parameter_without_a_counterpart_is_named(side: str) -> None:
    models = {"policy": full(), "reference": full()}
    models[side].model.extra = nn.Linear(2, 2, bias=False)
    with pytest.raises(SettingsError, match=r"'model\.extra\.weight'"):
        MovingReference(models["policy"], models["reference"])


def test_a_trained_parameter_that_adapters_share_is_named() -> None:
    policy = with_lora()
    policy.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(SettingsError, match=r"model\.norm\.weight"):
        MovingReference(policy)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: MovingReference(full()), "needs a `reference`"),
        (lambda: MovingReference(full(), full(), mode="soft"), "`mode` must be one of"),
        (lambda: MovingReference(full(), full(), decay=1.0), "`decay` must be between 0 and 1"),
        (lambda: MovingReference(get_peft_model(full(), LoraConfig(**LORA), "mine")), "'default'"),
    ],
)
def test_settings_that_cannot_be_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        make()


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_goes_through_one_flat_file(tmp_path: Path, kind: str) -> None:
    def made() -> tuple[nn.Module, nn.Module, MovingReference]:
        policy = with_lora(init_lora_weights=False) if kind == "lora" else full()
        reference = policy if kind == "lora" else full(getattr(torch, kind))
        return policy, reference, MovingReference(policy, None if kind == "lora" else reference, decay=0.9)

    policy, reference, moving = made()
    assert not moving.load(tmp_path)
    for seed in range(3):
        nudge(policy, seed)
        moving.sync()
    moving.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["reference.safetensors"]

    new_policy, new_reference, new = made()
    new_policy.load_state_dict(policy.state_dict())
    for name, parameter in new_policy.named_parameters():
        if ".ref." in name:
            parameter.data.zero_()
    assert new.load(tmp_path)
    assert new.num_syncs == 3
    for each in (moving, new):
        each.sync()
    for one, other in zip(reference.parameters(), new_reference.parameters(), strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(value, new.state_dict()[name]) for name, value in moving.state_dict().items())


def test_a_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    MovingReference(with_lora()).save(tmp_path)
    with pytest.raises(SettingsError, match="o_proj"):
        MovingReference(with_lora(target_modules=["q_proj", "up_proj", "o_proj"])).load(tmp_path)
