"""
Trains for ever, for tests that interrupt it: for each line of stdin, in a process of its own that begins with everything
imported. A line has, in JSON, the model, the output folder and the server's arguments; the answers are the number of the
process, and how it ended.
"""

import json
import os
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


for line in sys.stdin:
    arguments = json.loads(line)
    pid = os.fork()
    if not pid:
        break
    sys.stdout.write(f"{pid}\n")
    sys.stdout.flush()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
    sys.stdout.flush()
else:
    sys.exit()

os.setsid()
model, folder, *server = arguments
log = os.open(Path(folder, "log"), os.O_WRONLY | os.O_CREAT)
for stream, source in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
    os.dup2(source, stream)
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
