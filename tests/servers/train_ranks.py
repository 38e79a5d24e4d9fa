"""
Trains two steps on several processes. Arguments: the model, the output folder, the rank whose server dies, and settings in
JSON.
"""

import json
import os
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

from datasets import Dataset
from helpers.sums import ROWS, SERVER, TEMPLATE_KWARGS
from peft import LoraConfig

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, exact_answer


rewards = []


def reward(trajectory, **kwargs):
    rewards.append(exact_answer(trajectory))
    return rewards[-1]


model, folder, dying_rank, changes = sys.argv[1:]
rank = os.environ["RANK"]
config = MCPGRPOConfig(
    output_dir=folder,
    use_cpu=True,
    bf16=False,
    per_device_train_batch_size=4,
    num_generations=8,
    max_completion_length=400,
    max_steps=2,
    max_turns=3,
    learning_rate=1e-2,
    report_to="none",
    save_strategy="no",
    logging_steps=1,
    chat_template_kwargs=TEMPLATE_KWARGS,
    **json.loads(changes),
)
with MCPGRPOTrainer(
    model,
    reward,
    config,
    Dataset.from_list(ROWS),
    servers={"sums": {"command": sys.executable, "args": [str(SERVER), *(["--die"] if rank == dying_rank else [])]}},
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
) as trainer:
    trainer.train()
weights = {n: p.double().sum().item() for n, p in trainer.model.named_parameters() if p.requires_grad or ".ref." in n}
result = {
    "rewards": rewards,
    "history": trainer.state.log_history,
    "weights": weights,
    "tasks": [t.task_id for t in trainer._tasks],
}
Path(folder, f"rank{rank}.json").write_text(json.dumps(result))
