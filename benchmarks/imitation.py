"""
Ask what it saves in a warm start to run what solutions begin with, such as the tools, once for all in a pass.

    python benchmarks/imitation.py [--tasks quickstart] [--model FOLDER] [--passes 4] [--rounds 5] [--dtype float32] [--checkpointing]

Scripted solutions are run on their real servers and imitated as a warm start does it, 8 of them an update, in passes of so many: the quickstart's by
its own model, or with `--tasks desk` those of the desk, by the model in a folder (`--tokenizer` gives one the chat template of Qwen3). Each update is
computed four ways by turns, from the same weights: as rows, as TRL does it; with what they begin with once; that, and on a CPU predictions only of
what the policy writes, as the library does it; and all that in a single pass.
Losses and norms of gradients must agree. On a CPU, seconds are those that one thread has computed, so that what else the machine does counts as
little as it can. It exits with 1 if what the library does takes longer than rows. Nothing is downloaded.
"""

import argparse
import statistics
import sys
import time
from typing import Any

import anyio
import torch
from fixed_turns import markdown, say, synchronize
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen3_chat_template
from trl.trainer import add_fused_lm_head

from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks as build_desk_tasks
from mcp_grpo.learning import LabelledOnly, PromptSharing, SharedPrompts, Unpadded
from mcp_grpo.quickstart.servers import SERVERS
from mcp_grpo.quickstart.tasks import build_tasks, with_solutions
from mcp_grpo.quickstart.warm_start import WARM_START
from mcp_grpo.rollout import Renderer
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.train.imitation import IGNORED, conversations, make_dataset, tools_of


UPDATE = 8  # solutions
MAX_RESULT_TOKENS = 3072
CLOCKS = {"cuda": time.perf_counter, "cpu": time.process_time}
ROWS, ONCE = "rows", "what they begin with once"
LABELLED, WHOLE = "that, and only the policy's tokens predicted", "all that in one pass"
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}  # of a loss; gradients may be five times as far apart


def solutions(which: str, number: int, renderer: Renderer) -> list[dict[str, Any]]:
    """Run solutions on their servers, and return their tokens with labels."""
    is_desk = which == "desk"
    servers = desk_servers() if is_desk else SERVERS
    rows = build_desk_tasks("train", number) if is_desk else with_solutions(build_tasks(num_train=number)[0])
    solved = conversations(tasks_from_rows(rows), servers)
    schemas = anyio.run(tools_of, [task for task, _ in solved], servers)
    return list(make_dataset(solved, schemas, renderer, max_result_tokens=MAX_RESULT_TOKENS, max_length=None))


def batch_of(rows: list[dict[str, Any]], device: str) -> dict[str, torch.Tensor]:
    """Pad rows as TRL does."""
    width = max(len(row["input_ids"]) for row in rows)
    padded: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "attention_mask": []}
    for row in rows:
        num_lacking = width - len(row["input_ids"])
        padded["input_ids"].append([*row["input_ids"], *[0] * num_lacking])
        padded["labels"].append([*row["labels"], *[IGNORED] * num_lacking])
        padded["attention_mask"].append([1] * (width - num_lacking) + [0] * num_lacking)
    return {name: torch.tensor(values, device=device) for name, values in padded.items()}


def update(model: Any, way: str, rows: list[dict[str, Any]], per_pass: int, device: str) -> tuple[float, float, float]:
    """Compute the loss of an update and its gradient; return seconds, the loss, and the gradient's norm."""
    labelled = LabelledOnly(model) if way in (LABELLED, WHOLE) else model
    called = model if way == ROWS else SharedPrompts(labelled, Unpadded(labelled))
    size = len(rows) if way == WHOLE else per_pass
    num_labels = sum(label != IGNORED for row in rows for label in row["labels"][1:])
    model.zero_grad()
    synchronize(device)
    start, total = CLOCKS[device](), 0.0
    for first in range(0, len(rows), size):
        output = called(**batch_of(rows[first : first + size], device), use_cache=False, fused_lm_head=True)
        loss = -output.log_probs.sum() / num_labels
        loss.backward()
        total += loss.item()
    synchronize(device)
    seconds = CLOCKS[device]() - start
    squares = [parameter.grad.float().square().sum() for parameter in model.parameters() if parameter.grad is not None]
    return seconds, total, torch.stack(squares).sum().sqrt().item()


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", choices=("quickstart", "desk"), default="quickstart")
    parser.add_argument("--model", default=str(WARM_START), help="folder of a model (default: the quickstart's)")
    parser.add_argument("--tokenizer", help="folder of a tokenizer, if not that of the model")
    parser.add_argument("--passes", type=int, default=4, help="solutions of a pass")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--device", choices=CLOCKS, default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer or options.model, local_files_only=True)
    if options.tokenizer:
        tokenizer.chat_template = qwen3_chat_template  # copies of the tokenizer have others
    renderer = Renderer(
        tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs={"enable_thinking": False}
    )
    rows = solutions(options.tasks, UPDATE * (options.rounds + 1), renderer)
    model: Any = AutoModelForCausalLM.from_pretrained(options.model, local_files_only=True, dtype=options.dtype)
    model.to(options.device).train()
    if options.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_fused_lm_head(model)
    sharing = PromptSharing()
    if not sharing.is_possible(model):
        sys.exit(sharing.sentence)
    length, written = (
        statistics.fmean(count(row["labels"]) for row in rows)
        for count in (len, lambda ids: len(ids) - ids.count(IGNORED))
    )
    say(f"{len(rows)} solutions of {length:,.0f} tokens, {written:,.0f} of them the policy's.")
    ways = (ROWS, ONCE, LABELLED, WHOLE)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    problems = []
    for number in range(options.rounds + 1):
        chosen = [rows[(number * UPDATE + i) % len(rows)] for i in range(UPDATE)]
        found = {way: update(model, way, chosen, options.passes, options.device) for way in ways}
        if number == 0:  # it warms up
            continue
        _, loss, norm = found[ROWS]
        for way, (taken, other_loss, other_norm) in found.items():
            seconds[way].append(taken)
            off = max(abs(other_loss / loss - 1), abs(other_norm / norm - 1) / 5)
            if off > TOLERANCE[options.dtype]:
                problems.append(
                    f"{way}: loss {other_loss:.5f}, gradient {other_norm:.5f}; rows {loss:.5f}, {norm:.5f}"
                )
    whole = sum(seconds[ROWS])
    table = [[way, f"{statistics.median(each):.2f}", f"{sum(each) / whole:.2f}"] for way, each in seconds.items()]
    say("", markdown(["solutions run as", "seconds of an update, median", "of the time of rows"], table))
    if sum(seconds[LABELLED]) > whole:
        problems.append("What the library does takes longer than rows.")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
