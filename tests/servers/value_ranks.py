"""Gradients of a policy and its value head on several processes, and on one."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from trl.trainer.utils import add_fused_lm_head

from mcp_grpo.learning import Checkpointing
from mcp_grpo.learning.checkpointing import DeviceMemory
from mcp_grpo.learning.value_head import ValueRecorder, add_value_head, load_value_head, save_value_head
from mcp_grpo.learning.values import turn_weights, value_loss


PROMPT, COMPLETION, ROWS = 5, 7, 8
VARIANTS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_unused": {"unused": True},
    "ddp_lora": {"lora": True},
    "ddp_lora_checkpointing": {"lora": True, "checkpointing": True},
    "ddp_lora_kept_by_one": {"lora": True, "checkpointing": True, "memory": {0: 10**12, 1: 10**3}},
    "ddp_lora_kept_by_all": {"lora": True, "checkpointing": True, "memory": {0: 10**12, 1: 10**12}},
    "ddp_lora_out_of_memory": {"lora": True, "checkpointing": True, "memory": {0: 10**12, 1: 10**12}, "fails": 0},
    "fsdp": {"sharded": True},
    "fsdp_lora": {"sharded": True, "lora": True},
}


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def policy(variant: dict[str, Any]) -> Any:
    """The same on every process: a model with a value head that has learnt something."""
    model: Any = tiny_model(family_tokenizer("qwen3"))
    if variant.get("lora"):
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear"))
    lm = model.get_base_model() if variant.get("lora") else model
    add_fused_lm_head(lm)
    add_value_head(model)
    with torch.no_grad():
        for index, (name, weight) in enumerate(model.named_parameters()):
            if "lora_" in name or "value_head" in name:
                weight.copy_(0.2 * numbers(*weight.shape, seed=index))
    if variant.get("checkpointing"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def loss_of(model: Any, rows: slice, num_processes: int) -> torch.Tensor:
    """A policy loss and a value loss over some rows of the batch, each with the denominator of all rows."""
    ids = torch.randint(0, 250, (ROWS, PROMPT + COMPLETION), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    for row in range(ROWS):  # padding of prompts on the left, of completions on the right
        mask[row, : row % 4] = 0
        mask[row, PROMPT + COMPLETION - row % 3 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :PROMPT] = -100
    turn_ids = torch.tensor([0, 0, -1, 1, -1, 2, 2]).expand(ROWS, -1).masked_fill(mask[:, PROMPT:] == 0, -1)
    advantages, returns = numbers(ROWS, COMPLETION, seed=1), numbers(ROWS, COMPLETION, seed=2)
    sampled = (turn_ids >= 0).float()
    recorder = ValueRecorder(model, COMPLETION)
    output = recorder(
        input_ids=ids[rows], attention_mask=mask[rows], labels=labels[rows], use_cache=False, fused_lm_head=True
    )
    logps = output.log_probs[:, -COMPLETION:]
    policy_loss = -(logps * advantages[rows] * sampled[rows]).sum() / (sampled.sum() / num_processes)
    values = recorder.values()
    num_turns = turn_weights(turn_ids, max_turns=3).sum() / num_processes
    return policy_loss + 0.5 * value_loss(values, returns[rows], turn_ids[rows], num_turns=num_turns, max_turns=3)


class Memory(DeviceMemory):
    """Memory of a device that is not here."""

    def __init__(self, size: int) -> None:
        self._size = size

    def free(self, device: torch.device) -> int:
        return self._size


def called(model: Any, variant: dict[str, Any]) -> Any:
    """What each process calls instead of a model, by its own memory; on one, activations that are kept do not fit after all."""
    if "memory" not in variant:
        return model
    layer = model.module.get_base_model().model.layers[-1]

    def fail(*_: Any) -> None:
        if not layer.gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    if variant.get("fails") == dist.get_rank():
        layer.register_forward_pre_hook(fail)
    return Checkpointing(is_possible=True, memory=Memory(variant["memory"][dist.get_rank()])).around(model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {
        name.removeprefix("module."): grad.full_tensor() if isinstance(grad, DTensor) else grad
        for name, grad in grads.items()
    }


def wrapped(model: Any, variant: dict[str, Any]) -> Any:
    if not variant.get("sharded"):
        return DistributedDataParallel(model, find_unused_parameters=variant.get("unused", False))
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    lm = model.get_base_model() if variant.get("lora") else model
    for layer in lm.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def differences(variant: dict[str, Any]) -> dict[str, Any]:
    """Largest difference from another process, and from one process alone, apart for the policy and the head."""
    world = dist.get_world_size()
    alone = policy(variant)
    loss_of(alone, slice(None), 1).backward()
    expected = gradients(alone)
    model = wrapped(policy(variant), variant)
    for _ in range(2):  # what one backward pass leaves undone shows in the next
        model.zero_grad()
        loss_of(called(model, variant), slice(dist.get_rank(), None, world), world).backward()
    found = gradients(model)
    assert found.keys() == expected.keys()
    results: dict[str, Any] = {"policy": 0.0, "head": 0.0, "ranks": 0.0, "policy_size": 0.0, "head_size": 0.0}
    for name, grad in found.items():
        part = "head" if "value_head" in name else "policy"
        results[part] = max(results[part], (grad - expected[name]).abs().max().item())
        results[f"{part}_size"] = max(results[f"{part}_size"], expected[name].abs().max().item())
        everyone = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(everyone, grad.contiguous())
        results["ranks"] = max(results["ranks"], *((grad - other).abs().max().item() for other in everyone))
    return results


def loads_into_shards(folder: Path) -> bool:
    """Whether a sharded head takes the weights of a whole one."""
    variant = VARIANTS["fsdp"]
    source = policy(variant).value_head
    with torch.no_grad():
        source.out.weight.fill_(4.0)
    if dist.get_rank() == 0:
        save_value_head(source, folder)
    dist.barrier()
    model = wrapped(policy(variant), variant)
    assert load_value_head(model.value_head, folder)
    found = {name: weight.full_tensor() for name, weight in model.value_head.state_dict().items()}
    return all(torch.equal(found[name], weight) for name, weight in source.state_dict().items())


def run(folder: Path) -> None:
    report: dict[str, Any] = {name: differences(variant) for name, variant in VARIANTS.items()}
    report["loads_into_shards"] = loads_into_shards(folder)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(report))
