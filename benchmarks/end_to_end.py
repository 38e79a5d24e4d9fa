"""
Ask where the time of a training step goes: with this library, and with stock TRL.

    python benchmarks/end_to_end.py [--device cuda] [--contenders trl ours ahead stale] [--json figures.json]

All train the same adapter (LoRA, r = 16 on all linear layers) on the same random model with vLLM in process: 32 trajectories
per step, each with four turns of 64 sampled tokens and three calls of a tool that takes 0.45 s on average with a heavy
tail. Only the reading of turns is made up, in the same way for all (see `fixed_turns.py`). "TRL" is
`GRPOTrainer(tools=...)`, whose tool is a function that sleeps; "ours" is `MCPGRPOTrainer` on a real MCP server over stdio
whose tool takes as long; "ours, ahead" has `max_staleness=1`, and "ours, stale" has `max_staleness=3`: with several groups a step
(`--trajectories` above 8), it does not wait for the slowest. Each has a process of its own, one after another.

Seconds are those that the training thread spends: "sync" is sending the weights, with our check of them; "rollout" is
sampling and tools, and what is left to wait for if they began before; "scoring" is rewards, log-probabilities and
advantages; then loss with backward pass, optimizer, and everything else.

On a GPU it exits with 1 if a step of ours takes longer than one of TRL. It always exits with 1 if a contender fails, after
all others have run. On a CPU (`--device cpu`) the model is tiny and there is no verdict. Nothing is downloaded.
"""

import argparse
import json
import logging
import statistics
import sys
import tempfile
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fixed_turns import (
    GPU_SHARE,
    MAX_CONTEXT,
    SERVERS,
    TEMPLATE_KWARGS,
    Script,
    device_name,
    draw_latencies,
    engine_settings,
    fixed_turns_in_trainers,
    markdown,
    prepare,
    run_alone,
    save_random_model,
    say,
    stock_engine,
    synchronize,
    trl_sampling,
    turns_read_by_trl,
    versions,
    wait,
)
from measuring import Check
from transformers import TrainerCallback


CONTENDERS = {"trl": "TRL", "ours": "ours", "ahead": "ours, ahead", "stale": "ours, stale"}
MAX_STALENESS = {"ours": 0, "ahead": 1, "stale": 3}
PHASES = ("sync", "rollout", "scoring", "loss and backward", "optimizer")
NUM_CALLS = 3
NUM_GENERATIONS = 8
RANK = 16
PART_TIME = 420.0  # seconds for one contender
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"shape": "0.6b", "trajectories": 32, "tokens": 64, "micro_batch": 8, "steps": 3, "trl_steps": 2},
    "cpu": {"shape": "tiny", "trajectories": 8, "tokens": 8, "micro_batch": 8, "steps": 2, "trl_steps": 2},
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the benchmark; see `--help`."""

    device: str
    contenders: list[str]
    shape: str
    trajectories: int
    tokens: int
    latency: str
    micro_batch: int
    steps: int
    trl_steps: int
    warmup: int
    eager: bool
    json: Path | None
    part: str | None


def parse_arguments() -> Arguments:
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description="Ask where the time of a training step goes.")
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--shape", choices=["tiny", "0.6b", "8b"], help="of the model; 0.6b on a GPU, tiny on a CPU")
    add("--trajectories", type=int, help=f"of a step, a multiple of {NUM_GENERATIONS}; 32 on a GPU, 8 on a CPU")
    add("--tokens", type=int, help="of a turn; 64 on a GPU, 8 on a CPU")
    add(
        "--latency",
        default="tail0.45",
        help="of a call: seconds, or `tail0.45` for a log-normal one, or `rare0.45` with one of 10 s a batch",
    )
    add("--micro-batch", type=int, help="trajectories of one backward pass; 8")
    add("--steps", type=int, help="of ours that are timed; 3 on a GPU, 2 on a CPU")
    add("--trl-steps", type=int, help="of TRL that are timed; 2")
    add("--warmup", type=int, default=1, help="steps before")
    add("--eager", action="store_true", help="without graphs, which start faster and sample slower")
    add("--json", type=Path, help="file for all figures")
    add("--part", help=argparse.SUPPRESS)
    found = parser.parse_args()
    parser.set_defaults(**DEFAULTS[found.device])
    return Arguments(**vars(parser.parse_args()))


class Clock(TrainerCallback):
    """
    Seconds of the training thread by phase; a phase within another one is taken out of it.

    Args:
        device (`str`):
            What is waited for where a phase begins and ends.
    """

    def __init__(self, device: str) -> None:
        self.steps: list[dict[str, float]] = []
        self._device = device
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._now: dict[str, float] = defaultdict(float)
        self._mark = self._start = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count what happens within as a phase."""
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Count every call of a method as a phase."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.phase(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._start = self._mark = time.perf_counter()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._turn()
        self._open.append("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._turn()
        self._open.pop()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """See [`~transformers.TrainerCallback`]."""
        self._turn()
        end = time.perf_counter()
        step = {name: self._now[name] for name in PHASES}
        step["total"] = end - self._start
        step["other"] = step["total"] - sum(step[name] for name in PHASES)
        self.steps.append(step)
        self._now.clear()
        self._start = end

    def _turn(self) -> None:
        synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self._now[self._open[-1]] += now - self._mark
        self._mark = now


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    """Some reward, another one for each trajectory."""
    return [float(sum(ids) % 7) for ids in completion_ids]


def settings_of(arguments: Arguments, output: Path, num_steps: int) -> dict[str, Any]:
    """What both trainers are set to."""
    is_cuda = arguments.device == "cuda"
    return {
        "output_dir": str(output),
        "use_cpu": not is_cuda,
        "bf16": is_cuda,
        "per_device_train_batch_size": arguments.micro_batch,
        "gradient_accumulation_steps": arguments.trajectories // arguments.micro_batch,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": 1024,
        "max_steps": num_steps,
        "learning_rate": 1e-6,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": GPU_SHARE,
        "vllm_max_model_length": MAX_CONTEXT,
        "chat_template_kwargs": TEMPLATE_KWARGS,
        "model_init_kwargs": {"dtype": "bfloat16" if is_cuda else "float32"},
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
    }


def measure(arguments: Arguments, contender: str, folder: Path) -> dict[str, Any]:
    """Train with one contender. Call it in a fresh process."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer

    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    model = save_random_model(folder / "model", arguments.shape, arguments.device)
    script = Script(draw_latencies(arguments.latency, arguments.trajectories, NUM_CALLS), arguments.tokens)
    clock = Clock(arguments.device)
    num_tasks = 4 * arguments.trajectories
    prompts = [[{"role": "user", "content": f"Wait three times. Number {i:05d}."}] for i in range(num_tasks)]
    rows = Dataset.from_list([{"task_id": f"task-{i}", "prompt": prompt} for i, prompt in enumerate(prompts)])
    common: dict[str, Any] = {
        "reward_funcs": reward,
        "train_dataset": rows,
        "callbacks": [clock],
        "peft_config": LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"),
    }
    num_steps = arguments.warmup + (arguments.trl_steps if contender == "trl" else arguments.steps)
    settings = settings_of(arguments, folder / "output", num_steps)
    start = time.perf_counter()
    if contender == "trl":
        args = GRPOConfig(**settings, generation_kwargs=trl_sampling(script))
        with stock_engine(arguments.device, arguments.eager):
            trainer = GRPOTrainer(model, args=args, tools=[wait], **common)
        start_seconds = time.perf_counter() - start
        _watch(clock, trainer)
        clock.watch(trainer.vllm_generation, "sync_weights", "sync")
        with turns_read_by_trl(script):
            trainer.train()
    else:
        settings |= {
            "max_turns": NUM_CALLS + 1,
            "vllm_engine_kwargs": engine_settings(arguments.device, arguments.eager),
        }
        settings["max_staleness"] = MAX_STALENESS[contender]
        with (
            fixed_turns_in_trainers(script),
            MCPGRPOTrainer(model, args=MCPGRPOConfig(**settings), servers=SERVERS, **common) as trainer,
        ):
            start_seconds = time.perf_counter() - start
            _watch(clock, trainer)
            clock.watch(trainer._collector, "collect", "rollout")
            clock.watch(trainer._collector.sampler, "_prepare", "sync")
            trainer.train()
    lengths = [log["completions/mean_length"] for log in trainer.state.log_history if "completions/mean_length" in log]
    if set(lengths) != {float((NUM_CALLS + 1) * arguments.tokens)}:
        raise RuntimeError(f"Trajectories do not have {(NUM_CALLS + 1) * arguments.tokens} sampled tokens: {lengths}")
    return {
        "start_seconds": start_seconds,
        "steps": clock.steps[arguments.warmup :],
        "logs": trainer.state.log_history,
        "device": device_name(arguments.device),
        "versions": versions(),
    }


def _watch(clock: Clock, trainer: Any) -> None:
    clock.watch(trainer, "training_step", "loss and backward")
    clock.watch(trainer, "_generate_and_score_completions", "scoring")
    clock.watch(trainer, "_generate", "rollout")


def run_part(arguments: Arguments) -> None:
    """What a process of its own does."""
    contender, output = (arguments.part or "").split(",")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        Path(output).write_text(json.dumps(measure(arguments, contender, Path(folder))))


def measure_all(arguments: Arguments) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """All contenders, one process after another, and what went wrong."""
    found: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    passed_on = [*["--eager"] * arguments.eager]
    for name in (
        "device",
        "shape",
        "trajectories",
        "tokens",
        "latency",
        "micro_batch",
        "steps",
        "trl_steps",
        "warmup",
    ):
        passed_on += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    with tempfile.TemporaryDirectory() as folder:
        for contender in arguments.contenders:
            output, log = Path(folder, f"{contender}.json"), Path(folder, f"{contender}.log")
            start = time.perf_counter()
            problem = run_alone(Path(__file__), ["--part", f"{contender},{output}", *passed_on], log, PART_TIME)
            if problem is None and output.exists():
                found[contender] = json.loads(output.read_text())
                say(f"  {CONTENDERS[contender]}: measured in {time.perf_counter() - start:.0f} s")
            else:
                problems.append(f"{CONTENDERS[contender]}: {problem}")
                say(f"FAILED: {problems[-1]}")
    return found, problems


def median(figures: dict[str, Any], name: str) -> float:
    """Seconds of a phase, or of the whole step."""
    return statistics.median(step[name] for step in figures["steps"])


def table(found: dict[str, dict[str, Any]]) -> str:
    """All phases of all contenders."""
    names = [*PHASES, "other"]
    header = ["", *[f"{name}, s" for name in names], "step, s: median (all)", "mean", "staleness", "of TRL's"]
    rows = []
    for contender, figures in found.items():
        totals = [step["total"] for step in figures["steps"]]
        share = median(figures, "total") / median(found["trl"], "total") if "trl" in found else None
        rows.append(
            [
                CONTENDERS[contender],
                *[f"{median(figures, name):.3f}" for name in names],
                f"{statistics.median(totals):.2f} ({', '.join(f'{each:.2f}' for each in totals)})",
                f"{statistics.mean(totals):.2f}",
                staleness(figures),
                f"{share:.3f}" if share else "",
            ]
        )
    return markdown(header, rows)


def staleness(figures: dict[str, Any]) -> str:
    """Updates between the beginning of a trajectory and its use: their mean, and the most."""
    logs = [log for log in figures["logs"] if "rollout/staleness" in log][-len(figures["steps"]) :]
    if not logs:
        return "0"
    mean = statistics.mean(log["rollout/staleness"] for log in logs)
    return f"{mean:.2f}, at most {max(log['rollout/staleness_max'] for log in logs):.0f}"


def judge(found: dict[str, dict[str, Any]]) -> list[Check]:
    """Whether ours is not slower."""
    checks = []
    for faster, slower in (("ours", "trl"), ("ahead", "trl"), ("ahead", "ours"), ("stale", "ahead")):
        if faster in found and slower in found:
            # Means: what is not waited for in one step may be waited for in another.
            seconds = {
                name: statistics.mean(step["total"] for step in found[name]["steps"]) for name in (faster, slower)
            }
            ratio = seconds[slower] / seconds[faster]
            claim = f"a step of {CONTENDERS[faster]} is not slower than one of {CONTENDERS[slower]}"
            checks.append(Check(claim=claim, holds=ratio >= 1, got=f"{ratio:.2f} times as fast"))
    return checks


def main(arguments: Arguments) -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: A sentence for each contender that failed, and on a GPU for each claim that does not hold.
    """
    found, problems = measure_all(arguments)
    checks = judge(found)
    if found:
        what = f"{arguments.trajectories} trajectories, {NUM_CALLS + 1} turns of {arguments.tokens} tokens"
        device = next(iter(found.values()))["device"]
        say("", f"{device}, {arguments.shape}, {what}, latency {arguments.latency}", "", table(found), "")
    is_judged = arguments.device == "cuda"
    for check in checks:
        verdict = ("PASS" if check.holds else "FAIL") if is_judged else "no verdict on a CPU"
        say(f"{verdict}: {check.claim}: {check.got}")
    if arguments.json is not None:
        figures = {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(arguments).items()},
            "figures": found,
            "checks": [asdict(check) for check in checks],
            "problems": problems,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    failures = [f"It does not hold that {check.claim}: {check.got}." for check in checks if not check.holds]
    return problems + (failures if is_judged else [])


if __name__ == "__main__":
    prepare()
    if (given := parse_arguments()).part is not None:
        run_part(given)
    elif failures := main(given):
        sys.exit("\n".join(failures))
