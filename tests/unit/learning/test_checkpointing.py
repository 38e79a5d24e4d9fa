"""Gradient checkpointing only in passes that would not fit without: the same numbers either way, to the bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from trl.trainer import add_fused_lm_head

from mcp_grpo.learning import Checkpointing, PromptSharing, SharedPrompts, Unpadded, activation_bytes
from mcp_grpo.learning.checkpointing import FILLED, RECOMPUTED, DeviceMemory


PLENTY, LITTLE = 10**12, 10**3
NUM_TOKENS = 12


class Memory(DeviceMemory):
    """Memory of a device that is not here. A pass takes `per_pass` of it, once it has begun."""

    def __init__(self, free: int | None, per_pass: int = 0) -> None:
        self.is_free, self.per_pass, self.num_asked = free, per_pass, 0

    def free(self, device: torch.device) -> int | None:
        return self.is_free

    def taken(self, device: torch.device) -> int:
        self.num_asked += 1
        return self.per_pass * self.num_asked  # once before a pass, once after it


def policy(*, adapter: bool = False, reentrant: bool = False, num_layers: int = 2) -> Any:
    """A model with gradient checkpointing, as a trainer has it, that counts how often its first layer is computed."""
    model: Any = tiny_model(family_tokenizer("qwen3"), num_hidden_layers=num_layers)
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    first = model.model.layers[0]
    if adapter:
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    model.times = []
    first.register_forward_pre_hook(lambda *call: model.times.append(1))
    return model.train()


def rows(width: int = 60) -> dict[str, torch.Tensor]:
    """Four rows, each two of which begin alike, with completions of 12 tokens."""
    torch.manual_seed(1)
    ids = torch.randint(5, 250, (4, width))
    ids[1, :-NUM_TOKENS], ids[3, :-NUM_TOKENS] = ids[0, :-NUM_TOKENS], ids[2, :-NUM_TOKENS]
    labels = ids.clone()
    labels[:, :-NUM_TOKENS] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def learnt(model: Any, called: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, list[torch.Tensor]]:
    """How often a layer was computed in a pass and its backward pass, and the loss and the gradients."""
    model.zero_grad()
    model.times.clear()
    output = called(**inputs, fused_lm_head=True)
    loss = (output.log_probs[:, -NUM_TOKENS:] * torch.arange(NUM_TOKENS)).sum() + output.entropy.sum()
    loss.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    assert sum(each.abs().sum() for each in gradients) > 0
    return len(model.times), [loss.detach(), *gradients]


def times_computed(model: Any, checkpointing: Checkpointing, width: int = 60) -> int:
    return learnt(model, checkpointing.around(model), rows(width))[0]


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared prompts", "rows"])
@pytest.mark.parametrize(
    "how", [{}, {"adapter": True}, {"reentrant": True}], ids=["all weights", "adapter", "reentrant"]
)
def test_numbers_are_the_same_to_the_bit(how: dict[str, bool], is_shared: bool) -> None:
    model = policy(**how)
    assert PromptSharing(True).is_possible(model)
    found = []
    for free, expected in ((PLENTY, 1), (LITTLE, 2), (None, 2)):
        called = Checkpointing(is_possible=True, memory=Memory(free)).around(model)
        stand_in = SharedPrompts(called, Unpadded(None), NUM_TOKENS) if is_shared else Unpadded(called)
        times, numbers = learnt(model, stand_in, rows())
        assert times == expected
        found.append(numbers)
    assert all(torch.equal(*each) for other in found[1:] for each in zip(found[0], other, strict=True))


def test_it_knows_in_words_what_fits() -> None:
    model, memory = policy(), Memory(LITTLE)
    checkpointing = Checkpointing(is_possible=True, memory=memory)
    assert not checkpointing.sentences
    for free in (LITTLE, LITTLE, PLENTY, PLENTY):
        memory.is_free = free
        times_computed(model, checkpointing)
    many, few = checkpointing.sentences.values()
    assert many.startswith("A pass has gradient checkpointing, for all its activations of 240 tokens take about")
    assert few.startswith("A pass goes without gradient checkpointing, for it fits: activations of 240 tokens")


@pytest.mark.parametrize(
    ("is_possible", "reason"),
    [(False, "with DeepSpeed and FSDP"), (True, "does not tell how much memory is free")],
    ids=["sharded", "unknown memory"],
)
def test_it_knows_in_words_why_checkpointing_stays_on(is_possible: bool, reason: str) -> None:
    model = policy()
    checkpointing = Checkpointing(is_possible=is_possible, memory=Memory(None))
    assert times_computed(model, checkpointing) == 2
    (sentence,) = checkpointing.sentences.values()
    assert sentence.startswith("Gradient checkpointing is left on: ")
    assert reason in sentence
    model.gradient_checkpointing_disable()
    without = Checkpointing(is_possible=is_possible, memory=Memory(None))
    assert times_computed(model, without) == 1
    assert not without.sentences  # there is nothing to choose


class Layers:
    """Counts how often each layer of a model is computed."""

    def __init__(self, model: Any) -> None:
        self.times = [0] * len(model.model.layers)
        for number, layer in enumerate(model.model.layers):
            layer.register_forward_pre_hook(lambda *call, number=number: self.add(number))

    def add(self, number: int) -> None:
        self.times[number] += 1

    def take(self) -> list[int]:
        times, self.times = self.times, [0] * len(self.times)
        return times


def free_for(model: Any, num_layers: float, num_tokens: int = 240) -> int:
    """Memory with room for the activations of some layers."""
    per_token = activation_bytes(model.config, 4)
    again = per_token.computed_again - RECOMPUTED * per_token.layer
    share = num_layers / model.config.num_hidden_layers
    gradients = sum(each.numel() * 4 for each in model.parameters() if each.requires_grad)
    forward = share * per_token.kept + (1 - share) * again
    return round((num_tokens * (forward + RECOMPUTED * per_token.layer) + gradients) / FILLED)


@pytest.mark.parametrize("is_shared", [True, False], ids=["shared prompts", "rows"])
@pytest.mark.parametrize(
    "how", [{}, {"adapter": True}, {"reentrant": True}], ids=["all weights", "adapter", "reentrant"]
)
def test_the_last_layers_keep_their_activations_where_not_all_fit(how: dict[str, bool], is_shared: bool) -> None:
    model = policy(**how, num_layers=4)
    assert PromptSharing(True).is_possible(model)
    layers = Layers(model.get_base_model() if how.get("adapter") else model)
    found = []
    # Prompts that are shared are run once: two of 48 tokens, and twelve of each row.
    num_tokens = 2 * 48 + 4 * 12 if is_shared else 240
    for num_kept, expected in ((0.9, [2, 2, 2, 2]), (1.1, [2, 2, 2, 1]), (3.5, [2, 1, 1, 1]), (4.1, [1, 1, 1, 1])):
        memory = Memory(free_for(model, num_kept, num_tokens))
        called = Checkpointing(is_possible=True, memory=memory).around(model)
        stand_in = SharedPrompts(called, Unpadded(None), NUM_TOKENS) if is_shared else Unpadded(called)
        found.append(learnt(model, stand_in, rows())[1])
        assert layers.take() == expected
    assert all(torch.equal(*each) for other in found[1:] for each in zip(found[0], other, strict=True))


def test_it_says_in_how_many_layers_a_pass_has_checkpointing() -> None:
    model = policy(num_layers=4)
    checkpointing = Checkpointing(is_possible=True, memory=Memory(free_for(model, 3.5)))
    times_computed(model, checkpointing)
    (sentence,) = checkpointing.sentences.values()
    assert sentence.startswith(
        "A pass has gradient checkpointing in 1 of 4 layers, for all its activations of 240 tokens"
    )
    assert sentence.endswith(", more than 40 %.")


def test_a_pass_of_which_some_layers_were_kept_shows_how_much_a_token_takes() -> None:
    model = policy(num_layers=4)
    layers, memory = Layers(model), Memory(free_for(model, 3.5))
    checkpointing = Checkpointing(is_possible=True, memory=memory)
    taken = 1.3 * activation_bytes(model.config, 4).layer  # of a layer for a token: more than is estimated
    memory.per_pass = round(240 * 3 * taken)
    times_computed(model, checkpointing)
    assert layers.take() == [2, 1, 1, 1]
    times_computed(model, checkpointing)
    assert layers.take() == [2, 2, 1, 1]


def test_what_a_pass_takes_beside_its_layers_counts_once() -> None:
    model = policy(num_layers=4)
    layers, memory = Layers(model), Memory(free_for(model, 1.5))
    checkpointing = Checkpointing(is_possible=True, memory=memory)
    per_token = activation_bytes(model.config, 4)
    again = per_token.computed_again - RECOMPUTED * per_token.layer
    beside = 0.2 * per_token.layer
    memory.per_pass = round(240 * (per_token.kept / 4 + 3 / 4 * again + beside))
    times_computed(model, checkpointing)
    assert layers.take() == [2, 2, 2, 1]
    memory.is_free = round(free_for(model, 4.1) + 240 * (beside + RECOMPUTED * beside / 4) / FILLED)
    times_computed(model, checkpointing)
    assert layers.take() == [1, 1, 1, 1]


def test_layers_that_do_not_all_choose_for_themselves_go_the_same_way() -> None:
    model = policy(num_layers=4)
    model.model.layers[0].gradient_checkpointing = False  # as with `every_n_layers`
    layers = Layers(model)
    times_computed(model, Checkpointing(is_possible=True, memory=Memory(free_for(model, 3.5))))
    assert layers.take() == [1, 2, 2, 2]


def test_a_pass_shows_how_much_a_token_takes() -> None:
    model = policy()
    estimated = 240 * activation_bytes(model.config, 4).kept
    free = round(8 * estimated)
    checkpointing = Checkpointing(is_possible=True, memory=Memory(free, per_pass=6 * round(estimated)))
    assert times_computed(model, checkpointing) == 1
    assert times_computed(model, checkpointing) == 2


def test_a_short_pass_says_less_than_a_long_one() -> None:
    model = policy()
    memory = Memory(PLENTY, per_pass=10**6)
    checkpointing = Checkpointing(is_possible=True, memory=memory)
    times_computed(model, checkpointing)
    memory.per_pass = 10**11
    assert times_computed(model, checkpointing, width=30) == 1
    assert times_computed(model, checkpointing) == 1


def test_a_pass_that_leaves_no_room_for_its_backward_pass_is_run_again() -> None:
    model, memory = policy(), Memory(PLENTY)
    checkpointing = Checkpointing(is_possible=True, memory=memory)
    _, expected = learnt(model, model, rows())
    model.model.layers[-1].register_forward_hook(lambda *call: setattr(memory, "is_free", LITTLE))
    times, found = learnt(model, checkpointing.around(model), rows())
    assert times == 3  # kept, again, and again in the backward pass
    assert all(map(torch.equal, found, expected))


def test_running_out_of_memory_turns_checkpointing_on_for_good(caplog: pytest.LogCaptureFixture) -> None:
    model = policy()
    checkpointing = Checkpointing(is_possible=True, memory=Memory(PLENTY))
    _, expected = learnt(model, model, rows())

    def fail(layer: Any, *call: Any) -> None:
        if not layer.gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB.\nMore.")

    model.model.layers[-1].register_forward_pre_hook(fail)
    _, found = learnt(model, checkpointing.around(model), rows())
    assert all(map(torch.equal, found, expected))
    assert caplog.messages == [
        "A pass that keeps activations did not fit; from now on, all have gradient checkpointing. "
        "CUDA out of memory. Tried to allocate 3 GiB."
    ]
    assert times_computed(model, checkpointing) == 2
    assert len(caplog.messages) == 1


def test_a_model_is_as_it_was_after_an_error() -> None:
    model = policy()
    before = dict(vars(model))
    model.model.layers[0].gradient_checkpointing = False  # as with `every_n_layers`
    hook = model.model.layers[1].register_forward_pre_hook(lambda *call: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        times_computed(model, Checkpointing(is_possible=True, memory=Memory(PLENTY)))
    hook.remove()
    assert vars(model) == before
    assert [layer.gradient_checkpointing for layer in model.model.layers][:2] == [False, True]


@pytest.mark.parametrize("kind", [DistributedType.FSDP, DistributedType.DEEPSPEED])
def test_weights_that_are_shared_out_are_left_alone(kind: DistributedType) -> None:
    model = policy()
    accelerator: Any = SimpleNamespace(distributed_type=kind)
    assert Checkpointing.of(accelerator).around(model) is model


def test_there_is_nothing_to_choose_without_gradients_or_knowledge_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model = policy()
    checkpointing = Checkpointing(is_possible=True, memory=Memory(PLENTY))
    assert checkpointing.around(model) is not model
    with torch.no_grad():
        assert checkpointing.around(model) is model
    assert checkpointing.around(model.eval()) is model
    model.train()
    assert Checkpointing(is_possible=True, memory=Memory(None)).around(model) is model
    monkeypatch.setattr("mcp_grpo.learning.checkpointing.KEEP_ACTIVATIONS", False)
    assert times_computed(model, Checkpointing(is_possible=True, memory=Memory(PLENTY))) == 2
    model.gradient_checkpointing_disable()
    assert times_computed(model, Checkpointing(is_possible=True, memory=Memory(LITTLE))) == 1


def test_a_device_that_does_not_say_what_is_free_has_checkpointing() -> None:
    assert DeviceMemory().free(torch.device("cpu")) is None
    model = policy()
    assert times_computed(model, Checkpointing(is_possible=True)) == 2
