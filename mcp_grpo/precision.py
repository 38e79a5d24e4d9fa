"""Double precision, for sums that must not round, and 16 bits, on CPUs that have no instructions for them."""

from typing import Any

import torch


# What says whether oneDNN, which multiplies on CPUs, has instructions for a type; other builds of PyTorch do not say.
_CHECKS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}


def in_double(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision: on its device, or on the CPU where that has none (Apple's MPS)."""
    return (tensor.cpu() if tensor.device.type == "mps" else tensor).double()


def is_slow_on_cpu(dtype: torch.dtype) -> bool:
    """Return whether this CPU has no instructions for a type, so that it takes many times as long as 32 bits."""
    check = getattr(torch.ops.mkldnn, _CHECKS[dtype], None) if dtype in _CHECKS else None
    return check is not None and not check()


def suited_to_cpu(model: Any) -> Any:
    """Return a model that stays on the CPU in 32 bits, if it is in 16 for which this CPU has no instructions."""
    is_slow = is_slow_on_cpu(model.dtype) and not getattr(model, "is_quantized", False)
    return model.float() if is_slow else model


def slowness_on_cpu(model: Any, mixed_precision: str) -> str | None:
    """Say that a model on a CPU is to be trained in 16 bits for which this CPU has no instructions: it looks as if it hung."""
    weights = model.get_input_embeddings().weight
    if weights.device.type != "cpu":
        return None
    autocast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed_precision)
    dtype = autocast or weights.dtype
    if not is_slow_on_cpu(dtype):
        return None
    name = str(dtype).removeprefix("torch.")
    remedy = "Set `bf16=False` and `fp16=False`" if autocast else 'Load the model with `dtype="float32"`'
    return (
        f"This CPU has no instructions for {name}: passes take many times as long as in float32. "
        f"{remedy}, or train where a GPU is."
    )
