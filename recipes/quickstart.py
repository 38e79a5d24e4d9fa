# /// script
# requires-python = ">=3.11"
# dependencies = ["mcp-grpo"]
# ///
"""
Train a small model to use the tools of two real MCP servers, on a laptop, in minutes.

    make quickstart

or, in an environment that has mcp_grpo:

    accelerate launch recipes/quickstart.py

Nothing is downloaded. A Qwen3 of half a million parameters, which comes with the recipe, was warmed up on scripted
solutions until it calls tools in the right form but often picks the wrong one. GRPO then trains an adapter on what the
servers really answer: questions about a company's directory that take one to three calls, each using the result of the
one before.
"""

import os


os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave the cores to others; before torch comes
if __name__ == "__main__":
    print("Loading torch, transformers and TRL ...", flush=True)  # they take several seconds

import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import anyio
import psutil
import rich
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from recipe_parts.command_line import StrictParser
from transformers import ProgressCallback

from mcp_grpo import (
    MCPGRPOConfig,
    MCPGRPOTrainer,
    ToolPool,
    TrainingProgress,
    comparison_table,
    exact_answer,
    fault_penalty,
    summarize,
)
from mcp_grpo.errors import MCPGRPOError
from mcp_grpo.monitor import METRICS_FILE, MetricsFile
from mcp_grpo.policy_evaluation import baselines
from mcp_grpo.quickstart.model import build_model, build_tokenizer
from mcp_grpo.quickstart.servers import SERVERS
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.quickstart.warm_start import SEED, WARM_START, WHAT_TO_RUN, fits_world
from mcp_grpo.quickstart.warmup import CHAT_TEMPLATE_KWARGS, warm_up
from mcp_grpo.sampling.threads import choose_threads
from mcp_grpo.tasks import tasks_from_rows


ADAPTER = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
# What the recipe promises, on tasks it was not trained on.
MAX_SUCCESS_BEFORE = 0.6
MIN_SUCCESS_AFTER = 0.9


@dataclass
class Arguments:
    """Arguments of the quickstart."""

    seed: int = field(default=0, metadata={"help": "Seed of the training."})
    output_dir: str = field(default="outputs/quickstart", metadata={"help": "Where the adapter and the report go."})
    max_steps: int = field(default=30, metadata={"help": "Optimizer steps of GRPO."})
    num_held_out: int = field(default=120, metadata={"help": "Number of tasks to judge by, before and after."})


def main(arguments: Arguments) -> bool:
    """Train from the warm start, and report."""
    transformers.utils.logging.disable_progress_bar()  # of loading and saving a file
    output_dir = Path(arguments.output_dir)
    train_rows, held_out_rows = build_tasks(num_held_out=arguments.num_held_out)
    print(f"Starting two MCP servers: {' and '.join(SERVERS['mcpServers'])}.")
    base = copy_base_model(train_rows, output_dir / "base")

    config = make_config(output_dir, arguments.seed, max_steps=arguments.max_steps)
    with MCPGRPOTrainer(
        base,
        reward_funcs=[exact_answer, fault_penalty],
        args=config,
        train_dataset=Dataset.from_list(train_rows),
        servers=SERVERS,
        peft_config=ADAPTER,
        callbacks=[MetricsFile(output_dir / METRICS_FILE)],  # for `mcp-grpo dashboard`
    ) as trainer:
        trainer.remove_callback(ProgressCallback)
        trainer.add_callback(TrainingProgress(success="exact_answer"))
        held_out = Dataset.from_list(held_out_rows)
        print(f"Attempting {len(held_out)} held-out tasks twice each, before training.")
        before = summarize(trainer.roll_out(held_out, num_generations=2))
        print(f"Solved before training: {before.success:.0%}")
        num_attempts, num_tasks = config.per_device_train_batch_size, len(train_rows)
        print(f"Training for {config.max_steps} steps, each on {num_attempts} attempts at some of {num_tasks} tasks.")
        trainer.train()
        print("Attempting the held-out tasks again.")
        after = summarize(trainer.roll_out(held_out, num_generations=2))
        print(f"Solved after training: {after.success:.0%}")
        trainer.add_baselines(baselines(tasks_from_rows(with_solutions(held_out_rows)), SERVERS))
        trainer.add_results(
            before, after, f"In {before.num_trajectories} attempts at held-out tasks, with seed {arguments.seed}:"
        )
        trainer.save_model()

    summary = {
        "success_before": before.success,
        "success_after": after.success,
        "seconds": time.time() - psutil.Process().create_time(),
        "threads": torch.get_num_threads(),
        "seed": arguments.seed,
        "before": asdict(before),
        "after": asdict(after),
    }
    (output_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    rich.print(comparison_table(before, after, title="Held-out tasks, before and after GRPO"))
    print(
        f"Took {summary['seconds']:.0f} s. Curves: {output_dir}/curves.png, figures: {output_dir}/summary.json. "
        "Load the adapter with:\n\n"
        "    from mcp_grpo import load_adapter\n"
        f'    model, tokenizer = load_adapter("{output_dir}")\n\n'
        f"See what it did in the last step with: mcp-grpo replay {output_dir}\n"
        f"Write a page about the run with:       mcp-grpo report {output_dir}"
    )
    return before.success <= MAX_SUCCESS_BEFORE and after.success >= MIN_SUCCESS_AFTER


def make_config(output_dir: Path, seed: int, **settings: Any) -> MCPGRPOConfig:
    """Return the settings of the training, with changes."""
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 2e-3,
        "warmup_steps": 2,
        "per_device_train_batch_size": 64,
        "num_generations": 8,
        "gradient_checkpointing": False,  # a model this small has the memory
        "max_completion_length": 200,
        "scale_rewards": "none",
        "chat_template_kwargs": CHAT_TEMPLATE_KWARGS,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
    }
    return MCPGRPOConfig(output_dir=str(output_dir), seed=seed, **defaults | settings)


def copy_base_model(rows: list[dict], folder: Path) -> str:
    """Copy the warm start into the folder of the run, or make another one if it does not fit the tasks and tools."""
    tools = anyio.run(list_tools)
    if not fits_world(rows, tools):
        print(
            f"Tasks or tools have changed since the warm start was made: warming up anew. To keep it, {WHAT_TO_RUN}."
        )
        return make_base_model(rows, folder, seed=SEED)
    print("Loading the warm start: a model that calls tools, though not always the right ones.")
    shutil.copytree(WARM_START, folder, dirs_exist_ok=True)
    return str(folder)


def make_base_model(rows: list[dict], folder: Path, seed: int) -> str:
    """Make a model that calls tools, though not always the right ones, and save it with its tokenizer."""
    tools = anyio.run(list_tools)
    tokenizer = build_tokenizer(rows, tools)
    model = build_model(tokenizer, seed=seed)
    choose_threads(model.num_parameters())
    warm_up(model, tokenizer, rows, tools, seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


async def list_tools() -> list[dict]:
    """List the servers' tools in the form that chat templates take."""
    async with ToolPool(SERVERS) as pool:
        return [tool.schema for tool in pool.catalog.tools]


if __name__ == "__main__":
    try:
        parsed, _ = StrictParser([Arguments], __doc__ or "").parse(sys.argv[1:])
        has_learnt = main(parsed)
    except MCPGRPOError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    if not has_learnt:
        sys.exit(
            f"The policy did not learn: success on held-out tasks should rise from at most {MAX_SUCCESS_BEFORE} to at "
            f"least {MIN_SUCCESS_AFTER}. Please report it with {parsed.output_dir}/summary.json."
        )
