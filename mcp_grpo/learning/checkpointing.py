"""Gradient checkpointing only where memory asks for it: passes keep the activations of as many layers as fit."""

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType

from mcp_grpo.trl_compat import calling_instead, checkpointed_layers, without_checkpointing


KEEP_ACTIVATIONS = True  # of as many layers as fit; `False` computes them again, as `gradient_checkpointing` says
FILLED = 0.4  # of the memory that is free, at most, by the activations of a pass that keeps them; so that two runs on a GPU have room
# Values that a layer keeps for a token, by hidden and by inner width, two bytes each: measured on an H200 with Qwen3-0.6B, LoRA on all linear
# layers and bf16, where passes of 13,000 to 28,000 tokens took 0.16 to 0.20 MB a token with checkpointing, and 2.2 to 2.6 without.
PER_HIDDEN, PER_INNER = 18, 7
RECOMPUTED = 1.4  # layers' worth that is there at a time while activations are computed again
GIB = 2**30

logger = logging.getLogger(__name__)


class PerToken(NamedTuple):
    """Bytes that a pass with gradients takes for each token: if all is kept, if it is computed again, and of one layer."""

    kept: float
    computed_again: float
    layer: float


def activation_bytes(config: Any, itemsize: int = 2) -> PerToken:
    """
    Estimate what a token takes in a pass with gradients.

    Logits are not counted: they are never whole, and only those of what the policy sampled are computed.

    Args:
        config (`transformers.PretrainedConfig`):
            Configuration of the model.
        itemsize (`int`, *optional*, defaults to `2`):
            Bytes of a number of the type that layers compute in.

    Returns:
        [`PerToken`]: The bytes.
    """
    text = config.get_text_config()
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    inner = max(cast("Any", inner)) if isinstance(inner, list | tuple) else inner  # by layer, in some models
    layer = itemsize * (PER_HIDDEN * text.hidden_size + PER_INNER * inner)
    inputs = itemsize * text.hidden_size * text.num_hidden_layers
    return PerToken(layer * text.num_hidden_layers, inputs + RECOMPUTED * layer, layer)


class DeviceMemory:
    """Memory of a GPU, in bytes. Other devices do not say how much they have, which is `None`."""

    def free(self, device: torch.device) -> int | None:
        """Return what nobody has, such as what an engine that sleeps gave back, and what torch has and does not use."""
        if device.type != "cuda":
            return None
        free, total = torch.cuda.mem_get_info(device)
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return free + min(unused, total - free)

    def taken(self, device: torch.device) -> int:
        """Return what tensors take."""
        return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


class Checkpointing:
    """
    Lets a model that has gradient checkpointing go without it in passes that fit: no layer is computed twice there.

    A pass fits if its tokens take no more than `FILLED` of the memory that is free. Where not all layers fit, as many as do keep their
    activations, the last ones, if each can choose for itself. How much a token takes is an estimate, until a pass has shown it; the longest
    one counts. Where a pass that keeps activations leaves too little memory for its backward pass, it is run again with checkpointing in
    all layers, before anything was learnt from it; where it runs out of memory, too, and then no other one goes without. Running out in the
    backward pass ends the run: gradients are half added by then. Numbers are the same either way.

    DeepSpeed and FSDP are left as they are. Both fetch weights layer by layer, again where a layer is computed again, in an order that all
    processes must keep; and these would choose by their own memory. FSDP has a checkpointing of its own beside it. With plain data
    parallelism each process may choose for itself. Compiled models are left as they are, too: each choice would be another graph.

    Args:
        is_possible (`bool`):
            Whether activations may be kept.
        memory ([`DeviceMemory`], *optional*):
            Knows what is free.

    Attributes:
        sentences (`dict[str, str]`):
            What was chosen so far, and why; empty where there was nothing to choose.
    """

    def __init__(self, *, is_possible: bool, memory: DeviceMemory | None = None) -> None:
        self._is_possible = is_possible
        self._keeps = KEEP_ACTIVATIONS
        self._memory = memory or DeviceMemory()
        # By whether activations were kept: tokens of the longest pass, and the bytes that it left to the backward pass.
        self._measured: dict[bool, tuple[int, float]] = {}
        self.sentences: dict[str, str] = {}

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Checkpointing":
        """Return that of a run on the processes that an accelerator knows."""
        is_whole = accelerator.distributed_type not in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        return cls(is_possible=is_whole)

    def around(self, model: Any) -> Any:
        """Return what to call instead of a model; outside of passes with gradients and where memory is not known, itself."""
        bare = getattr(model, "module", model)
        if not (torch.is_grad_enabled() and bare.training):
            return model
        if hindrance := self._hindrance(model, bare):
            if getattr(bare, "is_gradient_checkpointing", False):
                self.sentences["activations"] = f"Gradient checkpointing is left on: {hindrance}."
            return model

        def call(**inputs: Any) -> Any:
            # Inside of what wraps the model: with several processes, that may not be called twice by one of them.
            with calling_instead(bare, lambda forward: lambda **kwargs: self._run(bare, forward, kwargs)):
                return model(**inputs)

        return call

    def _hindrance(self, model: Any, bare: Any) -> str | None:
        """Say why no pass of a model may choose."""
        if not self._is_possible:
            return "with DeepSpeed and FSDP all processes must go the same way"
        if any(hasattr(each, "_orig_mod") for each in model.modules()):
            return "the model is compiled"
        if self._memory.free(_device(bare)) is None:
            return "this device does not tell how much memory is free"
        return None

    def _run(self, model: Any, forward: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """Run a pass in the way that fits."""
        if not model.is_gradient_checkpointing:
            return self._measured_run(model, forward, inputs, _num_layers(model))
        num_kept = self._num_kept(model, inputs["input_ids"])
        output = self._kept(model, forward, inputs, num_kept) if num_kept else None
        return self._measured_run(model, forward, inputs, 0) if output is None else output

    def _num_kept(self, model: Any, ids: torch.Tensor) -> int:
        """Return how many layers have room for their activations."""
        device, num_tokens = ids.device, ids.numel()
        free = self._memory.free(device)
        if free is None or not self._keeps:
            return 0
        kept, again = (num_tokens * self._per_token(model, device, is_kept) for is_kept in (True, False))
        for_backward, limit = self._for_backward(model, num_tokens, device), FILLED * free
        needed, num_layers = kept + for_backward, _num_layers(model)
        taken = (
            f"activations of {num_tokens:,} tokens take about {needed / GIB:.1f} of {free / GIB:.1f} GiB that are free"
        )
        if needed <= limit:
            self.sentences.setdefault(
                "activations kept", f"A pass goes without gradient checkpointing, for it fits: {taken}."
            )
            return num_layers
        num_kept = 0
        if (
            kept > again and len(checkpointed_layers(model)) == num_layers
        ):  # of others, it is not known what each takes
            num_kept = max(0, math.floor(num_layers * (limit - for_backward - again) / (kept - again)))
        where = f" in {num_layers - num_kept} of {num_layers} layers" if num_kept else ""
        self.sentences.setdefault(
            "activations of some layers kept" if num_kept else "activations computed again",
            f"A pass has gradient checkpointing{where}, for all its {taken}, more than {100 * FILLED:.0f} %.",
        )
        return num_kept

    def _kept(self, model: Any, forward: Callable[..., Any], inputs: dict[str, Any], num_kept: int) -> Any:
        """Run a pass in which so many layers keep their activations; return `None` if they do not fit after all."""
        ids = inputs["input_ids"]
        try:
            with without_checkpointing(model, None if num_kept == _num_layers(model) else num_kept):
                output = self._measured_run(model, forward, inputs, num_kept)
        except torch.OutOfMemoryError as error:
            self._keeps = False
            reason = str(error).splitlines()[:1]
            logger.warning(
                "A pass that keeps activations did not fit; from now on, all have gradient checkpointing. %s", *reason
            )
            return None
        left = self._memory.free(ids.device)
        return output if left is None or left >= self._for_backward(model, ids.numel(), ids.device) else None

    def _measured_run(self, model: Any, forward: Callable[..., Any], inputs: dict[str, Any], num_kept: int) -> Any:
        """Run a pass, and remember what it took, of which so many layers kept their activations."""
        device, num_tokens = inputs["input_ids"].device, inputs["input_ids"].numel()
        before = self._memory.taken(device)
        output = forward(**inputs)
        taken: float = self._memory.taken(device) - before
        if num_kept:  # what the other layers would have taken, too
            others = 1 - num_kept / _num_layers(model)
            estimated = activation_bytes(model.config, _itemsize(model, device)).kept
            taken += others * num_tokens * (estimated - self._per_token(model, device, False))
        is_kept = num_kept > 0
        if taken > 0 and num_tokens >= self._measured.get(is_kept, (0, 0))[0]:
            self._measured[is_kept] = num_tokens, taken
        return output

    def _per_token(self, model: Any, device: torch.device, is_kept: bool) -> float:
        """Return the bytes that a forward pass leaves to the backward pass, for each token."""
        if is_kept in self._measured:
            num_tokens, taken = self._measured[is_kept]
            return taken / num_tokens
        per_token = activation_bytes(model.config, _itemsize(model, device))
        return per_token.kept if is_kept else per_token.computed_again - RECOMPUTED * per_token.layer

    def _per_layer(self, model: Any, device: torch.device) -> float:
        """Return those of one layer."""
        estimated = activation_bytes(model.config, _itemsize(model, device)).layer
        num_tokens, taken = self._measured.get(True, (1, 0))
        return max(estimated, taken / num_tokens / _num_layers(model))

    def _for_backward(self, model: Any, num_tokens: int, device: torch.device) -> float:
        """Return what a backward pass takes beside what the forward pass left."""
        return _new_gradients(model) + RECOMPUTED * num_tokens * self._per_layer(model, device)


def _new_gradients(model: Any) -> int:
    """Return the bytes of the gradients of weights that have none yet."""
    weights = (each for each in model.parameters() if each.requires_grad and each.grad is None)
    return sum(each.numel() * each.element_size() for each in weights)


def _num_layers(model: Any) -> int:
    return model.config.get_text_config().num_hidden_layers


def _device(model: Any) -> torch.device:
    return model.get_input_embeddings().weight.device


def _itemsize(model: Any, device: torch.device) -> int:
    """Return the bytes of a number of the type that a model computes in."""
    if torch.is_autocast_enabled(device.type):
        return torch.get_autocast_dtype(device.type).itemsize
    return model.get_input_embeddings().weight.dtype.itemsize
