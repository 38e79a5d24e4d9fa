"""References of policies whose parameters are shared out over the processes. Arguments: the output folder, and `zero3`."""

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from helpers.references import IDS, KINDS, full, logps, with_lora
from peft import PeftModel
from torch import nn
from torch.distributed.fsdp import fully_shard
from trl.trainer.utils import use_adapter

from mcp_grpo.learning.reference import MovingReference


def run(folder: Path, kind: str = "fsdp2") -> None:
    for what in KINDS:
        (folder / what / "whole").mkdir(parents=True, exist_ok=True)
        result = follow(kind, what, folder / what)
        if torch.distributed.get_rank() == 0:
            (folder / what / "result.json").write_text(json.dumps(result))


def sharded(kind: str, policy: nn.Module, reference: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Split the parameters of both over the processes; the policy may also be the reference."""
    if kind == "fsdp2":
        layers = policy.get_base_model().model.layers if isinstance(policy, PeftModel) else policy.model.layers
        for layer in layers:
            fully_shard(layer)
        fully_shard(policy)
        if reference is not policy:
            fully_shard(reference)
        return policy, reference
    import deepspeed

    # Small parameters stay whole on every process.
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 40},
    }
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    optimizer = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=policy, model_parameters=trained, config=config | optimizer)
    if reference is policy:
        return engine, engine
    is_half = next(reference.parameters()).dtype is torch.bfloat16
    return engine, deepspeed.initialize(model=reference, config=config | {"bf16": {"enabled": is_half}})[0]


def follow(kind: str, what: str, folder: Path) -> dict[str, Any]:
    """Train a sharded policy, move its reference and that of a copy which is not sharded, and tell them apart."""
    is_lora = what == "lora"
    policy = (with_lora(init_lora_weights=False, lora_dropout=0.0) if is_lora else full()).train()
    reference = policy if is_lora else full(getattr(torch, what))
    whole_policy = copy.deepcopy(policy)
    whole_reference = whole_policy if is_lora else copy.deepcopy(reference)
    whole = MovingReference(whole_policy, None if is_lora else whole_reference, decay=0.9)
    moving = MovingReference(policy, None if is_lora else reference, decay=0.9)  # sharded later, as in a trainer
    trained, reference = sharded(kind, policy, reference)
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], 0.1) if kind == "fsdp2" else None

    def gap() -> float:
        found = []
        for model in (reference, whole_reference):
            with use_adapter(getattr(model, "module", model), "ref") if is_lora else torch.no_grad():
                found.append(logps(model))
        return (found[0] - found[1]).abs().max().item()

    differences, gaps = [], []
    for _ in range(3):
        loss = trained(input_ids=IDS, labels=IDS).loss
        if optimizer is None:
            trained.backward(loss)
            trained.step()
        else:
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for name, value in whole_parameters(kind, policy):
                whole_policy.get_parameter(name).copy_(value)
        gaps.append(gap())  # and a forward pass leaves some of the parameters whole
        differences.append((moving.difference(), whole.difference()))
        moving.sync()
        whole.sync()
    moving.save(folder)
    torch.distributed.barrier()
    resumed = MovingReference(policy, None if is_lora else reference, decay=0.9)
    resumed.load(folder)
    resumed.sync()
    whole.sync()
    gaps.append(gap())
    resumed.save(folder)
    whole.save(folder / "whole")
    return {"differences": differences, "gaps": gaps, "num_syncs": resumed.num_syncs}


def whole_parameters(kind: str, model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    if kind == "fsdp2":
        return [
            (name, value.full_tensor() if hasattr(value, "full_tensor") else value)
            for name, value in model.state_dict().items()
            if ".ref." not in name and name != "lm_head.weight" and not name.endswith("model.lm_head.weight")
        ]
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return [(name, value.clone()) for name, value in model.named_parameters() if ".ref." not in name]


if __name__ == "__main__":
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    run(Path(sys.argv[1]), sys.argv[2])
    torch.distributed.destroy_process_group()
