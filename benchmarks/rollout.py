"""
Ask how fast trajectories with slow tools are rolled out: by this library, and by TRL's own loops.

    python benchmarks/rollout.py [--device cuda] [--parts process apart server] [--json figures.json] [--plot rollout.png]

Every trajectory has four turns of 64 sampled tokens: three that call a tool, and an answer. The model is random, so that
only the reading of its turns is made up, in the same way for all (see `fixed_turns.py`); the engine really samples every
token. Call number k of trajectory i takes equally long for all contenders:

- "TRL" is `GRPOTrainer(tools=...)._generate` with vLLM in process. Its tools are functions that sleep.
- "ours" is `RolloutEngine` with `VLLMGenerator` on the very engine of that trainer.
- "ours, engine apart" is the same on an engine that has a process of its own (`--parts process apart`).
- "ours, server" is the same with `VLLMServerGenerator`, "ours, server's text" with one that asks for completions instead of token ids,
  and "TRL async" the rollout worker of `trl.experimental.async_grpo`, one coroutine per trajectory without its queue and its scoring; all
  on one vLLM server that is started for them (`--parts server`).

- "clock" is TRL's engine, driven by nothing but a clock on one thread: when a call would have ended, the next turn is added. It is what a loop
  that takes no time of its own would reach. "clock, held" is the same, but new turns wait until the last ones were added 50 ms ago, so that fewer
  steps have prompts to read.

Our tools are those of a real MCP server process over stdio (`--tools mcp`), or coroutines that sleep (`--tools sleep`).

The bound is what no loop can beat: the longer of the slowest trajectory's own time (its turns alone on the engine, plus its
tools) and the engine's time for all tokens without any tools, both measured here. It leaves out that calls end at different times, so that steps have
fewer sequences and more of them read prompts; the clock has that. On a GPU it exits with 1 if, at 64
trajectories and the heavy-tailed latency, ours is less than 15 times as fast as TRL or reaches less than 0.85 of the bound;
if it is slower than TRL without latency; or if 512 trajectories give fewer tokens per second than 64. It also exits with 1
if a contender fails, after all others have had their turn. On a CPU (`--device cpu`) the model is tiny and there is no
verdict. Nothing is downloaded.

With `--device cpu --step 0.0035 0.000005`, each step of the engine in process or apart waits, as for a GPU, instead of running the
model: everything else is as it is, so that what Python takes shows without a GPU.
"""

import argparse
import asyncio
import copy
import gc
import heapq
import json
import logging
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from fixed_turns import (
    GPU_SHARE,
    MAX_CONTEXT,
    SERVERS,
    TEMPLATE_KWARGS,
    FixedTurns,
    Script,
    Server,
    SleepingPool,
    device_name,
    draw_latencies,
    engine_settings,
    free_port,
    markdown,
    prepare,
    sample_all,
    save_random_model,
    say,
    scripted_message,
    stock_engine,
    synchronize,
    trl_sampling,
    turns_read_by,
    turns_read_by_trl,
    versions,
    wait,
    waiting_engine,
)
from measuring import Check


NUM_CALLS = 3
NONE, TAIL = "0", "tail0.45"
NAMES = {NONE: "none", "0.1": "0.1 s", TAIL: "0.45 s, heavy tail", "2": "2 s"}
TRL, OURS, APART, SERVED, ASYNC = "TRL", "ours", "ours, engine apart", "ours, server", "TRL async"
AS_TEXT = "ours, server's text"
CLOCK, HELD = "clock", "clock, held"
STYLES = {TRL: ("s-", "C3"), OURS: ("o-", "C0"), APART: ("o:", "C0"), SERVED: ("^--", "C0"), ASYNC: ("v--", "C3")}
STYLES |= {AS_TEXT: ("^:", "C0"), CLOCK: ("-", "C7")}
HOLD = 0.05  # seconds
JUDGED = 64  # trajectories
MANY = 512
MIN_SPEEDUP = 15.0
MIN_SHARE = 0.85
NOISE = 1.03  # of two times that are to be equal
NUM_BOUND_RUNS = 2

DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {
        "shape": "0.6b",
        "trajectories": [8, 64, 256, 512],
        "latencies": [NONE, "0.1", TAIL, "2"],
        "tokens": 64,
        "trl_max": 64,
        "server_max": 64,
    },
    "cpu": {
        "shape": "tiny",
        "trajectories": [4, 8],
        "latencies": [NONE, TAIL],
        "tokens": 8,
        "trl_max": 8,
        "server_max": 8,
    },
}


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of the benchmark; see `--help`."""

    device: str
    shape: str
    trajectories: list[int]
    latencies: list[str]
    tokens: int
    tools: str
    repeats: int
    trl_max: int
    trl_seconds: float
    parts: list[str]
    server_max: int
    eager: bool
    step: list[float] | None
    json: Path | None
    plot: Path | None


def parse_arguments() -> Arguments:
    """The command line."""
    import torch

    parser = argparse.ArgumentParser(description="Ask how fast trajectories with slow tools are rolled out.")
    add = parser.add_argument
    add("--device", choices=list(DEFAULTS), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--shape", choices=["tiny", "0.6b", "8b"], help="of the model; 0.6b on a GPU, tiny on a CPU")
    add("--trajectories", type=int, nargs="+", help="8 64 256 512 on a GPU, 4 8 on a CPU")
    add("--latencies", nargs="+", metavar="SECONDS", help="of a call: a number, or `tail0.45` for a log-normal one")
    add("--tokens", type=int, help="of a turn; 64 on a GPU, 8 on a CPU")
    add("--tools", choices=["mcp", "sleep"], default="mcp", help="ours: a real MCP server, or coroutines that sleep")
    add("--repeats", type=int, default=1, help="of each cell of ours; the median is shown")
    add("--trl-max", type=int, help="trajectories that TRL's loop gets at most where tools take time")
    add("--trl-seconds", type=float, default=130.0, help="TRL's loop is left out where its tools alone take longer")
    add(
        "--parts",
        nargs="+",
        choices=["process", "apart", "server"],
        default=["process"],
        help="on an engine in process, one in a process of its own, a server",
    )
    add("--server-max", type=int, help="trajectories on the server at most")
    add("--eager", action="store_true", help="without graphs, which start faster and sample slower")
    add(
        "--step",
        type=float,
        nargs=2,
        metavar=("SECONDS", "PER_SEQUENCE"),
        help="on a CPU: wait so long in each step of the engine, as for a GPU, instead of running the model",
    )
    add("--json", type=Path, help="file for all figures")
    add("--plot", type=Path, help="file for a picture")
    found = parser.parse_args()
    if found.step is not None and found.device != "cpu":
        parser.error("--step is for --device cpu")
    parser.set_defaults(**DEFAULTS[found.device])
    return Arguments(**vars(parser.parse_args()))


@dataclass(kw_only=True)
class Cell:
    """One latency and number of trajectories."""

    latency: str
    num_trajectories: int
    num_tokens: int
    bound: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    def median(self, contender: str) -> float | None:
        """Seconds of a contender, if it took part."""
        return statistics.median(self.seconds[contender]) if self.seconds.get(contender) else None


def tasks_of(number: int) -> list[dict[str, Any]]:
    """Rows with prompts of one length."""
    return [
        {"task_id": f"task-{i}", "prompt": [{"role": "user", "content": f"Wait three times. Number {i:05d}."}]}
        for i in range(number)
    ]


def make_stock_trainer(arguments: Arguments, folder: str, script: Script, output: Path) -> Any:
    """TRL's trainer, whose engine all that runs in process shares."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    number = max(arguments.trajectories)
    config = GRPOConfig(
        output_dir=str(output),
        use_cpu=arguments.device == "cpu",
        bf16=arguments.device == "cuda",
        per_device_train_batch_size=number,  # as many sequences as TRL lets its engine hold
        num_generations=2,
        max_completion_length=1024,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=GPU_SHARE,
        vllm_max_model_length=MAX_CONTEXT,
        generation_kwargs=trl_sampling(script),
        chat_template_kwargs=TEMPLATE_KWARGS,
        model_init_kwargs={"dtype": "bfloat16" if arguments.device == "cuda" else "float32"},
        report_to="none",
        disable_tqdm=True,
    )
    with stock_engine(arguments.device, arguments.eager):
        trainer = GRPOTrainer(
            folder,
            lambda completions, **_: [0.0] * len(completions),
            config,
            Dataset.from_list(tasks_of(number)),
            tools=[wait],
        )
    # The engine has read the same weights from the same folder: nothing to send.
    trainer._last_loaded_step = trainer.state.global_step
    return trainer


class InProcess:
    """
    All that shares the engine of TRL's trainer.

    Args:
        arguments ([`Arguments`]):
            Of the benchmark.
        trainer (`GRPOTrainer`):
            TRL's trainer.
        ours ([`Ours`]):
            Our side.
    """

    def __init__(self, arguments: Arguments, trainer: Any, ours: "Ours") -> None:
        from mcp_grpo.sampling.vllm_generator import VLLMGenerator

        self._arguments = arguments
        self._trainer = trainer
        self._ours = ours
        self.llm = trainer.vllm_generation.llm
        self._generator = VLLMGenerator(self.llm.llm_engine, end_of_turn_ids=[])
        self._lock_steps: dict[int, float] = {}

    def run_trl(self, script: Script) -> float:
        """TRL's own loop."""
        prompts = [row["prompt"] for row in tasks_of(len(script.latencies))]
        self.llm.reset_prefix_cache()
        # What `_generate_and_score_completions` sets before it generates.
        self._trainer._sync_tool_dicts = [{wait.__name__: wait}] * len(prompts)
        self._trainer._async_tool_dicts = [{}] * len(prompts)
        with turns_read_by_trl(script):
            start = time.perf_counter()
            output = self._trainer._generate(copy.deepcopy(prompts))
            seconds = time.perf_counter() - start
        check_count("TRL's loop", sum(map(sum, output[2])), script)
        self.trl_prompt_length = len(output[0][0])
        return seconds

    def run_ours(self, script: Script) -> float:
        """Our loop on the same engine."""
        self.llm.reset_prefix_cache()
        return self._ours.run(self._generator, script)

    def run_by_clock(self, script: Script, hold: float = 0.0) -> float:
        """The engine alone: each turn is added when its call would have ended, or up to `hold` seconds later."""
        from mcp_grpo.sampling import Sampling
        from mcp_grpo.sampling.vllm_generator import _params

        self.llm.reset_prefix_cache()
        engine, count = self.llm.llm_engine, len(script.latencies)
        histories, suffix = [list(prompt) for prompt in self._ours.prompts(count)], self._ours.suffix
        params = _params(Sampling(max_tokens=script.tokens), [], with_seed=False)
        turns, num_tokens, added = [0] * count, 0, -math.inf
        due = [(0.0, index) for index in range(count)]  # a heap
        start = time.perf_counter()
        while due or engine.has_unfinished_requests():
            now = time.perf_counter() - start
            if now - added >= hold or not engine.has_unfinished_requests():
                while due and due[0][0] <= now:
                    _, index = heapq.heappop(due)
                    engine.add_request(f"clock-{index}-{turns[index]}", {"prompt_token_ids": histories[index]}, params)
                    added = now
            if not engine.has_unfinished_requests():
                time.sleep(max(0.0, due[0][0] - now))
                continue
            for output in engine.step():
                if output.finished:
                    index, sampled = int(output.request_id.split("-")[1]), output.outputs[0].token_ids
                    num_tokens += len(sampled)
                    histories[index] = [*histories[index], *sampled, *suffix]
                    if turns[index] < script.num_calls:
                        ends = time.perf_counter() - start + script.latencies[index][turns[index]]
                        heapq.heappush(due, (ends, index))
                        turns[index] += 1
        seconds = time.perf_counter() - start
        check_count("the clock", num_tokens, script)
        return seconds

    def bound(self, script: Script) -> float:
        """What no loop can beat."""
        number = len(script.latencies)
        alone, together = self._lock_step(script, 1), self._lock_step(script, number)
        return max(alone + script.longest_path, together)

    def _lock_step(self, script: Script, number: int) -> float:
        """All turns of so many trajectories without tools, one turn after another: the fastest of a few times."""
        if number not in self._lock_steps:
            prompts, suffix = self._ours.prompts(number), self._ours.suffix
            times = []
            for _ in range(NUM_BOUND_RUNS):
                self.llm.reset_prefix_cache()
                histories = [list(prompt) for prompt in prompts]
                start = time.perf_counter()
                for _ in range(script.num_calls + 1):
                    for history, turn in zip(histories, self._generate(histories, script.tokens), strict=True):
                        history += [*turn, *suffix]
                times.append(time.perf_counter() - start)
            self._lock_steps[number] = min(times)
        return self._lock_steps[number]

    def _generate(self, histories: list[list[int]], tokens: int) -> list[list[int]]:
        vllm = import_module("vllm")
        params = vllm.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
        prompts = [{"prompt_token_ids": list(history)} for history in histories]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def warm_up(self, script: Script) -> None:
        """Let everything be compiled that is compiled at first use."""
        self.run_ours(script)
        self.run_trl(script)
        sample_all(self._generator, self._ours.prompts(1), script.tokens)


class Ours:
    """
    Our loop, on whatever samples.

    Args:
        arguments ([`Arguments`]):
            Of the benchmark.
    """

    def __init__(self, arguments: Arguments) -> None:
        from helpers.families import family_tokenizer

        from mcp_grpo.rollout import Limits, Renderer, RolloutEngine
        from mcp_grpo.tasks import task_from_row

        tokenizer = family_tokenizer("qwen3")
        self.engine = RolloutEngine(SERVERS)
        self._device = arguments.device
        self._limits = Limits(max_turns=NUM_CALLS + 1, max_completion_length=1024, max_context=MAX_CONTEXT)
        self._renderer = Renderer(
            tokenizer, end_of_turn_ids=[tokenizer.eos_token_id], chat_template_kwargs=TEMPLATE_KWARGS
        )
        self._tasks = [task_from_row(row) for row in tasks_of(max(arguments.trajectories))]
        message = {"role": "tool", "name": wait.__name__, "content": wait(0)}
        self.suffix = self._renderer.suffix_ids([message])
        if arguments.tools == "sleep":
            self.engine._pool = SleepingPool(self.engine.catalog)

    def prompts(self, number: int) -> list[tuple[int, ...]]:
        """Opening prompts."""
        return self.engine.prompt_ids(self._tasks[:number], self._renderer)

    def run(self, generator: Any, script: Script) -> float:
        """Roll out as many trajectories as the script has."""
        tasks = self._tasks[: len(script.latencies)]
        with turns_read_by(script):
            start = time.perf_counter()
            trajectories = self.engine.roll_out(
                tasks, renderer=self._renderer, generator=FixedTurns(generator, script), limits=self._limits
            )
            synchronize(self._device)
            seconds = time.perf_counter() - start
        problems = {t.error for t in trajectories if t.is_failed}
        if problems:
            raise RuntimeError(f"trajectories failed: {problems}")
        sampled = sum(len(s.token_ids) for t in trajectories for s in t.segments if s.logprobs is not None)
        check_count("our loop", sampled, script)
        return seconds


def check_count(name: str, num_tokens: int, script: Script) -> None:
    """That as many tokens were sampled as everybody has to."""
    if num_tokens != script.num_tokens:
        raise RuntimeError(f"{name} sampled {num_tokens} tokens instead of {script.num_tokens}")


async def wait_async(seconds: float):  # as `wait`
    """
    Wait for so many seconds.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return wait(0)


wait_async.__name__ = wait.__name__
_number: ContextVar[int] = ContextVar("number")  # of the trajectory at hand
_turn: ContextVar[int] = ContextVar("turn")


class AsyncWorker:
    """
    The rollout worker of `trl.experimental.async_grpo`, without its queue and its scoring.

    Args:
        url (`str`):
            Address of the server.
        model (`str`):
            Name of the model there.
        arguments ([`Arguments`]):
            Of the benchmark.
    """

    def __init__(self, url: str, model: str, arguments: Arguments) -> None:
        from accelerate.state import PartialState
        from datasets import Dataset
        from helpers.families import family_tokenizer

        PartialState()
        self._module: Any = import_module("trl.experimental.async_grpo.async_rollout_worker")
        tokenizer, context = family_tokenizer("qwen3"), multiprocessing.get_context("spawn")
        number = max(arguments.trajectories)
        self._worker = self._module._AsyncRolloutLoop(
            model_name=model,
            dataset=Dataset.from_list(tasks_of(number)),
            reward_funcs=[lambda completions, **_: [0.0] * len(completions)],
            processing_class=tokenizer,
            eos_token_ids=[tokenizer.eos_token_id],
            rollout_buffer=context.Queue(),
            model_version_value=context.Value("i", 0),
            heartbeat_value=context.Value("d", 0.0),
            failed_event=context.Event(),
            exception_info_queue=context.Queue(),
            metrics_queue=context.Queue(),
            tools=[wait_async],
            max_inflight_tasks=number,
            vllm_server_url=url,
            max_tokens=arguments.tokens,
            chat_template_kwargs=TEMPLATE_KWARGS,
        )
        post = self._worker._post
        # Turns of a fixed length, as for all others.
        self._worker._post = lambda path, payload, *rest: post(path, {**payload, "ignore_eos": True}, *rest)
        self._worker._push_rollout_metrics = lambda **_: None  # to a trainer that is not there

    def run(self, script: Script) -> float:
        """One coroutine per trajectory."""
        import aiohttp

        async def roll_out(number: int, row: dict[str, Any]) -> int:
            _number.set(number)
            _turn.set(0)
            tools = [wait_async]
            output = await self._worker._generate_one(row["prompt"], {wait.__name__: wait_async}, tools)
            return len(output[1])

        async def roll_out_all() -> int:
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                self._worker.session = session
                rows = tasks_of(len(script.latencies))
                return sum(await asyncio.gather(*[roll_out(i, row) for i, row in enumerate(rows)]))

        original = self._module.parse_response
        self._module.parse_response = partial(_read_async, script)
        try:
            start = time.perf_counter()
            num_tokens = asyncio.run(roll_out_all())
            seconds = time.perf_counter() - start
        finally:
            self._module.parse_response = original
        check_count("TRL's asynchronous worker", num_tokens, script)
        return seconds


def _read_async(script: Script, tokenizer: Any, ids: Any, **kwargs: Any) -> dict[str, Any]:
    turn = _turn.get()
    _turn.set(turn + 1)
    return scripted_message(script.seconds(_number.get(), turn), script.tokens)


class Run:
    """
    All cells, and what went wrong.

    Args:
        arguments ([`Arguments`]):
            Of the benchmark.
    """

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.problems: list[str] = []
        self.cells = [
            Cell(latency=latency, num_trajectories=number, num_tokens=self.script(latency, number).num_tokens)
            for latency in arguments.latencies
            for number in arguments.trajectories
        ]

    def script(self, latency: str, number: int) -> Script:
        """What the trajectories of a cell do."""
        return Script(draw_latencies(latency, number, NUM_CALLS), self.arguments.tokens)

    def measure(self, contender: str, run: Callable[[Script], float], cells: Sequence[Cell], repeats: int = 1) -> None:
        """Let a contender have its turn at some cells; it is out after its first failure."""
        for cell in cells:
            script = self.script(cell.latency, cell.num_trajectories)
            try:
                for _ in range(repeats):
                    gc.collect()
                    cell.seconds.setdefault(contender, []).append(run(script))
            except Exception as error:
                traceback.print_exc()
                where = f"{cell.num_trajectories} trajectories, latency {NAMES.get(cell.latency, cell.latency)}"
                self.problems.append(f"{contender} failed at {where}: {error!r}")
                say(f"FAILED: {self.problems[-1]}")
                return
            shown = ", ".join(f"{seconds:.2f}" for seconds in cell.seconds[contender])
            say(f"  {contender}: {cell.num_trajectories} trajectories, latency {cell.latency}: {shown} s")

    def cells_for_trl(self) -> list[Cell]:
        """Those where TRL's loop ends in reasonable time."""
        chosen = []
        for cell in self.cells:
            # It runs the tools of all trajectories one after another.
            tools = sum(map(sum, self.script(cell.latency, cell.num_trajectories).latencies))
            if (
                cell.latency != NONE and cell.num_trajectories > self.arguments.trl_max
            ) or tools > self.arguments.trl_seconds:
                cell.skipped[TRL] = f"not run (its tools alone: {tools:,.0f} s)"
            else:
                chosen.append(cell)
        return chosen


def run_in_process(run: Run, folder: str, ours: Ours, output: Path) -> None:
    """TRL and ours on one engine."""
    arguments = run.arguments
    start = time.perf_counter()
    trainer = make_stock_trainer(arguments, folder, run.script(NONE, 1), output)
    say(f"Trainer and engine were up after {time.perf_counter() - start:.0f} s.")
    parts = InProcess(arguments, trainer, ours)
    parts.warm_up(run.script(NONE, min(arguments.trajectories)))
    say(f"Prompts have {parts.trl_prompt_length} tokens with TRL and {len(ours.prompts(1)[0])} with ours.")
    for cell in run.cells:
        cell.bound = parts.bound(run.script(cell.latency, cell.num_trajectories))
    run.measure(OURS, parts.run_ours, run.cells, arguments.repeats)
    run.measure(CLOCK, parts.run_by_clock, run.cells, arguments.repeats)
    slow = [cell for cell in run.cells if cell.latency != NONE]
    run.measure(HELD, partial(parts.run_by_clock, hold=HOLD), slow, arguments.repeats)
    run.measure(TRL, parts.run_trl, run.cells_for_trl())


def run_apart(run: Run, folder: str, ours: Ours, output: Path) -> None:
    """Ours on an engine that has a process of its own."""
    from mcp_grpo.sampling.vllm_generator import VLLMGenerator

    arguments = run.arguments
    start = time.perf_counter()
    settings = engine_settings(arguments.device, arguments.eager)
    settings |= {"gpu_memory_utilization": GPU_SHARE} if arguments.device == "cuda" else {}
    with patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}):
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):  # TRL's, for its own engine
            os.environ.pop(name, None)
        llm = import_module("vllm").LLM(
            model=folder,
            max_model_len=MAX_CONTEXT,
            max_num_seqs=max(arguments.trajectories),
            max_num_batched_tokens=4096,  # as TRL's
            logprobs_mode="processed_logprobs",
            **settings,
        )
    say(f"The engine apart was up after {time.perf_counter() - start:.0f} s.")
    generator = VLLMGenerator(llm.llm_engine, end_of_turn_ids=[])

    def roll_out(script: Script) -> float:
        llm.reset_prefix_cache()
        return ours.run(generator, script)

    try:
        roll_out(run.script(NONE, min(arguments.trajectories)))
        run.measure(APART, roll_out, run.cells, arguments.repeats)
    finally:
        llm.llm_engine.engine_core.shutdown()


def run_on_server(run: Run, folder: str, ours: Ours, output: Path) -> None:
    """Ours and TRL's asynchronous worker on one server."""
    from mcp_grpo.sampling.vllm_server_generator import VLLMServerGenerator

    arguments = run.arguments
    start = time.perf_counter()
    cells = [cell for cell in run.cells if cell.num_trajectories <= arguments.server_max]
    number = max(arguments.trajectories)
    flags = ["--enable-scale-out"] if takes_flag("enable_scale_out") else []
    with Server(folder, arguments.device, arguments.eager, number, output / "server.log", flags) as server:
        say(f"The server was up after {time.perf_counter() - start:.0f} s.")
        generators = [VLLMServerGenerator([server.url], model=lambda: folder, end_of_turn_ids=[]) for _ in range(2)]
        generators[1]._servers[0].takes_tokens = False
        warm = run.script(NONE, min(arguments.trajectories))
        contenders: dict[str, Callable[[Script], float]] = {
            name: partial(ours.run, generator) for name, generator in zip((SERVED, AS_TEXT), generators, strict=True)
        }
        try:
            contenders[ASYNC] = AsyncWorker(server.url, folder, arguments).run
        except Exception as error:
            traceback.print_exc()
            run.problems.append(f"{ASYNC} cannot be run without its trainer: {error!r}")
        for name, contender in contenders.items():
            try:
                contender(warm)
            except Exception as error:
                traceback.print_exc()
                run.problems.append(f"{name} failed: {error!r}")
                continue
            run.measure(name, contender, cells, arguments.repeats)
        for generator in generators:
            generator.close()


def takes_flag(name: str) -> bool:
    """Tell whether this version's server has a flag."""
    try:
        module = import_module("vllm.entrypoints.launchers.cli_args")
    except ModuleNotFoundError:
        module = import_module("vllm.entrypoints.openai.cli_args")
    return hasattr(module.FrontendArgs, name)


def judge(run: Run) -> list[Check]:
    """Whether what is claimed holds, as far as it was measured."""
    cells = {(cell.latency, cell.num_trajectories): cell for cell in run.cells}
    checks = []
    slow = cells.get((TAIL, JUDGED))
    if slow and (ours := slow.median(OURS)):
        where = f"at {JUDGED} trajectories and {NAMES[TAIL]}"
        if trl := slow.median(TRL):
            checks.append(_check(f"ours is {MIN_SPEEDUP:.0f} times as fast as TRL {where}", trl / ours, MIN_SPEEDUP))
        checks.append(_check(f"ours reaches {MIN_SHARE} of the bound {where}", slow.bound / ours, MIN_SHARE))
    for (latency, number), cell in cells.items():
        ours, trl = cell.median(OURS), cell.median(TRL)
        if latency == NONE and ours and trl:
            claim = f"ours is not slower than TRL without latency, at {number} trajectories"
            checks.append(_check(claim, trl / ours, 1 / NOISE))
    for latency in run.arguments.latencies:
        few, many = cells.get((latency, JUDGED)), cells.get((latency, MANY))
        if few and many and few.median(OURS) and many.median(OURS):
            rates = [cell.num_tokens / (cell.median(OURS) or 1) for cell in (few, many)]
            claim = f"{MANY} trajectories give as many tokens/s as {JUDGED}, latency {NAMES.get(latency, latency)}"
            checks.append(_check(claim, rates[1] / rates[0], 1.0))
    return checks


def _check(claim: str, got: float, least: float) -> Check:
    return Check(claim=claim, holds=got >= least, got=f"{got:.2f} times" if got >= 2 else f"{got:.3f}")


def table(run: Run) -> str:
    """All cells."""
    others = [
        name
        for name in (CLOCK, HELD, APART, SERVED, AS_TEXT, ASYNC)
        if any(name in cell.seconds for cell in run.cells)
    ]
    header = ["latency", "trajectories", "TRL, s", "ours, s", "tokens/s, TRL", "tokens/s, ours", "times as fast"]
    header += ["bound, s", "bound / ours", f"{CLOCK} / ours", *[f"{name}, s" for name in others]]
    rows = []
    for cell in run.cells:
        ours, trl, clock = cell.median(OURS), cell.median(TRL), cell.median(CLOCK)
        rate = [f"{cell.num_tokens / seconds:,.0f}" if seconds else "" for seconds in (trl, ours)]
        rows.append(
            [
                NAMES.get(cell.latency, cell.latency),
                str(cell.num_trajectories),
                f"{trl:.2f}" if trl else cell.skipped.get(TRL, "failed"),
                f"{ours:.2f}" if ours else "failed",
                *rate,
                f"{trl / ours:.1f}" if trl and ours else "",
                f"{cell.bound:.2f}" if cell.bound else "",
                f"{cell.bound / ours:.2f}" if cell.bound and ours else "",
                f"{clock / ours:.2f}" if clock and ours else "",
                *[f"{cell.median(name):.2f}" if cell.median(name) else "" for name in others],
            ]
        )
    return markdown(header, rows)


def plot(run: Run, path: Path) -> None:
    """Seconds over trajectories, one picture for each latency."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(
        1, len(run.arguments.latencies), figsize=(3.6 * len(run.arguments.latencies), 3.6), sharey=True, squeeze=False
    )
    for axis, latency in zip(axes[0], run.arguments.latencies, strict=True):
        cells = [cell for cell in run.cells if cell.latency == latency]
        for name, (style, color) in STYLES.items():
            points = [(c.num_trajectories, c.median(name)) for c in cells if c.median(name)]
            if points:
                axis.plot(*zip(*points, strict=True), style, color=color, label=name)
        if any(cell.bound for cell in cells):
            bounds = [cell.bound or math.nan for cell in cells]
            axis.plot([cell.num_trajectories for cell in cells], bounds, "k:", label="bound")
        axis.set(xscale="log", yscale="log", xlabel="trajectories", title=f"latency: {NAMES.get(latency, latency)}")
        axis.set_xticks([cell.num_trajectories for cell in cells], [str(cell.num_trajectories) for cell in cells])
        axis.xaxis.set_minor_locator(ticker.NullLocator())
        axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.yaxis.set_minor_formatter(ticker.NullFormatter())
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("seconds")
    lines = {line.get_label(): line for axis in axes[0] for line in axis.get_lines()}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(lines), frameon=False)
    figure.set_layout_engine("constrained")
    figure.savefig(path, dpi=120)


def main(arguments: Arguments) -> list[str]:
    """
    Run the benchmark.

    Returns:
        `list[str]`: A sentence for each contender that failed, and on a GPU for each claim that does not hold.
    """
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    run = Run(arguments)
    with ExitStack() as stack:
        output = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        folder = save_random_model(output / "model", arguments.shape, arguments.device)
        ours = Ours(arguments)
        stack.callback(ours.engine.close)
        if arguments.step is not None:
            stack.enter_context(waiting_engine(*arguments.step))
        parts: dict[str, Callable[..., None]] = {
            "process": run_in_process,
            "apart": run_apart,
            "server": run_on_server,
        }
        for name in arguments.parts:
            try:
                parts[name](run, folder, ours, output)
            except Exception as error:
                traceback.print_exc()
                run.problems.append(f"What runs on the {name} failed: {error!r}")
                say(f"FAILED: {run.problems[-1]}")
            gc.collect()
        tokens = f"prompts of {len(ours.prompts(1)[0])} tokens, {NUM_CALLS + 1} turns of {arguments.tokens}"
    tools = "a real MCP server over stdio" if arguments.tools == "mcp" else "coroutines that sleep"
    say(
        "",
        f"{device_name(arguments.device)}, {arguments.shape}, {tokens}. Our tools: {tools}; TRL's: functions that sleep.",
    )
    say("", table(run), "")
    checks = judge(run)
    is_judged = arguments.device == "cuda"
    for check in checks:
        verdict = ("PASS" if check.holds else "FAIL") if is_judged else "no verdict on a CPU"
        say(f"{verdict}: {check.claim}: {check.got}")
    if arguments.json is not None:
        figures = {
            "arguments": {name: str(v) if isinstance(v, Path) else v for name, v in asdict(arguments).items()},
            "versions": versions(),
            "device": device_name(arguments.device),
            "cells": [asdict(cell) for cell in run.cells],
            "checks": [asdict(check) for check in checks],
            "problems": run.problems,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")
    if arguments.plot is not None and any(cell.seconds for cell in run.cells):
        plot(run, arguments.plot)
    failures = [f"It does not hold that {check.claim}: {check.got}." for check in checks if not check.holds]
    return run.problems + (failures if is_judged else [])


if __name__ == "__main__":
    prepare()
    if failures := main(parse_arguments()):
        sys.exit("\n".join(failures))
