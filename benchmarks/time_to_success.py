"""
Ask how long it takes to learn the desk's tasks: with this library, and with stock TRL.

    python benchmarks/time_to_success.py --model FOLDER [--seeds 1 2 3] [--contenders ours trl] [--max-steps 60] [--seconds 600]
        [--learning-rate 1e-4] [--batch-size 16] [--judge 0] [--output-dir outputs/time_to_success] [--device cuda]

The model is one that can call tools in its chat template's own form, as `recipes/sft_warmup.py` leaves it. All contenders train the same
adapter with the same settings, rewards and prompts, on the same tasks and the same real servers: those families of the desk that only
read, and whose results are short, as stock TRL has no state of a trajectory's own and no limit of a result. "trl" is
`trl.GRPOTrainer(tools=...)` with functions that call the servers, "ours" is `MCPGRPOTrainer` with what it chooses by itself, and "everything"
the same with `replay_solutions` and `max_staleness=1`. A reward is 1 for the right answer, and nothing else.

A run ends after `--max-steps` updates, or `--seconds`; a pass has `--batch-size` rows, an update always 64. The table has the seconds of training until success on the training tasks, averaged
over five updates, was as high as the worse contender ever got with that seed. With `--judge`, as many tasks of the same families that were
held out are attempted twice by the model and by each policy at its end, which a second table tells. Runs are processes of their own, one
after another; those that are finished are not repeated. On a CPU (`--device cpu`) turns are sampled by Transformers, without `max_staleness`, which only shows that
it works.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from advantages import Completion, ServerTool
from anyio.from_thread import start_blocking_portal
from datasets import Dataset
from learning_runs import WINDOW, run_part
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer, ToolCall, ToolPool, evaluate
from mcp_grpo.desk.reward import COMPANY_WORDS
from mcp_grpo.desk.servers import desk_servers
from mcp_grpo.desk.tasks import build_tasks
from mcp_grpo.evaluation import compare
from mcp_grpo.policy_evaluation import EVALUATION_FILE, read_evaluation
from mcp_grpo.rewards.answers import matches_answer
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import StopReason, Trajectory


CONTENDERS = ("ours", "everything", "trl")
EXTRAS: dict[str, dict[str, Any]] = {"ours": {}, "everything": {"replay_solutions": True, "max_staleness": 1}}
FAMILIES = ("lookup", "quarter", "adjusted", "comparison", "search_verify", "refusal", "namesakes")
SERVERS = ("finance", "search")
MAX_TURNS = 8
NUM_TASKS = 1000
ROWS = 64  # of an update
ANSWERED = StopReason.ANSWERED.value
START = "start"  # the model, where policies are judged
# As recipes/configs/qwen2.5_coder_0.5b.yaml.
ADAPTER = LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM")
COMMON: dict[str, Any] = {
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 3,
    "num_generations": 8,
    "scale_rewards": "none",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
    "max_completion_length": 3072,
    "chat_template_kwargs": {"enable_thinking": False},
    "gradient_checkpointing": True,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
}
ON_GPU: dict[str, Any] = {
    "bf16": True,
    "model_init_kwargs": {"dtype": "bfloat16"},
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_gpu_memory_utilization": 0.1,
    "vllm_max_model_length": 6144,
}
ON_CPU: dict[str, Any] = {
    "bf16": False,
    "use_cpu": True,
    "max_completion_length": 64,
}
# The first that is logged: rewards are also those of replayed solutions.
SUCCESS = ("solutions/solved_fraction", "rewards/answered/mean")


def answered(completions: list[Completion], prompts: list[Any], wanted: list[str], **kwargs: Any) -> list[float]:
    """Pay 1 for a last message that gives the answer."""
    return [float(_is_answered(*one)) for one in zip(completions, prompts, wanted, strict=True)]


def _is_answered(completion: Completion, prompt: list[dict[str, Any]], wanted: str) -> bool:
    last = completion[-1] if completion else {}
    if last.get("role") != "assistant" or last.get("tool_calls"):
        return False
    question = str(prompt[-1]["content"])
    return matches_answer(str(last["content"]), json.loads(wanted), question=question, words=COMPANY_WORDS)


def load_tasks(split: str = "train", num_tasks: int = NUM_TASKS) -> Dataset:
    """Build tasks of a split, which all have the tools of the same servers, out of as many of all families."""
    tasks = build_tasks(split, num_tasks).filter(lambda row: row["family"] in FAMILIES)
    answers = [json.dumps(task.answer) for task in tasks_from_rows(tasks)]
    return tasks.select_columns(["task_id", "prompt", "solution"]).add_column("wanted", answers)


def is_success(trajectory: Trajectory) -> bool:
    """Say whether a trajectory earns the reward."""
    task = trajectory.task
    return _is_answered(list(trajectory.messages), list(task.prompt), task.metadata["wanted"])


class Clock(TrainerCallback):
    """
    Notes success and the seconds since training began, and ends a run whose time is over.

    Args:
        limit (`float`):
            Seconds.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self.start = limit, time.monotonic()
        self.history: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to count."""
        self.start = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Note what a step came to."""
        seconds = time.monotonic() - self.start
        success = next((logs[name] for name in SUCCESS if name in logs), None) if logs else None
        if success is not None:
            self.history.append({"step": state.global_step, "seconds": seconds, "success": success})
            Console().print(f"step {state.global_step}: {seconds:.0f} s, success {success:.3f}")
        control.should_training_stop |= seconds > self.limit


def _servers() -> dict[str, Any]:
    return {"mcpServers": {name: desk_servers()["mcpServers"][name] for name in SERVERS}}


def _policy(arguments: argparse.Namespace, contender: str, seed: int) -> Path:
    return arguments.model if contender == START else arguments.output_dir / f"{contender}-{seed}"


def judge(arguments: argparse.Namespace, contender: str, seed: int) -> None:
    """Attempt tasks that were held out with a policy, and keep the attempts in a folder."""
    settings = {**COMMON, **(ON_GPU if arguments.device == "cuda" else ON_CPU)}
    names = ("use_cpu", "use_vllm", "vllm_mode", "vllm_gpu_memory_utilization", "vllm_max_model_length", "bf16")
    names += ("max_completion_length", "chat_template_kwargs")
    # As many of all families as leave those that are asked for.
    tasks = load_tasks("validation", 2 * arguments.judge + 14)
    tasks = tasks.select(range(min(arguments.judge, len(tasks))))
    evaluate(
        str(_policy(arguments, contender, seed)),
        tasks,
        _servers(),
        k=2,
        is_success=is_success,
        output_dir=_judged(arguments, contender, seed),
        max_turns=MAX_TURNS,
        max_turn_tokens=min(512, settings["max_completion_length"]),
        **{name: settings[name] for name in names if name in settings},
    )


def train(arguments: argparse.Namespace, contender: str, seed: int) -> list[dict[str, float]]:
    """Train once, keep the policy, and return what each step came to."""
    settings = {**COMMON, **(ON_GPU if arguments.device == "cuda" else ON_CPU)}
    settings |= {"output_dir": str(_policy(arguments, contender, seed)), "seed": seed}
    settings |= {"max_steps": arguments.max_steps, "learning_rate": arguments.learning_rate}
    rows = arguments.batch_size
    settings |= {"per_device_train_batch_size": rows, "gradient_accumulation_steps": max(1, ROWS // rows)}
    servers = _servers()
    clock = Clock(arguments.seconds)
    if contender in EXTRAS:
        extras = dict(EXTRAS[contender])
        if not settings.get("use_vllm"):
            extras.pop("max_staleness", None)  # needs vLLM
        own = MCPGRPOConfig(
            **settings,
            **extras,
            max_turns=MAX_TURNS,
            max_turn_tokens=min(512, settings["max_completion_length"]),
        )
        with MCPGRPOTrainer(
            str(arguments.model),
            answered,
            own,
            load_tasks(),
            servers=servers,
            is_success=is_success,
            peft_config=ADAPTER,
            callbacks=[clock],
        ) as trainer:
            trainer.train()
            trainer.save_model()
        return clock.history
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(ToolPool(servers)) as pool:

        def call(name: str, given: dict[str, Any]) -> Any:
            return portal.call(pool.call, ToolCall(name=name, arguments=given))

        trainer = GRPOTrainer(
            str(arguments.model),
            answered,
            GRPOConfig(**settings, max_tool_calling_iterations=MAX_TURNS - 1),
            load_tasks(),
            tools=[ServerTool(tool.schema, call) for tool in pool.catalog.tools],
            peft_config=ADAPTER,
            callbacks=[clock],
        )
        trainer.train()
        trainer.save_model()
    return clock.history


def averaged(history: Sequence[dict[str, float]]) -> list[tuple[float, float]]:
    """Return seconds and success over the last few updates, from the first time that there are as many."""
    return [
        (history[last - 1]["seconds"], statistics.mean(each["success"] for each in history[last - WINDOW : last]))
        for last in range(WINDOW, len(history) + 1)
    ]


def report(arguments: argparse.Namespace) -> None:
    """Print the table."""
    table = Table(title="Seconds of training until success")
    for column in ("seed", "success", *arguments.contenders, "seconds of a step"):
        table.add_column(column)
    for seed in arguments.seeds:
        runs = {one: json.loads(_result(arguments, one, seed).read_text()) for one in arguments.contenders}
        goal = min(max((success for _, success in averaged(history)), default=0.0) for history in runs.values())
        times = [
            next((f"{seconds:.0f}" for seconds, success in averaged(history) if success >= goal), "")
            for history in runs.values()
        ]
        steps = [f"{history[-1]['seconds'] / len(history):.1f}" for history in runs.values()]
        table.add_row(str(seed), f"{goal:.3f}", *times, ", ".join(steps))
    Console(width=120).print(table)


def report_judged(arguments: argparse.Namespace) -> None:
    """Print how each policy does with tasks that were held out, and what differs from the model that it was."""
    start = read_evaluation(_judged(arguments, START, 0))
    table = Table(title=f"Success in {start.num_tasks} tasks that were held out, two attempts at each")
    for column in ("seed", "policy", "success", "ended with an answer", "points since the start, with 95 % interval"):
        table.add_column(column)
    table.add_row("", START, f"{start.success:.1%}", f"{start.stop_reasons.get(ANSWERED, 0.0):.1%}", "")
    for seed in arguments.seeds:
        for contender in arguments.contenders:
            found = read_evaluation(_judged(arguments, contender, seed))
            gain = compare(start, found).gain
            points = f"{gain.mean:+.1%} ({gain.low:+.1%} to {gain.high:+.1%})" if gain is not None else ""
            answers = found.stop_reasons.get(ANSWERED, 0.0)
            table.add_row(str(seed), contender, f"{found.success:.1%}", f"{answers:.1%}", points)
    Console(width=120).print(table)


def _judged(arguments: argparse.Namespace, contender: str, seed: int) -> Path:
    return arguments.output_dir / f"judged-{contender}-{seed}"


def _result(arguments: argparse.Namespace, contender: str, seed: int) -> Path:
    return arguments.output_dir / f"{contender}-{seed}.json"


def main() -> None:
    """Run all, or one part of it in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--max-steps", type=int, default=60)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a pass; an update has 64")
    parser.add_argument("--judge", type=int, default=0, metavar="TASKS", help="held-out tasks to judge policies by")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/time_to_success"))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--train", nargs=2, metavar=("CONTENDER", "SEED"), help="only train one")
    parser.add_argument("--judge-one", nargs=2, metavar=("CONTENDER", "SEED"), help="only judge one")
    arguments = parser.parse_args()
    if arguments.judge_one is not None:
        judge(arguments, arguments.judge_one[0], int(arguments.judge_one[1]))
        return
    if arguments.train is not None:
        contender, seed = arguments.train[0], int(arguments.train[1])
        history = train(arguments, contender, seed)
        arguments.output_dir.mkdir(parents=True, exist_ok=True)
        _result(arguments, contender, seed).write_text(json.dumps(history))
        return
    names = ("model", "max_steps", "seconds", "learning_rate", "batch_size", "judge", "output_dir", "device")
    common = [part for name in names for part in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    for seed in arguments.seeds:
        for contender in arguments.contenders:
            if not _result(arguments, contender, seed).exists():
                run_part(__file__, ["--train", contender, str(seed)], common)
    report(arguments)
    if arguments.judge:
        runs = [(contender, seed) for seed in arguments.seeds for contender in arguments.contenders]
        for contender, seed in [(START, 0), *runs]:
            if not (_judged(arguments, contender, seed) / EVALUATION_FILE).exists():
                run_part(__file__, ["--judge-one", contender, str(seed)], common)
        report_judged(arguments)


if __name__ == "__main__":
    main()
