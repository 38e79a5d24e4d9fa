"""
Ask what the whole objective costs: seconds and memory of a training step with everything on, beside TRL's own GRPO.

    python benchmarks/objective_cost.py [--device cuda] [--gradient-checkpointing] [--json figures.json]

Both train the same adapter on the same model, of the shape of Qwen3-0.6B with random weights, on the same batch: 16
trajectories of 2,048 tokens with three tool calls each, an eighth of which could not be made. Nothing is generated; the
tokens are made up, and there is a real server only because the guards want one. With everything on there are a schema
mask, turn-level advantages with a value head, a reference that follows the policy at every step, the guards of ratios
and of the KL divergence, the diagnostics, and the bootstrap. TRL has the same KL term, to the model without the adapter.

A step is all that lies between two beginnings of a step: masks, rewards, reference, advantages, loss, backward pass,
update, callbacks and logs. All trainers stand side by side in one process and take turns step by step, so that what else
the machine does meets all alike; a ratio is the median of the ratios within a turn. Memory is the most that is allocated
in one step, each trainer alone in a process of its own.

The second table turns things on one after another. Its row "TRL, reference adapter" is TRL as it trains an adapter
further: its reference is then an adapter, too, as is any that moves.

On a GPU it exits with 1 if a step takes more than 1.05 times as long or 1.03 times as much memory. On a CPU
(`--device cpu`) the model is small and there is no verdict: seconds are those of one thread's CPU time, whatever else the
machine does, and memory is that of the whole process. Nothing is downloaded.
"""

import argparse
import gc
import json
import logging
import math
import os
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import torch
import transformers
import trl
from datasets import Dataset
from helpers.families import family_tokenizer
from measuring import ARGS, Check, peak_memory
from peft import LoraConfig, get_peft_model
from rich.console import Console
from rich.table import Table
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
from mcp_grpo.learning import rollout_columns
from mcp_grpo.types import Exchange, ResultKind, Segment, StopReason, Task, ToolCall, ToolResult, Trajectory


MAX_TIME_RATIO = 1.05
MAX_MEMORY_RATIO = 1.03
BETA = 0.05
NUM_CALLS = 3  # of each trajectory
NUM_GENERATIONS = 8
PROMPT_SHARE = 1 / 8
FAULTY_EVERY = 8  # one trajectory in so many has calls that could not be made, so that the bootstrap has work to do
ARGUMENTS = {"text": "The quick brown fox jumps over the lazy dog."}
SERVERS = {"bench": {"command": sys.executable, "args": list(ARGS), "protocol": "legacy"}}

STOCK, STOCK_ADAPTER = "TRL", "TRL, reference adapter"
# Each with all that stands above it. A random policy is sure of no token, so that only 0 masks any.
EXTRAS: dict[str, dict[str, Any]] = {
    "guards": {},
    "+ schema mask": {"schema_mask": "syntax", "schema_mask_min_prob": 0.0},
    "+ value head": {"advantage_mode": "hybrid"},
    "+ reference EMA": {"ref_sync": "ema", "ref_sync_steps": 1},
    "+ bootstrap": {"bootstrap_steps": 100},
}
EVERYTHING = list(EXTRAS)[-1]
LANES = (STOCK, STOCK_ADAPTER, *EXTRAS)

SHAPES = {
    "cuda": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "cpu": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
SIZES = {"cuda": {"trajectories": 16, "tokens": 2048}, "cpu": {"trajectories": 8, "tokens": 512}}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the benchmark; see `--help`."""

    device: str
    trajectories: int
    tokens: int
    micro_batch: int | None
    layers: int | None
    gradient_checkpointing: bool
    rounds: int
    warmup: int
    lanes: list[str]
    no_memory: bool
    json: Path | None


def parse_arguments() -> Arguments:
    """The command line."""
    parser = argparse.ArgumentParser(description="Ask what the whole objective costs beside TRL's own GRPO.")
    add = parser.add_argument
    add("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--trajectories", type=int, help=f"of a batch, a multiple of {NUM_GENERATIONS}; 16 on a GPU, 8 on a CPU")
    add("--tokens", type=int, help="of a trajectory, prompt included; 2,048 on a GPU, 512 on a CPU")
    add("--micro-batch", type=int, help="trajectories of one backward pass; all if not given")
    add("--layers", type=int, help="of the model; 28 on a GPU, 4 on a CPU")
    add("--gradient-checkpointing", action="store_true", help="compute activations again instead of keeping them")
    add("--rounds", type=int, default=9, help="steps of each trainer that are timed")
    add("--warmup", type=int, default=3, help="steps of each trainer before")
    add("--lanes", nargs="+", choices=LANES, default=list(LANES), metavar="LANE", help=f"of {', '.join(LANES)}")
    add("--no-memory", action="store_true", help="leave out the processes that memory is measured in")
    add("--json", type=Path, help="file for all figures")
    found = parser.parse_args()
    parser.set_defaults(**SIZES[found.device])
    return Arguments(**vars(parser.parse_args()))


def random_model(arguments: Arguments, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The same random model each time."""
    shape = SHAPES[arguments.device]
    config = Qwen3Config(
        **shape | {"num_hidden_layers": arguments.layers or shape["num_hidden_layers"]},
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(arguments.device):
        return AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16 if arguments.device == "cuda" else torch.float32
        )


def make_up(arguments: Arguments, tokenizer: PreTrainedTokenizerFast, task: Task, seed: int) -> Trajectory:
    """A trajectory of exactly so many tokens, with real calls among random letters."""
    rng = torch.Generator().manual_seed(seed)
    # About what a random model gives to any token.
    logprob = -math.log(SHAPES[arguments.device]["vocab_size"])

    def letters(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 200, (count,), generator=rng).tolist())

    def sampled(*token_ids: int) -> Segment:
        return Segment(token_ids=token_ids, logprobs=(logprob,) * len(token_ids))

    written = json.dumps({"name": "echo", "arguments": ARGUMENTS})
    call_ids = tokenizer(f"<tool_call>\n{written}\n</tool_call><|im_end|>", add_special_tokens=False)["input_ids"]
    prompt_length = int(PROMPT_SHARE * arguments.tokens)
    room = arguments.tokens - prompt_length - NUM_CALLS * len(call_ids) - 1
    length, rest = divmod(room, 2 * NUM_CALLS + 1)
    if length < 1:
        raise SystemExit(f"There is no room for {NUM_CALLS} calls in {arguments.tokens} tokens. Raise `--tokens`.")
    turns = [(sampled(*letters(length), *call_ids), Segment(token_ids=letters(length))) for _ in range(NUM_CALLS)]
    answer = sampled(*letters(length + rest), tokenizer.eos_token_id)
    kind = ResultKind.INVALID_ARGUMENTS if seed % FAULTY_EVERY == 0 else ResultKind.OK
    call, result = ToolCall(name="echo", arguments=ARGUMENTS), ToolResult(text=ARGUMENTS["text"], kind=kind)
    return Trajectory(
        task=task,
        prompt_ids=letters(prompt_length),
        segments=(*(segment for turn in turns for segment in turn), answer),
        messages=({"role": "assistant", "content": "Done."},),
        exchanges=tuple(Exchange(call=call, result=result, turn=turn) for turn in range(NUM_CALLS)),
        stop_reason=StopReason.ANSWERED,
    )


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Some reward, another one for each trajectory."""
    return [float(sum(ids) % 7) for ids in completion_ids]


class Replay(MCPGRPOTrainer):
    """Attempts nothing: the trajectories are given."""

    given: Sequence[Trajectory]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self._collector
        self._collector.attempt = self._give

    def _give(self, tasks: Any, **kwargs: Any) -> list[Trajectory]:
        # Copies, for a trajectory remembers what it has once put together.
        return [replace(trajectory, task=task) for trajectory, task in zip(self.given, tasks, strict=True)]


def make_trainer(name: str, arguments: Arguments, folder: Path, callback: TrainerCallback) -> GRPOTrainer:
    """The trainer of a lane."""
    tokenizer = family_tokenizer("qwen3")
    model: Any = random_model(arguments, tokenizer)
    rows = [{"task_id": f"task-{i}", "prompt": "Say it."} for i in range(arguments.trajectories // NUM_GENERATIONS)]
    nothing = Task(task_id="nothing", prompt=())
    trajectories = [make_up(arguments, tokenizer, nothing, seed=i) for i in range(arguments.trajectories)]
    micro_batch = arguments.micro_batch or arguments.trajectories
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": arguments.device == "cpu",
        "bf16": arguments.device == "cuda",
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": arguments.trajectories // micro_batch,
        "gradient_checkpointing": arguments.gradient_checkpointing,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": arguments.tokens,
        "max_steps": arguments.warmup + arguments.rounds + 1,
        "beta": BETA,
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }
    lora = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear")
    if name == STOCK_ADAPTER:
        model, lora = get_peft_model(model, lora), None
    common: dict[str, Any] = {
        "model": model,
        "reward_funcs": reward,
        "train_dataset": Dataset.from_list(rows),
        "processing_class": tokenizer,
        "callbacks": [callback],
        "peft_config": lora,
    }
    if name in (STOCK, STOCK_ADAPTER):
        columns = rollout_columns(trajectories, tokenizer.eos_token_id)
        del columns["trajectory"]
        args = GRPOConfig(**settings)
        trainer = GRPOTrainer(args=args, rollout_func=lambda prompts, trainer: dict(columns), **common)
    else:
        for extra in list(EXTRAS)[: list(EXTRAS).index(name) + 1]:
            settings |= EXTRAS[extra]
        trainer = Replay(args=MCPGRPOConfig(**settings), servers=SERVERS, **common)
        trainer.given = trajectories
    trainer.remove_callback(PrinterCallback)
    return trainer


class Lane(TrainerCallback):
    """
    A trainer that makes one step when it is told to, in a thread of its own.

    Args:
        name (`str`):
            Which.
        arguments ([`Arguments`]):
            Sizes.
        folder (`Path`):
            For what it writes.
    """

    def __init__(self, name: str, arguments: Arguments, folder: Path) -> None:
        self.seconds: list[float] = []
        self.metrics: dict[str, float] = {}
        is_cuda = arguments.device == "cuda"
        self._synchronize: Callable[[], None] = torch.cuda.synchronize if is_cuda else lambda: None
        self._clock = time.perf_counter if is_cuda else time.process_time
        self._may_go, self._has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._start: float | None = None
        self._error: BaseException | None = None
        self._trainer = make_trainer(name, arguments, folder, self)
        self._thread = threading.Thread(target=self._train, daemon=True)

    def open(self) -> None:
        """Come to where the first step begins."""
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Make a step, and time it."""
        self._may_go.release()
        self._wait()

    def close(self) -> None:
        """Make the last step, which is not timed, and end its server."""
        self.step()
        self._thread.join()
        if isinstance(self._trainer, MCPGRPOTrainer):
            self._trainer.close()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._synchronize()
        if self._start is not None:
            self.seconds.append(self._clock() - self._start)
        self._has_stopped.release()
        self._may_go.acquire()
        self._synchronize()
        self._start = self._clock()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self.metrics |= {key: value for key, value in logs.items() if isinstance(value, float)}

    def _train(self) -> None:
        try:
            self._trainer.train()
        except BaseException as error:
            self._error = error
        finally:
            self._has_stopped.release()

    def _wait(self) -> None:
        self._has_stopped.acquire()
        if self._error is not None:
            raise self._error


@contextmanager
def quiet() -> Iterator[None]:
    """One thread on the CPU, and without what trainers say about a model that is random."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def measure_memory(name: str, arguments: Arguments) -> float:
    """The most memory of one step, in MB. Call it in a fresh process."""
    arguments = replace(arguments, warmup=2, rounds=1)
    with quiet(), tempfile.TemporaryDirectory() as folder:
        lane = Lane(name, arguments, Path(folder))
        lane.open()
        for _ in range(arguments.warmup):
            lane.step()
        if arguments.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        lane.step()
        found = torch.cuda.max_memory_allocated() / 2**20 if arguments.device == "cuda" else peak_memory()
        lane.close()
    return found


def measure_memories(arguments: Arguments) -> dict[str, float]:
    """The same for all lanes, one after another."""
    found: dict[str, float] = {}
    for name in arguments.lanes:
        with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as fresh:
            found[name] = fresh.submit(measure_memory, name, arguments).result()
    return found


def measure_times(arguments: Arguments) -> dict[str, Lane]:
    """Let all lanes take turns."""
    with quiet(), tempfile.TemporaryDirectory() as folder:
        lanes = {name: Lane(name, arguments, Path(folder, str(i))) for i, name in enumerate(arguments.lanes)}
        for lane in lanes.values():
            lane.open()
        for number in range(arguments.warmup + arguments.rounds):
            gc.collect()
            first = number % len(lanes)
            for lane in (list(lanes.values()) * 2)[first : first + len(lanes)]:  # each has every place
                lane.step()
        for lane in lanes.values():
            lane.close()
            lane.seconds = lane.seconds[arguments.warmup :]
    return lanes


def ratio(ours: Lane, theirs: Lane) -> float:
    """How many times as long a step takes: the median over turns."""
    return statistics.median(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True))


def judge(lanes: dict[str, Lane], memories: dict[str, float]) -> list[Check]:
    """Whether the limits are kept."""
    if not {STOCK, EVERYTHING} <= lanes.keys():
        return []
    found = [("takes as long as TRL's", ratio(lanes[EVERYTHING], lanes[STOCK]), MAX_TIME_RATIO)]
    if memories:
        found.append(("takes as much memory as TRL's", memories[EVERYTHING] / memories[STOCK], MAX_MEMORY_RATIO))
    return [
        Check(
            claim=f"a step with everything on {claim}, times {limit} at most",
            holds=got <= limit,
            got=f"{got:.3f} times",
        )
        for claim, got, limit in found
    ]


def summary(
    arguments: Arguments, lanes: dict[str, Lane], memories: dict[str, float], checks: Sequence[Check]
) -> Table:
    """Everything on beside TRL."""
    shape = f"{arguments.trajectories} x {arguments.tokens:,} tokens"
    table = Table(title=f"A training step, {shape}, {arguments.device}", title_justify="left")
    for column in ("", "seconds", "min", "MB"):
        table.add_column(column, justify="left" if not column else "right")
    for label, name in (("TRL", STOCK), ("everything on", EVERYTHING)):
        if name in lanes:
            seconds = lanes[name].seconds
            memory = f"{memories[name]:,.0f}" if memories else "not measured"
            table.add_row(label, f"{statistics.median(seconds):.3f}", f"{min(seconds):.3f}", memory)
    table.add_section()
    is_judged = arguments.device == "cuda"
    for check in checks:
        verdict = ("[green]PASS[/]" if check.holds else "[bold red]FAIL[/]") if is_judged else "no verdict on a CPU"
        table.add_row(check.claim, check.got, verdict)
    return table


def shares(lanes: dict[str, Lane], memories: dict[str, float]) -> Table:
    """What each extra adds to those before it."""
    table = Table(title="One thing after another", title_justify="left")
    for column in ("", "seconds", "of TRL's", "added ms", "MB", "of TRL's"):
        table.add_column(column, justify="left" if not column else "right")
    before: Lane | None = None
    for name, lane in lanes.items():
        row = [name, f"{statistics.median(lane.seconds):.3f}"]
        row.append(f"{ratio(lane, lanes[STOCK]):.3f}" if STOCK in lanes else "")
        # What is added to the row before it; to TRL, for both rows that begin anew.
        base = lanes.get(STOCK) if name in (STOCK_ADAPTER, next(iter(EXTRAS))) else before
        added = [a - b for a, b in zip(lane.seconds, base.seconds, strict=True)] if base else None
        row.append(f"{1e3 * statistics.median(added):+.1f}" if added else "")
        row.append(f"{memories[name]:,.0f}" if memories else "")
        row.append(f"{memories[name] / memories[STOCK]:.3f}" if STOCK in memories else "")
        table.add_row(*row)
        before = lane
    return table


def main(arguments: Arguments) -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: A sentence for each limit that was not kept on a GPU.
    """
    console = Console(width=None if sys.stdout.isatty() else 140)
    memories = {} if arguments.no_memory else measure_memories(arguments)
    lanes = measure_times(arguments)
    checks = judge(lanes, memories)
    console.print(summary(arguments, lanes, memories, checks))
    console.print(shares(lanes, memories))
    if arguments.json is not None:
        figures = {
            "arguments": asdict(arguments) | {"json": str(arguments.json)},
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
            "device": torch.cuda.get_device_name() if arguments.device == "cuda" else f"{os.cpu_count()} CPUs",
            "seconds": {name: lane.seconds for name, lane in lanes.items()},
            "megabytes": memories,
            "metrics": {name: lane.metrics for name, lane in lanes.items()},
            "checks": [asdict(check) for check in checks],
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.device != "cuda":
        return []
    return [f"It does not hold that {check.claim}: {check.got}." for check in checks if not check.holds]


if __name__ == "__main__":
    if failures := main(parse_arguments()):
        sys.exit("\n".join(failures))
