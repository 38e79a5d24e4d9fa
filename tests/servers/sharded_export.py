"""Writes an adapter before and after it is sharded over the processes. Argument: the folder to write to."""

import sys
from contextlib import nullcontext
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from helpers.families import family_tokenizer
from helpers.policies import tiny_model
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mcp_grpo.rollout.adapter_export import save_adapter


torch.distributed.init_process_group("gloo")
folder, is_main = Path(sys.argv[1]), torch.distributed.get_rank() == 0
policy = get_peft_model(
    tiny_model(family_tokenizer("qwen3")), LoraConfig(r=4, target_modules="all-linear", rank_pattern={"q_proj": 2})
)
torch.manual_seed(1)
for name, parameter in policy.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter)


def whole(parameters):
    return nullcontext()  # where nothing has to be gathered beforehand


save_adapter(policy, folder / "whole", whole, is_writer=is_main)
mesh = init_device_mesh("cpu", (2,))
for layer in policy.get_base_model().model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(policy, mesh=mesh)
save_adapter(policy, folder / "sharded", whole, is_writer=is_main)
torch.distributed.destroy_process_group()
