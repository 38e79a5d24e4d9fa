"""
What the benchmarks of rollouts share: random models, turns of a fixed length, and tools that take a given time.

A random model calls no tools. So the engine really samples, every turn has exactly so many tokens, and only the reading of
a turn is replaced, in TRL's loops and in ours alike: all turns but the last are read as one call of the tool, the last one
as an answer. What the engine computes, the tools' latencies and the loops are real.
"""

import asyncio
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch


os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before anything imports huggingface_hub
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # it would be compiled at the first request
sys.path.append(str(Path(__file__).parent.parent / "tests"))

import torch
from helpers.families import family_tokenizer
from slow_server import ANSWER, DESCRIPTION, NAME
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from trl.trainer import grpo_trainer

from mcp_grpo.rollout import Renderer
from mcp_grpo.rollout.renderer import ParsedTurn
from mcp_grpo.sampling import Generation, Sampling
from mcp_grpo.sampling.vllm_backend import VLLMBackend
from mcp_grpo.sampling.vllm_server_backend import VLLMServerBackend
from mcp_grpo.trl_compat import engine_arguments
from mcp_grpo.types import ToolCall, ToolResult


SLOW_SERVER = Path(__file__).parent / "slow_server.py"
SERVERS = {
    "slow": {
        "command": sys.executable,
        "args": ["-S", str(SLOW_SERVER)],
        "x-mcp-grpo": {"protocol": "legacy", "max_inflight": 4096},
    }
}
MAX_CONTEXT = 2048
GPU_SHARE = 0.3  # of the memory, for an engine beside a trainer
START_TIME = 300.0  # seconds for a server to be up
STOP_TIME = 20.0
TEMPLATE_KWARGS = {"enable_thinking": False}
# Where a message has to be rendered anew, it has about as many tokens as what was sampled.
FILLER = "x"

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    },
    "0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "1.7b": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "4b": {
        "vocab_size": 151_936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "8b": {
        "vocab_size": 151_936,
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


def prepare() -> None:
    """Stop, in words, where there is no vLLM; and leave nothing running when this process is told to end."""
    if find_spec("vllm") is None:
        raise SystemExit(
            "This benchmark needs vLLM: `pip install mcp-grpo[vllm]`, or `python tests/install_vllm.py` for a CPU."
        )
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def random_config(shape: str, device: str, tokenizer: Any = None) -> Qwen3Config:
    """A Qwen3 of a shape: bf16 on a GPU, float32 on a CPU."""
    tokenizer = tokenizer or family_tokenizer("qwen3")
    return Qwen3Config(
        **{"vocab_size": len(tokenizer)} | SHAPES[shape],
        architectures=[Qwen3ForCausalLM.__name__],
        max_position_embeddings=40_960,
        tie_word_embeddings=shape != "8b",
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.bfloat16 if device == "cuda" else torch.float32,
    )


def random_model(shape: str, device: str, tokenizer: Any = None) -> PreTrainedModel:
    """The same random Qwen3 each time."""
    config, before = random_config(shape, device, tokenizer), torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(config.dtype)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)


def save_random_model(folder: Path, shape: str, device: str, weights: bool = True, tokenizer: Any = None) -> str:
    """Write a random model and its tokenizer where `from_pretrained` and vLLM find them."""
    tokenizer = tokenizer or family_tokenizer("qwen3")
    tokenizer.save_pretrained(folder)
    make = random_model if weights else random_config
    make(shape, device, tokenizer).save_pretrained(folder)
    return str(folder)


def engine_settings(device: str, eager: bool) -> dict[str, Any]:
    """Arguments of the engine beside those of the trainer."""
    if device == "cuda":
        return {"enforce_eager": True} if eager else {}
    # A request with a seed must have its prompt read in one step: vLLM cannot step back a CPU's random numbers.
    return {
        "enforce_eager": True,
        "block_size": 32,
        "dtype": "float32",
        "kv_cache_memory_bytes": 256 << 20,
        "enable_chunked_prefill": False,
    }


@contextmanager
def stock_engine(device: str, eager: bool) -> Iterator[None]:
    """Let TRL's own backend make its engine on either device."""
    arguments = engine_settings(device, eager)
    if device == "cpu":
        # A share of the whole machine's memory there; and weights that are packed cannot be sent anew.
        arguments["gpu_memory_utilization"] = None
        import_module("vllm._custom_ops")._supports_onednn = False
    with engine_arguments(arguments):
        yield


@contextmanager
def waiting_engine(seconds: float, per_sequence: float) -> Iterator[None]:
    """
    Let a step of vLLM on a CPU wait, as for a GPU, instead of running the model: so long, and longer for each sequence in it.

    Seeds of requests are left alone: on a GPU, one kernel draws for all of them.
    """

    def wait_as_for_a_gpu(self: Any, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        time.sleep(seconds + per_sequence * self.input_batch.num_reqs)
        return torch.rand(len(input_ids), self.model_config.get_hidden_size())  # of some token each

    def draw_for_all(self: Any, logits: torch.Tensor, generators: Any, *limits: Any) -> Any:
        return original(self, logits, {}, *limits)

    runner = import_module("vllm.v1.worker.gpu_model_runner").GPUModelRunner
    sampler = import_module("vllm.v1.sample.ops.topk_topp_sampler").TopKTopPSampler
    original = sampler.forward_cpu
    with patch.object(runner, "_model_forward", wait_as_for_a_gpu), patch.object(sampler, "forward_cpu", draw_for_all):
        yield


@dataclass(frozen=True)
class Script:
    """
    What every trajectory of a batch does.

    Args:
        latencies (`Sequence[Sequence[float]]`):
            Seconds that each call of each trajectory takes.
        tokens (`int`):
            Tokens of each turn.
    """

    latencies: Sequence[Sequence[float]]
    tokens: int

    @property
    def num_calls(self) -> int:
        """Calls of each trajectory; it has one more turn."""
        return len(self.latencies[0])

    @property
    def num_tokens(self) -> int:
        """Sampled tokens of all trajectories."""
        return len(self.latencies) * (self.num_calls + 1) * self.tokens

    @property
    def longest_path(self) -> float:
        """Seconds of tools in the trajectory that has most of them."""
        return max(sum(calls) for calls in self.latencies)

    def seconds(self, trajectory: int, turn: int) -> float | None:
        """How long the call of this turn takes; `None` if the turn is an answer."""
        calls = self.latencies[trajectory % len(self.latencies)]
        return calls[turn] if turn < len(calls) else None


def draw_latencies(kind: str, num_trajectories: int, num_calls: int, seed: int = 0) -> list[list[float]]:
    """
    The same latencies for whoever asks.

    Args:
        kind (`str`):
            A number of seconds, or `"tail"` followed by the mean of a log-normal distribution that is cut at 3 s, or `"rare"` for the
            same with one call of all that takes 10 s.
        num_trajectories (`int`):
            How many.
        num_calls (`int`):
            Calls of each.
        seed (`int`, *optional*, defaults to `0`):
            Of the distribution.

    Returns:
        `list[list[float]]`: Seconds, by trajectory and call.
    """
    rng = random.Random(seed)
    if not kind.startswith(("tail", "rare")):
        return [[float(kind)] * num_calls for _ in range(num_trajectories)]
    mean, sigma, cap = float(kind[4:]), 1.0, 3.0
    draw = lambda: min(rng.lognormvariate(math.log(mean) - sigma**2 / 2, sigma), cap)  # noqa: E731
    drawn = [[draw() for _ in range(num_calls)] for _ in range(num_trajectories)]
    if kind.startswith("rare"):
        drawn[0][0] = 10.0
    return drawn


_place: ContextVar[tuple[int, int]] = ContextVar("place")  # number of the trajectory at hand, and its turn


class FixedTurns:
    """
    A generator whose turns all have the same length, and which knows which turn of which trajectory it is at.

    Args:
        generator (`Generator`):
            What really samples. It must have no tokens that end a turn.
        script ([`Script`]):
            What the trajectories do.
    """

    def __init__(self, generator: Any, script: Script) -> None:
        self._generator = generator
        self._script = script
        self._turns: dict[int, int] = {}
        self._numbers: dict[int, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        which = sampling.trajectory
        number = self._numbers.setdefault(which, len(self._numbers) % len(self._script.latencies))
        turn = self._turns[which] = self._turns.get(which, -1) + 1
        generation = await self._generator.generate(prompt_ids, replace(sampling, max_tokens=self._script.tokens))
        _place.set((number, turn))
        return replace(generation, finish_reason="stop")

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]."""
        self._generator.serve(until)


def scripted_message(seconds: float | None, tokens: int) -> dict[str, Any]:
    """A turn as a message: a call that takes so long, or an answer if that is `None`."""
    message: dict[str, Any] = {"role": "assistant", "content": FILLER * tokens}
    if seconds is not None:
        call = {"name": NAME, "arguments": {"seconds": seconds}}
        message |= {"content": "", "tool_calls": [{"type": "function", "function": call}]}
    return message


class AnyToken:
    """Tokens that end a turn: whichever was sampled last."""

    def __contains__(self, token: int) -> bool:
        return True


def end_anywhere(renderer: Any) -> None:
    """Let a turn end with the token that was sampled last, as a random model does not sample the end of one."""
    renderer.end_of_turn_ids = AnyToken()


@contextmanager
def turns_read_by(script: Script) -> Iterator[None]:
    """Let our renderer read turns as the script has it. Sampling must go through [`FixedTurns`]."""
    original = Renderer.parse

    def parse(self: Renderer, history_ids: Any, sampled_ids: Any, tools: Any) -> ParsedTurn:
        end_anywhere(self)
        seconds = script.seconds(*_place.get())
        calls = () if seconds is None else (ToolCall(name=NAME, arguments={"seconds": seconds}),)
        return ParsedTurn(message=scripted_message(seconds, script.tokens), calls=calls)

    Renderer.parse = parse
    try:
        yield
    finally:
        Renderer.parse = original


@contextmanager
def fixed_turns_in_trainers(script: Script) -> Iterator[None]:
    """The same for whole trainers of ours: their generators get turns of a fixed length, too."""
    originals = {kind: kind.make_generator for kind in (VLLMBackend, VLLMServerBackend)}

    def made_by(original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, end_of_turn_ids: FixedTurns(original(self, []), script)

    for kind, original in originals.items():
        kind.make_generator = made_by(original)
    try:
        with turns_read_by(script):
            yield
    finally:
        for kind, original in originals.items():
            kind.make_generator = original


@contextmanager
def turns_read_by_trl(script: Script) -> Iterator[None]:
    """Let TRL's tool loop read turns as the script has it. It reads all trajectories of a turn, then those of the next."""
    module: Any = grpo_trainer
    original, num_read = module.parse_response, 0

    def parse(tokenizer: Any, ids: Any, **kwargs: Any) -> dict[str, Any]:
        nonlocal num_read
        turn, number = divmod(num_read, len(script.latencies))
        num_read = (num_read + 1) % (len(script.latencies) * (script.num_calls + 1))
        return scripted_message(script.seconds(number, turn), script.tokens)

    module.parse_response = parse
    try:
        yield
    finally:
        module.parse_response = original


def trl_sampling(script: Script) -> dict[str, Any]:
    """What makes TRL's turns as long as ours."""
    return {"max_tokens": script.tokens, "ignore_eos": True}


def wait(seconds: float):  # without what it returns, which the schema of an MCP tool does not have
    """
    Wait for so many seconds.

    Args:
        seconds: How long.
    """
    if seconds:
        time.sleep(seconds)
    return ANSWER


assert wait.__name__ == NAME
assert DESCRIPTION in (wait.__doc__ or "")


@dataclass(frozen=True)
class _SleepingLease:
    tools: Any

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        await asyncio.sleep(max(call.arguments["seconds"] for call in calls))
        return [ToolResult(text=ANSWER) for _ in calls]

    async def states(self) -> dict[str, Any]:
        return {}

    async def next_user_turn(self, so_far: Any) -> None:
        return None

    @property
    def user_exchanges(self) -> tuple[()]:
        return ()


@dataclass(frozen=True)
class SleepingPool:
    """Stands in for a pool of servers: its tools only sleep. What MCP itself costs is left out."""

    catalog: Any

    @asynccontextmanager
    async def lease(self, task: Any) -> Any:
        """See [`ToolPool.lease`]."""
        yield _SleepingLease(self.catalog.tools_for(task))


def sample_all(generator: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Generation]:
    """Continue all prompts at once with one of our generators, on this thread."""
    result: Future[list[Generation]] = Future()

    async def ask() -> list[Generation]:
        samplings = [Sampling(max_tokens=max_tokens, seed=i, trajectory=i) for i in range(len(prompts))]
        return list(await asyncio.gather(*map(generator.generate, prompts, samplings)))

    def work() -> None:
        try:
            result.set_result(asyncio.run(ask()))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    generator.serve(result)
    thread.join()
    return result.result()


@dataclass
class Server:
    """
    A vLLM server of one's own. A context manager, which ends it with all that it started.

    Args:
        model (`str`):
            Folder of the model.
        device (`str`):
            `"cuda"` or `"cpu"`.
        eager (`bool`):
            Without graphs.
        max_num_seqs (`int`):
            Sequences at a time.
        log (`Path`):
            File for what it says.
        arguments (`Sequence[str]`, *optional*):
            Further ones.
        environment (`Mapping[str, str]`, *optional*):
            Further variables.
    """

    model: str
    device: str
    eager: bool
    max_num_seqs: int
    log: Path
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __enter__(self) -> "Server":
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", self.model]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_CONTEXT)]
        command += ["--logprobs-mode", "processed_logprobs", "--max-num-seqs", str(self.max_num_seqs)]
        command += ["--disable-uvicorn-access-log", *self.arguments]
        if self.device == "cuda":
            command += ["--gpu-memory-utilization", str(GPU_SHARE), *["--enforce-eager"] * self.eager]
        else:
            command += ["--enforce-eager", "--dtype", "float32", "--block-size", "32"]
            command += ["--kv-cache-memory-bytes", str(256 << 20), "--no-enable-chunked-prefill"]
        # What an engine in this process has set must not make the server's engine one of its group.
        ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")
        environment = {name: value for name, value in os.environ.items() if name not in ours}
        environment |= {"VLLM_SERVER_DEV_MODE": "1", **self.environment}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True, cwd="/"
            )
        try:
            self._wait()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The whole group, which is the server's own: its engine is a process of its own.
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, number)
            except ProcessLookupError:
                break
            try:
                self._process.wait(STOP_TIME)
            except subprocess.TimeoutExpired:
                continue

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIME
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"The vLLM server ended with {self._process.returncode}:\n{tail(self.log)}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.5)
        raise RuntimeError(f"The vLLM server was not up after {START_TIME:.0f} s:\n{tail(self.log)}")


def free_port() -> int:
    """One that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def tail(log: Path, num_lines: int = 25) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-num_lines:]) if log.exists() else ""


def synchronize(device: str) -> None:
    """Wait for what the GPU still does for this thread."""
    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def versions() -> dict[str, str]:
    """Of what is measured."""
    return {name: import_module(name).__version__ for name in ("torch", "transformers", "trl", "vllm")}


def device_name(device: str) -> str:
    """Where it is measured."""
    return torch.cuda.get_device_name() if device == "cuda" else f"{os.cpu_count()} CPUs"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def say(*lines: str) -> None:
    """Show something at once."""
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def run_alone(script: Path, arguments: Sequence[str], log: Path, timeout: float) -> str | None:
    """
    Run a part in a process of its own, so that whatever it held is free afterwards.

    Args:
        script (`Path`):
            Program.
        arguments (`Sequence[str]`):
            Its arguments.
        log (`Path`):
            File for what it says.
        timeout (`float`):
            Seconds that it may take.

    Returns:
        `str` or `None`: Why it failed, if it did.
    """
    command = [sys.executable, str(script), *arguments]
    # Else all would meet at the same port, also those of other runs on the machine.
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True, env=environment)
    try:
        if (code := process.wait(timeout)) != 0:
            return f"it ended with {code}:\n{tail(log)}"
        return None
    except subprocess.TimeoutExpired:
        return f"it took longer than {timeout:.0f} s:\n{tail(log)}"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
