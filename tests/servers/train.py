"""Trains for ever, for tests that interrupt it: a model, in an output folder, on a server with the given arguments."""

import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

from datasets import Dataset
from helpers.sums import ROWS, TEMPLATE_KWARGS
from transformers import TrainerCallback

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, exact_answer


class Announce(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        Path(args.output_dir, "started").write_text("started")


model, folder, *server = sys.argv[1:]
config = MCPGRPOConfig(
    output_dir=folder,
    use_cpu=True,
    bf16=False,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=3000,
    max_steps=1000,
    report_to="none",
    save_strategy="no",
    chat_template_kwargs=TEMPLATE_KWARGS,
)
MCPGRPOTrainer(
    model,
    exact_answer,
    config,
    Dataset.from_list(ROWS),
    servers={"sums": {"command": sys.executable, "args": server}},
    callbacks=[Announce()],
).train()
