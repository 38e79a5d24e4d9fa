"""
Ask what a step of a recipe costs: seconds and memory by phase, tokens per second.

    python benchmarks/recipe_step.py --config recipes/configs/qwen3_0.6b_lora_vllm.yaml --steps 20 --tokenizer FOLDER \\
        [--beside rows checkpointed] [--device cuda] [--json figures.json] [flags of the recipe]

It runs `recipes/grpo_qwen3.py` as it is, on the desk's real servers, with random weights of the model's shape: how weights
are sent, whether the engine sleeps, and in how many bits the model is loaded is the recipe's own. A random model calls no
tools, so only the reading of its turns is made up. Every token is really sampled; a turn has as many of them as that turn of
the task's scripted solution would have, and is then read as that turn. Its calls are really made, and what the servers say
is appended. So trajectories are as long as those that solve their tasks. All attempts of a group do the same: advantages are
0, and the loss is computed all the same.

With `--beside`, steps run by turns in the library's way and in others, for ratios within one run, by token as batches differ: `rows` runs a prompt
once for each attempt and computes activations again in the backward pass; `checkpointed` only the latter; `compiled` has norms and MLPs of the loss compiled by
`torch.compile`.

The first step (of each way) is left out of the figures where there are more: it warms up. `--json` is written anew after each step.

The tokenizer is that in the folder, with Qwen3's chat template; without `--tokenizer`, the model's own if it is on this
machine, else one of bytes, with which everything has about four times as many tokens. On a CPU (`--device cpu`) the model
is tiny. It exits with 1 if no trajectory made a call. Nothing is downloaded.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fixed_turns import SHAPES, device_name, end_anywhere, family_tokenizer, markdown, save_random_model, say


sys.path.append(str(Path(__file__).parent.parent / "recipes"))

import grpo_qwen3
import torch
from recipe_parts.run_folder import PACKAGES
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
from trl.chat_template_utils import qwen3_chat_template

from mcp_grpo import MCPGRPOTrainer
from mcp_grpo.doctor.stand_in import STAND_IN
from mcp_grpo.evaluation import run_solutions
from mcp_grpo.monitor import profile_table
from mcp_grpo.publishing import installed_versions
from mcp_grpo.rollout import Renderer, engine
from mcp_grpo.rollout.renderer import ParsedTurn
from mcp_grpo.sampling import Generation, Sampling, TransformersGenerator
from mcp_grpo.sampling.vllm_backend import VLLMBackend
from mcp_grpo.sampling.vllm_server_backend import VLLMServerBackend
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.types import Message, ToolCall, Trajectory


NUM_TASKS = 160
PERIOD = 0.5  # seconds between looks at the GPU's memory
NO_TOKEN = 2**31 - 1  # ends a turn of `transformers`, and is never sampled
GIB = 2**30
BESIDE = ("rows", "checkpointed", "compiled")
RECOMPILE_LIMIT = 64  # one forward method is compiled for many modules, with and without gradients
RATIOS = {"loss and scoring": ("loss", "scoring"), "rollout": ("rollout",), "step": ("step",)}


def shape_of(name: str) -> str:
    """Which shape a model of the recipes has, by its name."""
    if name == STAND_IN:
        return "tiny"
    found = [shape for shape in SHAPES if f"qwen3-{shape}" in name.lower()]
    if not found:
        raise SystemExit(f"The shape of {name!r} is not known. Set `--shape` to one of {', '.join(SHAPES)}.")
    return found[0]


def find_tokenizer(folder: str | None, name: str) -> tuple[Any, str]:
    """The tokenizer of a folder, or of a model, or one of bytes; and a word on which it is."""
    if folder is not None:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokenizer.chat_template = qwen3_chat_template  # copies of the tokenizer have others
        return tokenizer, folder
    try:
        return AutoTokenizer.from_pretrained(name, local_files_only=True), name
    except (OSError, ValueError):
        return family_tokenizer("qwen3"), "bytes"


@dataclass
class Script:
    """
    What every trajectory does, by its task.

    Args:
        turns (`Mapping[str, Sequence[Message]]`):
            The assistant's messages of each task's solution, by the task's id.
    """

    turns: Mapping[str, Sequence[Message]]
    trajectories: list[Trajectory] = field(default_factory=list)
    """Those that have ended and nobody has asked for yet."""
    _lengths: dict[str, list[int]] = field(default_factory=dict)

    def lengths(self, task_id: str, renderer: Renderer) -> list[int]:
        """Tokens of each turn of a solution."""
        if not self._lengths:  # all at once: in the first step, which warms up
            self._lengths = {each: list(map(renderer.turn_ids, turns)) for each, turns in self.turns.items()}
            self._lengths = {each: list(map(len, turns)) for each, turns in self._lengths.items()}
        return self._lengths[task_id]

    def take(self) -> list[Trajectory]:
        """What has ended since the last time."""
        taken, self.trajectories = self.trajectories, []
        return taken


_turn: ContextVar[Message] = ContextVar("turn")  # what the turn at hand is to be read as


class ScriptedTurns:
    """
    A generator for one trajectory, whose turns are as long as those of a solution.

    Args:
        generator (`Generator`):
            What really samples. It must have no tokens that end a turn.
        turns (`Sequence[Message]`):
            What the turns are to be read as.
        lengths (`Sequence[int]`):
            Tokens of each.
    """

    def __init__(self, generator: Any, turns: Sequence[Message], lengths: Sequence[int]) -> None:
        self._generator = generator
        self._turns = turns
        self._lengths = lengths
        self._index = -1
        self._num_seen = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        if len(prompt_ids) > self._num_seen:  # else the turn before was thrown away
            self._index, self._num_seen = self._index + 1, len(prompt_ids)
        length = self._lengths[self._index]
        fits = length <= sampling.max_tokens
        cut = replace(sampling, max_tokens=min(length, sampling.max_tokens))
        generation = await self._generator.generate(prompt_ids, cut)
        _turn.set(self._turns[self._index])
        return replace(generation, finish_reason="stop" if fits else "length")

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]."""
        self._generator.serve(until)


def read_turn(self: Renderer, history_ids: Any, sampled_ids: Any, tools: Any) -> ParsedTurn:
    """In place of [`Renderer.parse`]: the turn of the script."""
    end_anywhere(self)
    message = _turn.get()
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = tuple(ToolCall(name=each["name"], arguments=each["arguments"]) for each in functions)
    return ParsedTurn(message=message, calls=calls)


@contextmanager
def replaced(*places: tuple[Any, str, Any]) -> Iterator[None]:
    """Other attributes for a while."""
    originals = [getattr(owner, name) for owner, name, _ in places]
    for owner, name, value in places:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


@contextmanager
def solutions_in_rollouts(script: Script) -> Iterator[None]:
    """Let all rollouts of this process do what the script says, whatever samples."""
    roll_out, start = engine.roll_out, TransformersGenerator.__init__

    async def scripted(task: Any, *, generator: Any, renderer: Renderer, **kwargs: Any) -> Trajectory:
        lengths = script.lengths(task.task_id, renderer)
        turns = ScriptedTurns(generator, script.turns[task.task_id], lengths)
        trajectory = await roll_out(task, generator=turns, renderer=renderer, **kwargs)
        script.trajectories.append(trajectory)
        return trajectory

    def endless(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, end_of_turn_ids: original(self, [])

    def start_endless(self: TransformersGenerator, model: Any, *, end_of_turn_ids: Any, **kwargs: Any) -> None:
        start(self, model, end_of_turn_ids=[NO_TOKEN], **kwargs)

    with replaced(
        (engine, "roll_out", scripted),
        (Renderer, "parse", read_turn),
        (TransformersGenerator, "__init__", start_endless),
        *((kind, "make_generator", endless(kind.make_generator)) for kind in (VLLMBackend, VLLMServerBackend)),
    ):
        yield


class MemoryWatch:
    """Looks at the GPU's memory while it is open: what this process has reserved, and what all have taken."""

    def __init__(self, device: str) -> None:
        self.reserved = self.used = self.total = 0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look_often, daemon=True) if device == "cuda" else None

    def __enter__(self) -> "MemoryWatch":
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def look(self) -> None:
        """Look now."""
        if self._thread is None:
            return
        free, self.total = torch.cuda.mem_get_info()
        self.used = max(self.used, self.total - free)
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())

    def figures(self) -> dict[str, float]:
        """Peaks so far, in GiB; empty on a CPU."""
        if self._thread is None:
            return {}
        return {
            "peak_reserved_gib": self.reserved / GIB,
            "peak_used_gib": self.used / GIB,
            "total_gib": self.total / GIB,
        }

    def _look_often(self) -> None:
        while not self._is_over.wait(PERIOD):
            self.look()


class Beside(TrainerCallback):
    """
    Runs steps by turns in the library's way and in others.

    Args:
        ways (`Sequence[str]`):
            The others, of `BESIDE`.

    Attributes:
        now (`str`):
            The way of the step at hand; empty where it is the library's own.
    """

    def __init__(self, ways: Sequence[str]) -> None:
        self.ways = ways
        self.now = ""
        self.trainer: Any = None

    def watch(self, trainer: MCPGRPOTrainer) -> None:
        """Get to know the trainer, before its first step."""
        self.trainer = trainer
        if "compiled" not in self.ways:
            return
        torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
        for module in trainer.model.modules():
            if type(module).__name__.endswith(("RMSNorm", "MLP")):
                module.forward = self._either(module.forward)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Change the way."""
        self.now = ("", *self.ways)[state.global_step % (1 + len(self.ways))]
        if "rows" in self.ways:
            self.trainer._sharing._is_wanted = False if self.now == "rows" else None
        if {"rows", "checkpointed"} & set(self.ways):
            self.trainer._checkpointing._keeps = self.now not in ("rows", "checkpointed")

    def _either(self, forward: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        """Compile what acts on each token, or each head of it, by itself; one that is flat is compiled once for all shapes."""
        compiled = torch.compile(forward, dynamic=True)

        def call(hidden: torch.Tensor) -> torch.Tensor:
            if (
                self.now != "compiled" or not torch.is_grad_enabled()
            ):  # another graph, for passes that take little time
                return forward(hidden)
            return compiled(hidden.reshape(-1, hidden.shape[-1])).view(hidden.shape)

        return call


class StepFigures(TrainerCallback):
    """
    Collects what each step was like, and writes it after each.

    Args:
        script ([`Script`]):
            Has the trajectories.
        watch ([`MemoryWatch`]):
            Has the memory.
        facts (`dict[str, Any]`):
            What was asked for, and where it ran.
        file (`Path`, *optional*):
            JSON file.
        beside ([`Beside`]):
            Knows in which way a step ran.
    """

    def __init__(
        self, script: Script, watch: MemoryWatch, facts: dict[str, Any], file: Path | None, beside: Beside
    ) -> None:
        self.steps: list[dict[str, Any]] = []
        self._beside = beside
        self._script = script
        self._watch = watch
        self._facts = facts
        self._file = file

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not logs or "profile/step_seconds" not in logs:
            return
        self._watch.look()
        measured = {name: value for name, value in logs.items() if isinstance(value, (int, float))}
        step = {"step": state.global_step, "way": self._beside.now, **measured}
        step |= trajectory_figures(self._script.take())
        self.steps.append(step)
        say(
            f"step {step['step']}{', ' * bool(step['way'])}{step['way']}: {step['profile/step_seconds']:.2f} s, "
            f"{step['trajectories']} trajectories, {step['sampled_tokens']} tokens sampled, {step['tokens']} in all"
        )
        if self._file is not None:
            new = self._file.with_suffix(".new")
            found = {"summary": self.summary(), "ratios": self.ratios(), "steps": self.steps}
            new.write_text(json.dumps({**self._facts, **found}, indent=2) + "\n")
            new.replace(self._file)

    def of(self, way: str = "") -> list[dict[str, Any]]:
        """The steps of a way, without the first, if there are more."""
        steps = [step for step in self.steps if step["way"] == way]
        return steps[1:] or steps

    def ratios(self) -> dict[str, dict[str, float]]:
        """What the library's own way takes, as a share of what each other takes: seconds per token, and the peak in the loss."""
        return {way: self._ratio(self.of(), self.of(way)) for way in self._beside.ways if self.of() and self.of(way)}

    def _ratio(self, own: list[dict[str, Any]], other: list[dict[str, Any]]) -> dict[str, float]:
        def per_token(steps: Sequence[Mapping[str, Any]], phases: Sequence[str]) -> float:
            seconds = sum(step.get(f"profile/{phase}_seconds", 0.0) for step in steps for phase in phases)
            return seconds / sum(step["tokens"] for step in steps)

        found = {name: per_token(own, phases) / per_token(other, phases) for name, phases in RATIOS.items()}
        peaks = [[step.get("profile/loss_peak_gib", 0.0) for step in steps] for steps in (own, other)]
        if any(peaks[1]):
            found["peak of memory in the loss"] = max(peaks[0]) / max(peaks[1])
        return found

    def summary(self) -> dict[str, Any]:
        """Medians over the steps of the library's own way, and shares over the trajectories."""
        steps = self.of()
        middle = lambda name: statistics.median(step.get(name, 0.0) for step in steps)  # noqa: E731
        total = lambda name: sum(step.get(name, 0.0) for step in steps)  # noqa: E731
        count = max(total("trajectories"), 1)
        phases = sorted({name for step in steps for name in step if name.startswith("profile/")})
        return {
            "steps": len(steps),
            "median": {name.removeprefix("profile/"): middle(name) for name in phases},
            "trajectories_per_step": total("trajectories") / len(steps),
            "prompt_tokens": total("prompt_tokens") / count,
            "completion_tokens": total("completion_tokens") / count,
            "longest_tokens": max(step["longest_tokens"] for step in steps),
            "turns": total("turns") / count,
            "calls": total("calls") / count,
            "answered": total("answered") / count,
            "calls_without_error": 1 - total("failed_calls") / max(total("calls"), 1),
            "sampled_tokens_per_step": total("sampled_tokens") / len(steps),
            "sampled_tokens_per_second": total("sampled_tokens") / max(total("profile/rollout_seconds"), 1e-9),
            "trained_tokens_per_second": total("tokens") / max(total("profile/step_seconds"), 1e-9),
            **self._watch.figures(),
        }


def trajectory_figures(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Sums over the trajectories of a step."""
    sampled = [sum(len(one.token_ids) for one in each.segments if one.logprobs) for each in trajectories]
    prompts = [len(each.prompt_ids) for each in trajectories]
    completions = [len(each.completion_ids) for each in trajectories]
    return {
        "trajectories": len(trajectories),
        "prompt_tokens": sum(prompts),
        "completion_tokens": sum(completions),
        "tokens": sum(prompts) + sum(completions),
        "longest_tokens": max(map(sum, zip(prompts, completions, strict=True)), default=0),
        "sampled_tokens": sum(sampled),
        "turns": sum(each.num_turns for each in trajectories),
        "calls": sum(len(each.exchanges) for each in trajectories),
        "failed_calls": sum(one.result.is_error for each in trajectories for one in each.exchanges),
        "answered": sum(each.stop_reason == "answered" for each in trajectories),
    }


def show(figures: StepFigures) -> None:
    """Print what was found."""
    found = figures.summary()
    rows = [
        ["trajectories per step", f"{found['trajectories_per_step']:.0f}"],
        [
            "tokens per trajectory",
            f"{found['prompt_tokens'] + found['completion_tokens']:.0f} ({found['prompt_tokens']:.0f} prompt, "
            f"{found['completion_tokens']:.0f} completion; longest {found['longest_tokens']})",
        ],
        ["turns per trajectory", f"{found['turns']:.2f}"],
        ["calls per trajectory", f"{found['calls']:.2f} ({found['calls_without_error']:.1%} without error)"],
        ["trajectories that end with their answer", f"{found['answered']:.1%}"],
        ["sampled tokens per step", f"{found['sampled_tokens_per_step']:.0f}"],
        ["sampled tokens/s, during rollout", f"{found['sampled_tokens_per_second']:.0f}"],
        ["trained tokens/s, over the step", f"{found['trained_tokens_per_second']:.0f}"],
    ]
    if "peak_used_gib" in found:
        rows += [
            ["reserved by this process, peak", f"{found['peak_reserved_gib']:.2f} GiB"],
            ["used on the GPU, peak", f"{found['peak_used_gib']:.2f} of {found['total_gib']:.2f} GiB"],
        ]
    say("", f"{found['steps']} steps, up to step {figures.steps[-1]['step']}:")
    say("", profile_table(figures.of(), num_skipped=0), "", markdown(["", ""], rows))
    if ratios := figures.ratios():
        say("", "As a share of what the other way takes, by token:")
        names = list(dict.fromkeys(name for found in ratios.values() for name in found))
        rows = [
            [name, *(f"{found[name]:.2f}" if name in found else "" for found in ratios.values())] for name in names
        ]
        say("", markdown(["", *ratios], rows))


def solve(arguments: list[str]) -> Script:
    """Run the scripted solutions of the recipe's tasks, and keep what the assistant says in them."""
    settings = grpo_qwen3.parse(arguments)[0]
    tasks = tasks_from_rows(settings.load(settings.tasks, "train", settings.num_tasks))
    solutions = run_solutions(tasks, settings.load_servers(settings.server_processes))
    if broken := [one for one in solutions if one.problems]:
        say(f"{len(broken)} of {len(solutions)} solutions do not solve their task: {broken[0].problems[0]}")
    trajectories = [one.trajectory for one in solutions]
    turns = {
        each.task.task_id: [message for message in each.messages if message["role"] == "assistant"]
        for each in trajectories
    }
    num_turns, num_calls = sum(map(len, turns.values())), sum(len(each.exchanges) for each in trajectories)
    say(
        f"{len(tasks)} solutions: {num_turns / len(tasks):.2f} turns and {num_calls / len(tasks):.2f} calls each on average."
    )
    return Script(turns)


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.allow_abbrev = False
    parser.add_argument("--config", required=True, help="configuration of the recipe")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokenizer", help="folder of a tokenizer")
    parser.add_argument("--shape", choices=SHAPES, help="by default that of the configuration's model")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="file for all figures")
    parser.add_argument("--beside", choices=BESIDE, nargs="+", default=[], help="other ways, by turns")
    options, passed_on = parser.parse_known_args()

    name = grpo_qwen3.parse(["--config", options.config, *["--use_cpu", "true"] * (options.device == "cpu")])[2]
    name = str(name.model_name_or_path)
    shape = options.shape or ("tiny" if options.device == "cpu" else shape_of(name))
    tokenizer, source = find_tokenizer(options.tokenizer, name)
    with tempfile.TemporaryDirectory() as folder, MemoryWatch(options.device) as watch:
        model = Path(folder) / "model"
        save_random_model(model, shape, options.device, tokenizer=tokenizer)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        arguments = ["--config", options.config, "--model_name_or_path", str(model)]
        arguments += ["--output_dir", str(Path(folder) / "run"), "--max_steps", str(options.steps), "--profile"]
        arguments += ["--num_tasks", str(NUM_TASKS), "--eval_strategy", "no", "--save_strategy", "no"]
        arguments += ["--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "true"]
        arguments += [*["--use_cpu", "true"] * (options.device == "cpu"), *passed_on]
        facts = {
            "config": Path(options.config).name,
            "flags": passed_on,
            "beside": options.beside,
            "shape": shape,
            "tokenizer": source,
            "device": device_name(options.device),
            "versions": installed_versions(PACKAGES),
        }
        say(f"{facts['config']} {' '.join(passed_on)}", f"{shape}, tokenizer {source}, {facts['device']}")
        script = solve(arguments)
        beside = Beside(options.beside)
        figures = StepFigures(script, watch, facts, options.json, beside)

        def make_trainer(*args: Any, callbacks: Sequence[Any] = (), **kwargs: Any) -> MCPGRPOTrainer:
            trainer = MCPGRPOTrainer(*args, callbacks=[*callbacks, beside, figures], **kwargs)
            trainer.remove_callback(PrinterCallback)
            beside.watch(trainer)
            return trainer

        reset = torch.cuda.reset_peak_memory_stats

        def look_and_reset(*args: Any, **kwargs: Any) -> None:
            watch.look()
            reset(*args, **kwargs)

        with (
            solutions_in_rollouts(script),
            replaced(
                (grpo_qwen3, "MCPGRPOTrainer", make_trainer),
                (torch.cuda, "reset_peak_memory_stats", look_and_reset),
            ),
        ):
            grpo_qwen3.main(arguments)
        show(figures)
        if not figures.summary()["calls"]:
            sys.exit(
                "No trajectory made a call: turns were not read as those of the solutions, and the figures are of no use."
            )


if __name__ == "__main__":
    main()
