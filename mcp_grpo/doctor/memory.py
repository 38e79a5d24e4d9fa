"""A rough estimate of the GPU memory that a run takes, against the card."""

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from mcp_grpo.config import MCPGRPOConfig
from mcp_grpo.doctor.findings import Findings
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.learning import activation_bytes
from mcp_grpo.trl_compat import get_peft_config


GIB = 2**30
BYTES_IN_4_BITS = 0.56  # of a weight, with the scales of its block


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """GiB that a run takes on each GPU, without sharding."""

    weights: float
    training: float  # gradients and the optimizer's averages
    activations: float
    vllm: float  # share of the card that vLLM takes for itself, from 0 to 1
    sleeps: bool  # so that vLLM gives its share back while the policy trains

    @property
    def certain(self) -> float:
        """Return what no batch size changes."""
        return self.weights + self.training

    def needed(self, card: float) -> float:
        """Return the most that is needed at a time on a card of this size."""
        learning = self.certain + self.activations
        return max(learning, self.certain + self.vllm * card) if self.sleeps else learning + self.vllm * card

    def __str__(self) -> str:
        vllm = (
            f", {self.vllm:.0%} of the card for vLLM{' (which sleeps meanwhile)' if self.sleeps else ''}"
            if self.vllm
            else ""
        )
        return (
            f"roughly {self.weights:.1f} GiB for weights, {self.training:.1f} for gradients and optimizer, "
            f"{self.activations:.1f} for activations{vllm}; an estimate, without sharding"
        )


def estimate_memory(policy: PretrainedConfig, config: MCPGRPOConfig, model: Any, prompt_tokens: int = 0) -> Estimate:
    """Estimate what a run takes, by the shapes of the model's weights."""
    with torch.device("meta"):
        shaped: Any = AutoModelForCausalLM.from_config(policy)
    head = shaped.get_output_embeddings()
    linear = sum(
        one.weight.numel() for one in shaped.modules() if isinstance(one, torch.nn.Linear) and one is not head
    )
    others = shaped.num_parameters() - linear
    per_weight = _bytes_of(model.dtype, policy)
    per_linear = BYTES_IN_4_BITS if model.load_in_4bit else 1.0 if model.load_in_8bit else per_weight
    weights = linear * per_linear + others * per_weight
    averages = 2.0 if "8bit" in str(config.optim) else None  # bytes of both averages of a weight
    if model.use_peft:
        trained = _adapter_size(shaped, model)
        training = trained * (4 + 4 + (averages or 8))  # the adapter itself, in float32, its gradients and averages
    else:
        training = (linear + others) * (per_weight + (averages or 2 * per_weight))
        weights *= 2 if config.beta > 0 else 1  # the reference
    tokens = config.per_device_train_batch_size * (prompt_tokens + (config.max_completion_length or 0))
    per_token = activation_bytes(policy)
    # What is needed at least: passes that fit go without checkpointing.
    activations = tokens * (per_token.computed_again if config.gradient_checkpointing else per_token.kept)
    is_inside = config.use_vllm and config.vllm_mode == "colocate"
    return Estimate(
        weights=weights / GIB,
        training=training / GIB,
        activations=activations / GIB,
        vllm=config.vllm_gpu_memory_utilization if is_inside else 0.0,
        sleeps=is_inside and config.vllm_enable_sleep_mode,
    )


def compare_memory(findings: Findings, estimate: Estimate, machine: Machine, *, is_sharded: bool = False) -> None:
    """Compare an estimate with the card."""
    if machine.gpu is None:
        findings.ok("gpu memory", f"{estimate}; there is no GPU here to compare it with")
        return
    needed, card = estimate.needed(machine.memory), machine.memory
    said = f"{needed:.1f} of {card:.1f} GiB: {estimate}"
    advice = (
        "Set `load_in_4bit`, `use_peft`, `gradient_checkpointing` or `vllm_enable_sleep_mode`; lower "
        "`per_device_train_batch_size`, `max_completion_length` or `vllm_gpu_memory_utilization`; or take a larger card."
    )
    if estimate.certain > card and not is_sharded:
        findings.fail("gpu memory", f"It does not fit: {said}.", advice)
    elif needed > card:
        findings.warn("gpu memory", f"It may not fit: {said}.", advice)
    else:
        findings.ok("gpu memory", said)


def is_sharded(config: MCPGRPOConfig) -> bool:
    """Return whether several GPUs share the weights, as the settings or `accelerate launch` have it."""
    launched = (os.environ.get(f"ACCELERATE_USE_{name}") == "true" for name in ("FSDP", "DEEPSPEED"))
    return bool(config.fsdp or config.deepspeed or getattr(config, "launch_with", None)) or any(launched)


def _bytes_of(dtype: Any, policy: PretrainedConfig) -> float:
    chosen = getattr(policy, "dtype", None) if dtype in (None, "auto") else getattr(torch, str(dtype), None)
    return float(cast("Any", chosen or torch.bfloat16).itemsize)


def _adapter_size(shaped: Any, model: Any) -> int:
    """Count the weights of the adapter of a run."""
    from peft import get_peft_model

    with torch.device("meta"):
        adapted = get_peft_model(shaped, cast("Any", get_peft_config(model)))
    return sum(one.numel() for one in adapted.parameters() if one.requires_grad)
