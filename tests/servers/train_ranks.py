"""
Trains two steps on several processes. Arguments: the model, the output folder, the rank whose server dies, and settings in
JSON; with `peft` false, all weights are trained.
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

from datasets import Dataset
from helpers.ranks import share_weights_on_cpu
from helpers.sums import ROWS, SERVER, TEMPLATE_KWARGS
from peft import LoraConfig
from torch.distributed.tensor import DTensor

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, exact_answer


rewards = []


def reward(trajectory, **kwargs):
    rewards.append(exact_answer(trajectory))
    return rewards[-1]


model, folder, dying_rank, changes = sys.argv[1:]
rank = os.environ["RANK"]
changes = json.loads(changes)
has_adapter = changes.pop("peft", True)
if "fsdp" in changes:
    share_weights_on_cpu()
if "deepspeed" in changes:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")  # on a CPU `accelerate` leaves it out
config = MCPGRPOConfig(
    output_dir=folder,
    use_cpu=True,
    bf16=False,
    per_device_train_batch_size=4,
    num_generations=8,
    max_completion_length=400,
    max_steps=2,
    max_turns=3,
    **{"learning_rate": 1e-2, **changes},
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    chat_template_kwargs=TEMPLATE_KWARGS,
)
with MCPGRPOTrainer(
    model,
    reward,
    config,
    Dataset.from_list(ROWS),
    servers={"sums": {"command": sys.executable, "args": [str(SERVER), *(["--die"] if rank == dying_rank else [])]}},
    peft_config=LoraConfig(r=4, target_modules="all-linear") if has_adapter else None,
) as trainer:
    trainer.train()
parameters = {n: p for n, p in trainer.model.named_parameters() if p.requires_grad or ".ref." in n}
if "deepspeed" in changes:
    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        is_partitioned = any(p.ds_numel > p.ds_tensor.numel() for p in parameters.values())
        parameters = {n: p.detach().clone() for n, p in parameters.items()}
whole = {n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in parameters.items()}
weights = {n: p.double().sum().item() for n, p in whole.items()}
result = {
    "rewards": rewards,
    "history": trainer.state.log_history,
    "weights": weights,
    "tasks": [t.task_id for t in trainer._tasks],
    "is_sharded": any(isinstance(p, DTensor) for p in parameters.values())
    or ("deepspeed" in changes and is_partitioned),
}
Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
