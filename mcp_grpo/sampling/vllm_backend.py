"""TRL's vLLM backend in process, extended to take adapters as well as whole weights."""

import gc
import os
import random
import shutil
import socket
import sys
import tempfile
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil
import torch
from accelerate.utils import DistributedType, is_peft_model
from transformers import AutoConfig

from mcp_grpo.errors import SamplerError, SettingsError
from mcp_grpo.sampling.adapter_export import adapter_problem, max_lora_rank, save_adapter
from mcp_grpo.sampling.merging import Merged, not_merging
from mcp_grpo.sampling.vllm_generator import VLLMGenerator
from mcp_grpo.tools.transports.reaper import end_with_us
from mcp_grpo.trl_compat import VLLMGeneration, engine_arguments


WeightSync = Literal["auto", "merge", "adapter"]
APART = "VLLM_ENABLE_V1_MULTIPROCESSING"
"""Variable of vLLM that gives an engine a process of its own."""
MAX_FINE_SIZE = 512
"""Requests for which every few have a CUDA graph of their own, as with vLLM."""
TOO_LITTLE_MEMORY = {
    "No available memory for the cache": "Its weights and its largest step take all of its share of the GPU, `vllm_gpu_memory_utilization` "
    "({share}); or it counted what another process on the GPU took while it measured. If runs share the GPU, start them one after "
    "another; otherwise raise it, or take a larger GPU.",
    "cache is needed": "Its cache has no room for one trajectory of `vllm_max_model_length` tokens. Raise `vllm_gpu_memory_utilization` "
    "({share}), its share of the GPU, or lower `vllm_max_model_length` ({length}).",
    "is less than desired": "Less memory is free than its share, `vllm_gpu_memory_utilization` ({share}): the policy or another process "
    "has the rest. Lower it, or end what else runs there.",
    "Error in memory profiling": "Another process on the GPU gave memory back while it measured what it needs. Start the run "
    "again; let runs that share a GPU start one after another.",
}
"""What to do, by a part of what vLLM says where it finds too little memory to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VLLMSettings:
    """
    Settings beside TRL's own.

    Args:
        weight_sync (`str`, *optional*, defaults to `"auto"`):
            How weights get to vLLM: `"merge"` sends the whole model with the adapter merged into it, `"adapter"` only
            the adapter. `"auto"` merges in process if weights are in float32, where nothing is lost, and what vLLM cannot
            apply; otherwise it sends adapters.
        engine (`Mapping[str, Any]`, *optional*):
            Further arguments of the engine in process.
        urls (`Sequence[str]`, *optional*):
            Addresses of several servers.
        folder (`Path`, *optional*):
            Where weights for servers are written; they must be able to read it.
    """

    weight_sync: WeightSync = "auto"
    engine: Mapping[str, Any] = field(default_factory=dict)
    urls: Sequence[str] = ()
    folder: Path = Path()


class VLLMBackend(VLLMGeneration):
    """
    TRL's vLLM backend in process (`vllm_mode="colocate"`).

    How TRL starts the engine, sends whole weights and sleeps stays as it is.

    Attributes:
        weight_sync (`str`):
            `"merge"` or `"adapter"`: how weights are sent.
        bytes_sent (`int`):
            Size of what was sent last.
        rounded_away (`float`, *optional*):
            Share of the adapter's change that was lost when it was merged last; see [`Merged`].
    """

    llm: Any  # TRL's; `None` once closed

    def __init__(self, *, settings: VLLMSettings, **kwargs: Any) -> None:
        self._settings = settings
        self.weight_sync = chosen_weight_sync(settings.weight_sync, kwargs["model"], kwargs["mode"])
        self.bytes_sent = 0
        self.rounded_away: float | None = None
        self._version = 0
        self._adapter: Any = None
        self._folder: Path | None = None
        self._end_processes: Callable[[], None] = lambda: None  # those of an engine apart
        if kwargs["accelerator"].device.type == "cpu":
            kwargs["enable_sleep_mode"] = False  # vLLM cannot sleep there, and has no GPU's memory to give back
        super().__init__(**kwargs)

    @property
    def sends_adapters(self) -> bool:
        """Return whether only the adapter is sent."""
        return self.weight_sync == "adapter"

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of a prompt and its completion."""
        return self.llm.llm_engine.model_config.max_model_len

    def make_generator(self, end_of_turn_ids: Sequence[int]) -> Any:
        """Make a generator that samples from the weights that were sent last."""
        return VLLMGenerator(self.llm.llm_engine, end_of_turn_ids=end_of_turn_ids, adapter=lambda: self._adapter)

    def wake_up(self) -> None:
        """Wake the engine to sample, if it sleeps while the policy trains."""
        if self.enable_sleep_mode:
            self._wake("kv_cache")

    def sleep(self) -> None:
        """Free memory for training, if the engine sleeps then."""
        if self.enable_sleep_mode:
            # Merged weights are sent again next time; those below an adapter are kept.
            self.llm.sleep(level=1 if self.sends_adapters else 2)
            self._llm_weights_sleeping = True

    def _wake(self, part: str) -> None:
        """Give the engine memory for one of its parts, also what torch keeps of the last passes: it cannot ask torch for that."""
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()
        self.llm.wake_up(tags=[part])

    @property
    def is_asleep(self) -> bool:
        """Return whether the engine needs its weights before it samples."""
        return self.enable_sleep_mode and self._llm_weights_sleeping

    def close(self) -> None:
        """Remove what was written for vLLM, and end the engine to free its memory. Safe to call more than once."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        if getattr(self, "llm", None) is None:
            return
        # A sleeping engine has freed its memory, and vLLM would fail to free it again. With several processes none may end
        # it: vLLM would also end their process group.
        if not self._is_apart and (self.enable_sleep_mode or not self._is_alone):
            return
        engine, self.llm = self.llm, None
        try:
            engine.llm_engine.engine_core.shutdown()
        finally:
            self._end_processes()
        del engine
        gc.collect()  # it refers to itself
        if self.accelerator.device.type == "cuda":
            torch.cuda.empty_cache()

    def sync_weights(self) -> None:
        """Send the policy's current weights. On several processes all must call it together."""
        self._version += 1
        if self.sends_adapters:
            self._send_adapter()
        else:
            self._send_weights()

    def _init_vllm(self) -> None:
        arguments: dict[str, Any] = {}
        if self.sends_adapters:
            arguments = {
                "enable_lora": True,
                "max_lora_rank": max_lora_rank(self._policy.peft_config["default"]),
                "max_loras": 1,
            }
        if self._is_apart:
            arguments |= {"distributed_executor_backend": "uni"}  # TRL's is for this process
        sleeps = self.enable_sleep_mode
        arguments |= self._cpu_arguments() if self.accelerator.device.type == "cpu" else self._gpu_arguments()
        if self.sends_adapters and sleeps:
            # TRL would drop the weights now, but those below the adapter are not sent again.
            arguments |= {"enable_sleep_mode": True}
            self.enable_sleep_mode = False
        with ExitStack() as stack:
            if self._is_alone:
                stack.enter_context(_group_of_one())
            if self._is_apart:
                stack.enter_context(_program_hidden())
            stack.enter_context(engine_arguments({**arguments, **self._settings.engine}))
            stack.enter_context(_random_state_kept())
            before = _children()
            try:
                super()._init_vllm()
            except (ValueError, RuntimeError, AssertionError) as error:
                if problem := memory_problem(error, self.gpu_memory_utilization, self.max_model_length):
                    raise SettingsError(problem) from error
                raise
        if self._is_apart:
            self._end_processes = end_with_us(each.pid for each in _children() - before)
        if self.sends_adapters and sleeps:
            self.enable_sleep_mode = True
            self.sleep()

    def _gpu_arguments(self) -> dict[str, Any]:
        # vLLM's own largest graph has twice `max_num_seqs` tokens, at most 512. Results of tools have more, and a step beyond
        # launches every kernel by itself, which takes longer than they run.
        sizes = graph_sizes(self._settings.engine.get("max_num_seqs", self.max_num_seqs) or MAX_FINE_SIZE)
        # Where adapters are sent, every request has one, so that graphs without it are not needed.
        return {"compilation_config": {"cudagraph_capture_sizes": sizes, "cudagraph_specialize_lora": False}}

    def _cpu_arguments(self) -> dict[str, Any]:
        context = self.max_model_length or self._policy.config.get_text_config().max_position_embeddings
        return {
            "gpu_memory_utilization": None,  # a share of the whole machine's memory there
            "kv_cache_memory_bytes": 256 << 20,
            "dtype": "float32",
            # There, a request with a seed whose prompt comes in chunks crashes the engine.
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, context),
        }

    @property
    def _is_alone(self) -> bool:
        """Return whether this process is the only one of the run."""
        return self.accelerator.distributed_type == DistributedType.NO

    @property
    def _is_apart(self) -> bool:
        """
        Return whether the engine has a process of its own, by vLLM's own variable. Adapters reach it there, as files; whole weights
        would not.
        """
        return self._is_alone and self.sends_adapters and os.environ.get(APART) == "1"

    @property
    def _policy(self) -> Any:
        return self.accelerator.unwrap_model(self.model)

    def _iter_named_params(self) -> Generator[tuple[str, torch.Tensor]]:
        for name, value in self._iter_merged_params():
            self.bytes_sent += value.numel() * value.element_size()
            yield name, value

    def _iter_merged_params(self) -> Generator[tuple[str, torch.Tensor]]:
        # Sharded weights cannot be merged one by one; TRL then merges in place.
        is_sharded = self.accelerator.distributed_type in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        if is_sharded or not is_peft_model(self.model):
            yield from super()._iter_named_params()
            return
        merged = Merged(self.model)
        with not_merging(self.model):
            yield from merged.weights(super()._iter_named_params())
        self.rounded_away = merged.rounded_away

    def _send_weights(self) -> None:
        self.bytes_sent = 0
        if self.accelerator.device.type != "cpu":
            super().sync_weights()
            self._forget_old_weights()
            return
        # On a CPU, vLLM packs weights, which TRL's own loading does not know.
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": self._iter_named_params()})
        # It packs what it loads, but not an output layer that shares the embedding's weights.
        model = self.llm.llm_engine.model_executor.driver_worker.model_runner.model
        for layer in model.modules():
            if hasattr(layer, "cpu_linear") and layer.weight.numel():
                layer.quant_method.process_weights_after_loading(layer)
        self._forget_old_weights()

    def _forget_old_weights(self) -> None:
        if not self.llm.reset_prefix_cache():
            raise SamplerError(
                "vLLM has requests under way, and keeps its cache of old weights. This is a bug in mcp_grpo: please report it."
            )
        if self._policy.config.get_text_config() is not self._policy.config:
            self.llm.llm_engine.reset_encoder_cache()  # what the old weights made of pictures

    def _send_adapter(self) -> None:
        from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]

        if self.is_asleep:
            self._wake("weights")
            self._llm_weights_sleeping = False
        engine, old = self.llm.llm_engine, self._adapter
        folder = self._written_adapter()
        new = LoRARequest(f"version-{self._version}", self._version, str(folder))
        # Loaded now: otherwise a failure would show only while sampling, and stall the engine.
        if not engine.add_lora(new):
            raise SamplerError(
                f'vLLM does not load the policy\'s adapter. Set `weight_sync="merge"`. It is in {folder}.'
            )
        self._adapter = new
        if old is not None:
            engine.remove_lora(old.lora_int_id)
            shutil.rmtree(old.lora_path, ignore_errors=True)

    def _written_adapter(self, is_writer: bool = True) -> Path:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=f"mcp-grpo-{os.getpid()}-", dir=_fast_folder()))
            weakref.finalize(self, shutil.rmtree, self._folder, True)
        folder = self._folder / f"version-{self._version}"
        self.bytes_sent = save_adapter(self._policy, folder, self._dist.gather_params, is_writer=is_writer)
        return folder


def graph_sizes(max_num_seqs: int) -> list[int]:
    """
    Return numbers of tokens that vLLM captures CUDA graphs for; a step of fewer is filled up to the next.

    Args:
        max_num_seqs (`int`):
            Requests that are sampled at a time. As many tokens make a step without new prompts.
    """
    fine = min(max_num_seqs, MAX_FINE_SIZE)
    sizes = {1, 2, 4, *range(8, min(fine, 256) + 1, 8), *range(256, fine + 1, 16), fine}
    sizes |= {96, 128, *range(192, 512, 64), *range(512, 1024, 128), *range(1024, 2049, 256)}
    return sorted(sizes)  # vLLM leaves out those of more tokens than its steps may have


def chosen_weight_sync(weight_sync: WeightSync, policy: Any, mode: str) -> str:
    """Choose `"merge"` or `"adapter"` for a policy and a `vllm_mode`; raises [`SettingsError`] if that is not possible."""
    problem = adapter_problem(policy)
    is_quantized = getattr(policy.config, "quantization_config", None) is not None
    if is_quantized and (weight_sync == "merge" or problem is not None):
        raise SettingsError(
            "The base model is quantised, so that only the adapter can be sent to vLLM"
            + (f", but {problem}." if problem else '. Set `weight_sync` to "adapter" or "auto".')
        )
    if mode == "colocate" and (other := _other_quantization(policy)):
        raise SettingsError(
            f"vLLM quantises the base model by itself, to nf4 with double quantisation, but the policy has {other}: the two "
            'would not be the same model. Load it with `bnb_4bit_quant_type="nf4"` and `bnb_4bit_use_double_quant=True`, or '
            "from a checkpoint that is quantised already."
        )
    if mode == "colocate" and (rounded := _rounded_before_quantization(policy)):
        stored, loaded = rounded
        raise SettingsError(
            f"vLLM quantises the base model from its checkpoint, which is in {stored}, but the policy was rounded to {loaded} "
            "before it was quantised: the two would not be the same model. Load it with "
            f'`dtype="{stored}"`, or save the base model in {loaded} first and train on that.'
        )
    if weight_sync == "adapter" and problem is not None:
        raise SettingsError(f'`weight_sync="adapter"` is not possible: {problem}. Set `weight_sync="merge"`.')
    if weight_sync != "auto":
        return weight_sync
    # Weights of 16 bits do not hold small changes, so that what is sampled from would hardly be the policy at first.
    is_exact = policy.dtype in (torch.float32, torch.float64)
    return "adapter" if is_quantized or (problem is None and (mode == "server" or not is_exact)) else "merge"


def _is_quantized_by_vllm(policy: Any) -> bool:
    """Return whether the policy is in 4 bits and its checkpoint is not."""
    config: Any = getattr(policy.config, "quantization_config", None)
    is_stored = getattr(getattr(policy, "hf_quantizer", None), "pre_quantized", False)
    return bool(getattr(config, "load_in_4bit", False)) and not is_stored


def _other_quantization(policy: Any) -> str | None:
    """Return how the policy's 4-bit weights differ from those that vLLM makes of the same checkpoint."""
    if not _is_quantized_by_vllm(policy):
        return None
    config = policy.config.quantization_config
    kind, is_double = config.bnb_4bit_quant_type, config.bnb_4bit_use_double_quant
    return None if kind == "nf4" and is_double else f"{kind} {'with' if is_double else 'without'} it"


def _rounded_before_quantization(policy: Any) -> tuple[str, str] | None:
    """Return the precisions of the checkpoint and of the weights before quantisation, if the latter is lower."""
    if not _is_quantized_by_vllm(policy):
        return None
    try:
        stored: Any = AutoConfig.from_pretrained(policy.config._name_or_path).dtype
    except (OSError, ValueError):  # unknown: the weight probe will tell
        return None
    loaded = policy.config.dtype
    if stored is None or loaded is None or torch.promote_types(stored, loaded) == loaded:  # nothing was lost
        return None
    return str(stored).removeprefix("torch."), str(loaded).removeprefix("torch.")


def memory_problem(error: Exception, share: float, length: int | None) -> str | None:
    """Return what to do where vLLM finds too little memory to start, or `None` if that is not what is wrong."""
    advice = next((each for part, each in TOO_LITTLE_MEMORY.items() if part in str(error)), None)
    if advice is None:
        return None
    advice = advice.format(share=share, length=length or "the model's own length")
    return f"vLLM has too little memory to start. {advice} It says: {error}"


@contextmanager
def _group_of_one() -> Generator[None]:
    """
    Give vLLM a port of its own: TRL would give the same one to runs that start together. Restore the environment that TRL
    sets for vLLM, or a later run in this process would take itself for one of several.
    """
    before = {
        name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    if before["MASTER_PORT"] in (None, "", "0", "auto"):
        with socket.socket() as any_port:
            any_port.bind(("127.0.0.1", 0))
            os.environ["MASTER_PORT"] = str(any_port.getsockname()[1])
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


@contextmanager
def _program_hidden() -> Generator[None]:
    """Keep a new process from running the program of this one again, as Python would to give it what the program defines."""
    program: Any = sys.modules["__main__"]
    hidden = {name: program.__dict__.pop(name) for name in ("__file__", "__spec__") if name in program.__dict__}
    program.__spec__ = None
    try:
        yield
    finally:
        program.__dict__.update(hidden)


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


@contextmanager
def _random_state_kept() -> Generator[None]:
    """Restore the random state of the process, which vLLM seeds."""
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
