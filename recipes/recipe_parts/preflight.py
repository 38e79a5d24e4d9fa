"""The pre-flight: everything that can be wrong before the first step, on a machine without a GPU and without weights."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from trl import get_peft_config

from mcp_grpo import MCPGRPOConfig, MCPGRPOTrainer
from mcp_grpo.config import check_arguments
from mcp_grpo.errors import SettingsError
from mcp_grpo.rollout.vllm_backend import chosen_weight_sync
from mcp_grpo.tasks import tasks_from_rows
from recipe_parts.stand_in import QWEN3_CONTEXT, config_of, save_stand_in, tokenizer_of


CHARACTERS_PER_TOKEN = 3.6  # of the desk's prompts with Qwen3's tokenizer, rounded down
# What a machine without a GPU cannot do, and what takes its place in the pre-flight.
GPU_SETTINGS: dict[str, Any] = {
    "use_vllm": False,
    "vllm_enable_sleep_mode": False,
    "vllm_server_urls": None,
    "vllm_engine_kwargs": None,
    "rollout_ahead": 0,
    "weight_sync": "auto",
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "optim": "adamw_torch",
    "cast_lm_head_to_fp32": False,
}


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """
    What a pre-flight has found to be right, and what it could not look at.

    Args:
        checked (`tuple[str, ...]`):
            What is right.
        left_out (`tuple[str, ...]`):
            What only the machine of the run can tell.
    """

    checked: tuple[str, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join(
            [*(f"  ok    {each}" for each in self.checked), *(f"  left  {each}" for each in self.left_out)]
        )


def run_preflight(
    config: MCPGRPOConfig,
    model: Any,
    *,
    settings: dict[str, Any],
    train_dataset: Any,
    eval_dataset: Any,
    servers: Any,
    rewards: list[Callable[..., Any]],
) -> Preflight:
    """
    Start the servers and build the trainer on a tiny random model in place of the weights; what a GPU is needed for is left
    out, and named.

    Args:
        config ([`MCPGRPOConfig`]):
            Settings of the run.
        model ([`~trl.ModelConfig`]):
            Model of the run.
        settings (`dict[str, Any]`):
            All settings as they were given, from [`StrictParser.parse`].
        train_dataset ([`~datasets.Dataset`]):
            Tasks to train on.
        eval_dataset ([`~datasets.Dataset`], *optional*):
            Tasks to judge by.
        servers (`Any`):
            The servers.
        rewards (`list[Callable[..., Any]]`):
            The reward functions.

    Returns:
        [`Preflight`]: What was checked. Anything that is wrong is raised, as the trainer would.
    """
    checked, left_out = [], []
    check_arguments(config, train_dataset, {"eval_dataset": eval_dataset})
    checked.append(
        f"settings: {config.per_device_train_batch_size} trajectories per device and pass, "
        f"{config.generation_batch_size} per batch in groups of {config.num_generations}"
    )
    tokenizer, is_real = tokenizer_of(model.model_name_or_path, model.model_revision)
    if not is_real:
        left_out.append(
            f"tokenizer of {model.model_name_or_path}: not on this machine; Qwen3's chat template on bytes instead"
        )
    limit = config.vllm_max_model_length if config.use_vllm else None
    left_out += _left_out(config, model)
    own = {field.name for field in fields(MCPGRPOConfig)}
    given = {name: value for name, value in settings.items() if name in own}
    with tempfile.TemporaryDirectory() as folder:
        stand_in = str(Path(folder, "model"))
        real = config_of(model.model_name_or_path, model.model_revision)
        context = getattr(real.get_text_config(), "max_position_embeddings", None) if real else None
        save_stand_in(stand_in, tokenizer, context)
        given |= {**GPU_SETTINGS, "use_cpu": True, "output_dir": str(Path(folder, "run")), "report_to": "none"}
        given |= {"push_to_hub": False, "model_init_kwargs": None}
        with MCPGRPOTrainer(
            stand_in,
            rewards,
            MCPGRPOConfig(**given),
            train_dataset,
            eval_dataset=eval_dataset,
            servers=servers,
            peft_config=get_peft_config(model),
        ) as trainer:
            catalog = trainer.catalog
            names = sorted({tool.server for tool in catalog.tools})
            checked.append(
                f"servers: {', '.join(names)}, with {len(catalog.tools)} tools (catalog {catalog.hash[:16]})"
            )
            checked.append("chat template: carries tool calls token by token")
            tasks = tasks_from_rows(train_dataset)
            checked.append(f"tasks: {len(tasks)} to train on, {len(eval_dataset) if eval_dataset else 0} to judge by")
            checked += _checked_adapter(config, model, trainer.model, getattr(real, "quantization_config", None))
            lengths = [len(ids) for ids in trainer._engine.prompt_ids(tasks[:64], trainer._renderer)]
    length = max(lengths) if is_real else int(max(lengths) / CHARACTERS_PER_TOKEN)
    about = "" if is_real else f"about (at {CHARACTERS_PER_TOKEN} characters per token) "
    checked.append(
        f"prompts: {about}{length} tokens with their tools, and up to {config.max_completion_length} to follow"
    )
    room = (limit or QWEN3_CONTEXT) - length
    if room < (config.max_completion_length or 0):
        raise SettingsError(
            f"A prompt has {about}{length} tokens, and `vllm_max_model_length` is {limit}, which leaves {room} for the "
            f"completion, less than its `max_completion_length` of {config.max_completion_length}. Raise the former, or lower "
            "the latter."
        )
    return Preflight(checked=tuple(checked), left_out=tuple(left_out))


def _checked_adapter(config: MCPGRPOConfig, model: Any, policy: Any, saved_quantization: Any) -> list[str]:
    """What is right about the adapter and the precision of the weights below it; raised if anything is wrong."""
    is_quantized = model.load_in_4bit or model.load_in_8bit
    if is_quantized and not model.use_peft:
        raise SettingsError(
            f"`load_in_{4 if model.load_in_4bit else 8}bit` makes weights that cannot be trained, and there is no adapter on "
            "them. Set `use_peft: true`, or leave it out."
        )
    if config.use_vllm:
        if is_quantized or saved_quantization is not None:
            policy.config.quantization_config = SimpleNamespace(
                # What is quantised already is read by vLLM as it is.
                load_in_4bit=model.load_in_4bit and saved_quantization is None,
                bnb_4bit_quant_type=model.bnb_4bit_quant_type,
                bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
            )
        sync = chosen_weight_sync(config.weight_sync, policy, config.vllm_mode)
        return [f"weights: vLLM gets {'the adapter' if sync == 'adapter' else 'whole weights'} after each update"]
    return []


def _left_out(config: MCPGRPOConfig, model: Any) -> list[str]:
    """What only the machine of the run can tell."""
    words = [f"weights of {model.model_name_or_path}: a tiny random Qwen3 stands in for them"]
    if config.use_vllm:
        place = "in process" if config.vllm_mode == "colocate" else "as a server"
        installed = "" if find_spec("vllm") else "; it is not installed here (`pip install mcp-grpo[vllm]`)"
        words.append(f"vLLM {place}: needs a GPU{installed}")
    if model.load_in_4bit or model.load_in_8bit:
        installed = (
            "" if find_spec("bitsandbytes") else "; it is not installed here (`pip install mcp-grpo[quantization]`)"
        )
        words.append(f"{4 if model.load_in_4bit else 8}-bit weights by bitsandbytes: need a GPU{installed}")
    if not torch.cuda.is_available() and not config.use_cpu:
        words.append("bf16: needs a GPU, or `use_cpu: true`")
    if config.push_to_hub:
        words.append("the Hub: nothing is uploaded")
    return words
