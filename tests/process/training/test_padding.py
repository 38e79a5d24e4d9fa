"""Passes without padding: the same numbers and gradients, from fewer tokens."""

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.families import family_tokenizer
from helpers.marks import full
from helpers.policies import tiny_model
from helpers.runs import RELYING_AT_ONCE, OneByOne, make_trainer
from helpers.sums import ROWS
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from transformers import MixtralConfig, MixtralForCausalLM, TrainerCallback
from trl.kernels import ChunkedLogProbFunction
from trl.trainer import add_fused_lm_head

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.learning import (
    BatchRows,
    LabelledOnly,
    SampledOnly,
    Unpadded,
    ValueRecorder,
    add_value_head,
    depends_on_width,
)


BY_ROW = {"mcp_grpo.learning.shared_prompts.SHARE_PROMPTS": False}
"""Constants with which prompts are run once for each row."""


PROMPTS, COMPLETIONS = (3, 9, 1, 0, 5), (7, 2, 0, 0, 11)
WIDTH = max(PROMPTS) + max(COMPLETIONS)
PARTS = (slice(0, 2), slice(2, 5))


@pytest.fixture(scope="module")
def model() -> Any:
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    head = add_value_head(model)
    torch.manual_seed(0)
    torch.nn.init.normal_(head.out.weight)
    return model.eval()


def batch() -> dict[str, torch.Tensor]:
    """Prompts padded on the left, completions on the right."""
    torch.manual_seed(1)
    columns = torch.arange(WIDTH)
    begins = max(PROMPTS) - torch.tensor(PROMPTS).unsqueeze(1)
    ends = max(PROMPTS) + torch.tensor(COMPLETIONS).unsqueeze(1)
    mask = ((columns >= begins) & (columns < ends)).long()
    input_ids = torch.randint(5, 250, mask.shape) * mask
    labels = input_ids.masked_fill((mask == 0) | (columns < max(PROMPTS)), -100)
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


def test_what_is_said_of_tokens_is_what_is_said_of_them_among_padding(model: Any) -> None:
    inputs, length = batch(), max(COMPLETIONS)
    found = []
    for called in (model, Unpadded(model)):
        recorder = ValueRecorder(called, length)
        output = recorder(**inputs, fused_lm_head=True)
        mask = inputs["attention_mask"][:, -length:]
        loss = (output.log_probs[:, -length:] * mask * torch.arange(1, length + 1)).sum()
        loss = loss + output.entropy.sum() + (recorder.values() * mask).sum() + (recorder.values_after() * mask).sum()
        model.zero_grad()
        loss.backward()
        gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        found.append((output, recorder.values() * mask, recorder.values_after() * mask, gradients))
    (padded, *values, gradients), (unpadded, *others, other_gradients) = found
    assert unpadded.log_probs.shape == padded.log_probs.shape == (5, WIDTH - 1)
    torch.testing.assert_close(unpadded.log_probs, padded.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(unpadded.entropy, padded.entropy, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(others, values, atol=1e-5, rtol=1e-5)
    assert padded.log_probs.count_nonzero() == sum(COMPLETIONS)
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, atol=2e-4, rtol=1e-3)


def test_the_model_sees_no_more_columns_than_the_longest_row_has_tokens_and_no_mask(model: Any) -> None:
    seen = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((kwargs["input_ids"].shape, kwargs["attention_mask"])), with_kwargs=True
    )
    try:
        Unpadded(model)(**batch(), fused_lm_head=True)
    finally:
        hook.remove()
    assert seen == [((5, max(map(sum, zip(PROMPTS, COMPLETIONS, strict=True)))), None)]


def test_the_width_is_a_multiple_of_what_is_asked_for_but_no_wider_than_before(model: Any) -> None:
    widths = []
    hook = model.base_model.register_forward_pre_hook(
        lambda _, args, kwargs: widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    try:
        for multiple in (1, 6, 64):
            Unpadded(model, multiple)(**batch(), fused_lm_head=True)
    finally:
        hook.remove()
    assert widths == [16, 18, WIDTH]


def test_tokens_that_an_adapter_puts_before_a_row_change_no_place() -> None:
    torch.manual_seed(0)
    model = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model)
    adapted = get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    inputs = batch()
    found = Unpadded(adapted)(**inputs, fused_lm_head=True).log_probs
    found.sum().backward()
    for row, mask in enumerate(inputs["attention_mask"]):
        if (width := int(mask.sum())) < 2:
            continue
        alone = {name: values[row : row + 1, mask == 1] for name, values in inputs.items()}
        expected = adapted(**alone, fused_lm_head=True).log_probs[0, -(width - 1) :]
        begin = int(mask.nonzero()[0])
        torch.testing.assert_close(found[row, begin : begin + width - 1], expected, atol=1e-5, rtol=1e-5)


def test_the_load_of_experts_is_counted_without_padding() -> None:
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**shape, **heads)).eval()
    add_fused_lm_head(model)
    inputs: dict[str, Any] = {**batch(), "fused_lm_head": True, "output_router_logits": True}
    padded, trimmed = model(**inputs), Unpadded(model)(**inputs)
    torch.testing.assert_close(trimmed.aux_loss, padded.aux_loss)
    torch.testing.assert_close(trimmed.log_probs, padded.log_probs, atol=1e-5, rtol=1e-5)


def test_what_tools_wrote_is_not_predicted(model: Any) -> None:
    inputs, length = batch(), max(COMPLETIONS)
    is_sampled = (torch.arange(length - 1) % 3 < 2).long().repeat(len(PROMPTS), 1)
    is_sampled[0, 1] = is_sampled[4, 0] = 0  # others in each part
    expected = model(**inputs, fused_lm_head=True)
    only, seen = SampledOnly(model, is_sampled, length), []
    hook = model.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(int((kwargs["labels"] != -100).sum())), with_kwargs=True
    )
    found = [only(**{name: rows[part] for name, rows in inputs.items()}, fused_lm_head=True) for part in PARTS]
    hook.remove()
    is_read = torch.nn.functional.pad(is_sampled, (WIDTH - length - 1, 1))  # the last column was of no completion
    for name in ("log_probs", "entropy"):
        together = torch.cat([getattr(each, name) for each in found])
        torch.testing.assert_close(together, getattr(expected, name) * is_read, atol=1e-5, rtol=1e-5)
    assert sum(seen) == ((inputs["labels"][:, 1:] != -100) * is_read).sum() < sum(COMPLETIONS)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn", "default"])
def test_models_that_mind_the_width_are_known(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 1e4}
    assert depends_on_width(SimpleNamespace(get_text_config=lambda: SimpleNamespace(rope_parameters=rope))) == (
        kind in ("dynamic", "longrope")
    )
    nested = {"full_attention": rope, "sliding_attention": {"rope_type": "default"}}
    assert depends_on_width(SimpleNamespace(get_text_config=lambda: SimpleNamespace(rope_parameters=nested))) == (
        kind in ("dynamic", "longrope")
    )


def test_a_policy_that_minds_the_width_keeps_its_padding(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model, max_steps=1, constants=BY_ROW) as trainer:
        widths: dict[bool, set[int]] = {}
        for minds in (False, True):
            trainer._depends_on_width = minds
            inputs = {name: values for name, values in batch().items() if name != "labels"}
            seen = widths.setdefault(minds, set())
            hook = trainer.model.base_model.register_forward_pre_hook(
                lambda _, args, kwargs, seen=seen: seen.add(kwargs["input_ids"].shape[1]), with_kwargs=True
            )
            trainer._get_per_token_logps_and_entropies(trainer.model, **inputs, logits_to_keep=max(COMPLETIONS))
            hook.remove()
    assert widths == {False: {16}, True: {WIDTH}}


class Twice(MCPGRPOTrainer):
    """Computes each loss as TRL does, with padding and predictions of what tools wrote, and without; far from the reference."""

    def scale_adapter(self, factor: float) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_B" in name:
                    parameter.mul_(factor)

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        losses = {}
        if not self.seen:
            self.scale_adapter(15)
        for is_trimmed in (False, True):
            self._depends_on_width = not is_trimmed
            self.model.zero_grad()
            columns = {name: column for name, column in inputs.items() if is_trimmed or name != "is_sampled"}
            losses[is_trimmed] = super()._compute_loss(model, columns)
            losses[is_trimmed].backward()
            gradients = {n: p.grad.clone() for n, p in self.model.named_parameters() if p.grad is not None}
            self.seen.append((losses[is_trimmed].item(), gradients))
        self.model.zero_grad()
        return super()._compute_loss(model, inputs)


# Not the reference: with the weights it has at first, there would be no divergence from it.
ADAPTER = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)


HARD = {"schema_mask": "syntax", "schema_mask_min_prob": 0.0, "min_unforced_fraction": 0.0}


def rewards_by_place(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(place % 3) for place in range(len(completions))]


def rewards_of_some(completions: list[Any], **kwargs: Any) -> list[float | None]:
    return [None if place % 2 else float(place % 4) for place in range(len(completions))]


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        full({}),
        {"num_iterations": 2},
        full({"reward": rewards_of_some, "advantage_mode": "group_turn", "kl_hard_cap": None, "max_steps": 1, **HARD}),
    ],
    ids=["one pass", "two passes", "masked tokens of rows without a reward"],
)
def test_the_loss_is_the_same_with_and_without_padding(
    tmp_path: Path, adding_model: str, changes: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"beta": 0.1, "max_steps": 2} | changes
    with make_trainer(tmp_path, adding_model, Twice, peft_config=ADAPTER, constants=BY_ROW, **settings) as trainer:
        trainer.scale_adapter(0.1)  # near enough to the reference to still make calls
        trainer.seen = []
        trainer.train()
        [inputs] = trainer._buffered_inputs
    if "schema_mask" in changes:
        assert ((inputs["masked"] > 0) & (inputs["turn_ids"] < 0)).any()
    assert len(trainer.seen) >= 2 * settings["max_steps"]
    for padded, trimmed in zip(trainer.seen[::2], trainer.seen[1::2], strict=True):
        assert trimmed[0] == pytest.approx(padded[0], abs=1e-5, rel=1e-4)
        assert sum(gradient.abs().sum() for gradient in padded[1].values()) > 0
        for name, gradient in padded[1].items():
            torch.testing.assert_close(trimmed[1][name], gradient, atol=1e-5, rtol=1e-3)


def test_rows_of_like_length_share_a_pass() -> None:
    lengths = [[3, 9], [4, 1], [5, 2], [8, 6]]
    batches = [
        {
            "prompt_mask": torch.ones(2, 2),
            "completion_mask": (torch.arange(10) < torch.tensor(each).unsqueeze(1)).long(),
            "ids": torch.tensor(each),
            "num_items_in_batch": torch.tensor(38),
            "nothing": None,
        }
        for each in lengths
    ]
    found = BatchRows(batches).by_length()
    assert [each["ids"].tolist() for each in found] == [[9, 8], [6, 5], [4, 3], [2, 1]]
    assert all(torch.equal(each["completion_mask"].sum(dim=1), each["ids"]) for each in found)
    assert all(each["num_items_in_batch"] == 38 and each["nothing"] is None for each in found)


OF_TOKENS = (
    "mask/in_loss_fraction",
    "ratio/mean",
    "ratio/ess",
    "align/logp_mae",
    "align/score",
    "kl/active",
    "kl/all",
)
OF_TOKENS += ("ratio/std", "loss/active_fraction", "loss/policy")


class Seen(TrainerCallback):
    """Notes the gradients of each update."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []

    def on_pre_optimizer_step(self, *_: Any, model: Any, **kwargs: Any) -> None:
        named = model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in named if p.grad is not None})


class Rowwise(OneByOne):
    """Notes the lengths of the rows of each pass; may leave them where TRL has put them."""

    leaves_order = False

    @property
    def _is_sum_of_rows(self) -> bool:
        return not self.leaves_order and super()._is_sum_of_rows

    def _compute_loss(self, model: Any, inputs: Any) -> torch.Tensor:
        lengths = inputs["prompt_mask"].sum(dim=1) + inputs["completion_mask"].sum(dim=1)
        self.passes = [*getattr(self, "passes", []), lengths.tolist()]
        return super()._compute_loss(model, inputs)


TASKS = [*ROWS[:2], *({**row, "prompt": "What is the sum of two and three? " * 4} for row in ROWS[2:])]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        full(
            {
                "loss_type": "grpo",
                "beta": 0.1,
                "kl_hard_cap": None,
                "advantage_mode": "hybrid",
                "constants": RELYING_AT_ONCE,
                "peft_config": ADAPTER,
            }
        ),
        full({"steps_per_generation": 2, "per_device_train_batch_size": 8}),
    ],
    ids=["dapo", "grpo with values", "two batches"],
)
@pytest.mark.full
def test_an_update_is_the_same_whichever_rows_share_a_pass(
    tmp_path: Path, adding_model: str, changes: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "max_steps": 1,
        "max_completion_length": 150,
        "reward": rewards_by_place,
    }
    found, figures = [], []
    for leaves_order in (True, False):
        seen = Seen()
        torch.manual_seed(0)  # of the adapter
        with make_trainer(
            tmp_path,
            adding_model,
            Rowwise,
            rows=TASKS,
            callbacks=[seen],
            **{**settings, **changes},
        ) as trainer:
            trainer.leaves_order = leaves_order
            trainer.train()
        found.append((trainer.passes, seen.gradients[0]))
        figures.append({name: value for name, value in trainer.state.log_history[0].items() if name in OF_TOKENS})
    (as_drawn, expected), (passes, gradients) = found
    num_batches = 2 if "steps_per_generation" in changes else 1
    for batch_drawn, batch_passes in zip(_halves(as_drawn, num_batches), _halves(passes, num_batches), strict=True):
        assert batch_passes == sorted(batch_drawn, reverse=True) != batch_drawn
    assert sum(gradient.abs().sum() for gradient in expected.values()) > 0
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, atol=1e-5, rtol=1e-3)
    # What is said of an update is said of all of its tokens.
    assert figures[0] == pytest.approx(figures[1], rel=1e-3, abs=1e-4)


def _halves(passes: list[list[int]], num: int) -> list[list[int]]:
    size = len(passes) // num
    return [list(chain(*passes[first : first + size])) for first in range(0, len(passes), size)]


def test_rows_stay_where_they_are_if_a_pass_is_more_than_their_sum(tmp_path: Path, adding_model: str) -> None:
    with make_trainer(tmp_path, adding_model) as trainer:
        assert trainer._is_sum_of_rows
        for holder, name, value in [
            (trainer, "loss_type", "bnpo"),
            (trainer, "_entropy_bonus_enabled", True),
            (trainer, "aux_loss_enabled", True),
            (trainer.args, "bootstrap_steps", 5),
            (trainer.args, "top_entropy_quantile", 0.5),
        ]:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(holder, name, value)
                assert not trainer._is_sum_of_rows, name


@pytest.mark.parametrize(
    "wraps", [pytest.param(lambda model: model, id="rows"), pytest.param(Unpadded, id="unpadded")]
)
@pytest.mark.parametrize("is_adapted", [False, True])
def test_only_tokens_with_labels_are_read_by_the_head(wraps: Any, *, is_adapted: bool) -> None:
    torch.manual_seed(0)
    model: Any = tiny_model(family_tokenizer("qwen3"))
    add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    add_value_head(model)
    torch.nn.init.normal_(model.value_head.out.weight)
    if is_adapted:
        adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    inputs, read, found = batch(), [], []
    labels = inputs["labels"]
    labels[:, ::3] = -100  # tokens that tools wrote, and others that nobody asks for
    apply = ChunkedLogProbFunction.apply
    for is_labelled in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ChunkedLogProbFunction, "apply", lambda *args: read.append(len(args[0])) or apply(*args))
            called = wraps(LabelledOnly(model) if is_labelled else model)
            output = called(**inputs, fused_lm_head=True, num_values=max(COMPLETIONS))
        model.zero_grad()
        weights = torch.arange(labels[:, 1:].numel()).view_as(labels[:, 1:]) / 100
        ((output.log_probs + output.entropy) * weights).sum().add(output.value_preds.square().sum()).backward()
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert output.label_mask.sum() == (labels[:, 1:] != -100).sum()
        found.append((output.log_probs, output.entropy, output.is_top1 * 1.0, output.value_preds, gradients))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-4)
    assert found[0][0].count_nonzero() == read[1] == (labels[:, 1:] != -100).sum()
    assert read[0] > 2 * read[1]
    assert not (model.get_base_model() if is_adapted else model).base_model._forward_hooks


def test_rows_without_any_label_say_nothing_and_have_gradients_of_zero(model: Any) -> None:
    inputs = batch()
    inputs["labels"] = torch.full_like(inputs["labels"], -100)
    output = LabelledOnly(model)(**inputs, fused_lm_head=True)
    model.zero_grad()
    output.log_probs.sum().backward()
    assert output.log_probs.abs().sum() == 0
    assert all(each.grad is None or each.grad.abs().sum() == 0 for each in model.parameters())


@pytest.mark.parametrize("wraps", [LabelledOnly, lambda model: Unpadded(LabelledOnly(model))])
def test_where_trl_reads_only_labels_by_itself_it_is_left_to_that(
    model: Any, wraps: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mcp_grpo.learning.padding.head_reads_all", lambda device: False)
    given: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs.keys()), with_kwargs=True)
    try:
        wraps(model)(**batch(), fused_lm_head=True)
    finally:
        hook.remove()
    assert "labels" in given[0]
    assert "shift_labels" not in given[0]
