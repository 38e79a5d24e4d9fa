"""Writes an adapter before and after it is sharded over the processes."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcp_grpo.sampling.adapter_export import save_adapter


def whole(parameters: Any) -> Any:
    return nullcontext()  # where nothing has to be gathered beforehand


def run(folder: Path) -> None:
    is_main = torch.distributed.get_rank() == 0
    policy: Any = get_peft_model(
        tiny_model(family_tokenizer("qwen3")), LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 2})
    )
    torch.manual_seed(1)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    save_adapter(policy, folder / "whole", whole, is_writer=is_main)
    mesh = init_device_mesh("cpu", (2,))
    for layer in policy.get_base_model().model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    save_adapter(policy, folder / "sharded", whole, is_writer=is_main)
