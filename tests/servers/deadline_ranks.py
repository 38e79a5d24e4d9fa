"""A training that ends by time on several processes, whose clocks do not agree."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from transformers import TrainerControl, TrainerState, TrainingArguments, get_scheduler

from mcp_grpo.train.deadline import Deadline


MAX_STEPS = 60


def run(folder: Path) -> None:
    """Take steps that last longer with every rank, in as much time for each, and write where training ended."""
    rank, now, rates = dist.get_rank(), 0.0, []
    PartialState(cpu=True)
    args = TrainingArguments(
        str(folder), use_cpu=True, lr_scheduler_type="warmup_stable_decay", lr_scheduler_kwargs={"num_decay_steps": 8}
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(
        args.lr_scheduler_type, optimizer, 0, MAX_STEPS, scheduler_specific_kwargs=args.lr_scheduler_kwargs
    )
    state, control = TrainerState(max_steps=MAX_STEPS), TrainerControl()
    deadline = Deadline(100.0, 0.0, clock=lambda: now)
    deadline.on_train_begin(args, state, control, lr_scheduler=scheduler)
    while not control.should_training_stop:
        rates.append(scheduler.get_last_lr()[0])
        now += 5.0 + 5.0 * rank
        optimizer.step()
        scheduler.step()
        state.global_step += 1
        deadline.on_step_end(args, state, control)
    (folder / f"rank{rank}.json").write_text(json.dumps({"step": state.global_step, "rates": rates}))
