"""The trainer of a run, built on a tiny random model in place of the weights, on a machine without a GPU."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch

from mcp_grpo.config import MCPGRPOConfig, own_settings
from mcp_grpo.config_checks import check_arguments
from mcp_grpo.doctor.findings import Findings
from mcp_grpo.doctor.model import CHARACTERS_PER_TOKEN, ModelParts
from mcp_grpo.doctor.stand_in import QWEN3_CONTEXT, save_stand_in
from mcp_grpo.errors import SettingsError
from mcp_grpo.rewards.checks import is_computed_early, reward_name
from mcp_grpo.sampling.vllm_backend import chosen_weight_sync
from mcp_grpo.tasks import tasks_from_rows
from mcp_grpo.trainer import MCPGRPOTrainer
from mcp_grpo.trl_compat import get_peft_config


# What a machine without a GPU cannot do, and what takes its place.
GPU_SETTINGS: dict[str, Any] = {
    "use_vllm": False,
    "vllm_enable_sleep_mode": False,
    **{one.name: one.default for one in own_settings() if "vllm" in one.metadata.get("needs", ())},
    "bf16": False,
    "fp16": False,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "fsdp_config": None,
    "optim": "adamw_torch",
    "cast_lm_head_to_fp32": False,
}


def check_settings(config: MCPGRPOConfig, model: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Refuse settings that do not go together, or with the tasks: groups that do not form, weights that cannot be trained."""
    check_arguments(config, train_dataset, {"eval_dataset": eval_dataset})
    if model is not None and (model.load_in_4bit or model.load_in_8bit) and not model.use_peft:
        raise SettingsError(
            f"`load_in_{4 if model.load_in_4bit else 8}bit` makes weights that cannot be trained, and there is no adapter on "
            "them. Set `use_peft: true`, or leave it out."
        )


def build_trainer(
    findings: Findings,
    config: MCPGRPOConfig,
    model: Any,
    settings: Mapping[str, Any],
    parts: ModelParts,
    train_dataset: Any,
    eval_dataset: Any,
    servers: Any,
    rewards: list[Callable[..., Any]],
) -> int:
    """Build the trainer on a tiny random model, and return the length of the longest prompt."""
    own = {field.name for field in fields(MCPGRPOConfig)}
    given = {name: value for name, value in settings.items() if name in own}
    with tempfile.TemporaryDirectory() as folder:
        stand_in = str(Path(folder, "model"))
        real = parts.config
        context = getattr(real.get_text_config(), "max_position_embeddings", None) if real else None
        save_stand_in(stand_in, parts.tokenizer, context)
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
            tasks = tasks_from_rows(train_dataset)
            judged = len(eval_dataset) if eval_dataset else 0
            findings.ok(
                "trainer",
                f"can be built, with {len(tasks)} tasks to train on and {judged} to judge by; not a step was made",
            )
            findings.run(
                "adapter",
                lambda: _check_adapter(
                    findings, config, model, trainer.model, getattr(real, "quantization_config", None)
                ),
                remedy="Change the setting that it names.",
            )
            engine, collector = trainer._engine, trainer._collector
            assert engine is not None
            assert collector is not None
            return max(len(ids) for ids in engine.prompt_ids(tasks[:64], collector.renderer))


def check_room(findings: Findings, config: MCPGRPOConfig, length: int, is_real: bool) -> None:
    """Refuse a context without room for a completion after the longest prompt."""
    limit = config.vllm_max_model_length if config.use_vllm else None
    length = length if is_real else int(length / CHARACTERS_PER_TOKEN)
    about = "" if is_real else f"about (at {CHARACTERS_PER_TOKEN} characters per token) "
    room = (limit or QWEN3_CONTEXT) - length
    if room < (config.max_completion_length or 0):
        raise SettingsError(
            f"A prompt has {about}{length} tokens, and `vllm_max_model_length` is {limit}, which leaves {room} for the "
            f"completion, less than its `max_completion_length` of {config.max_completion_length}. Raise the former, or lower "
            "the latter."
        )
    findings.ok(
        "room for prompts",
        f"{about}{length} tokens with their tools, and up to {config.max_completion_length} to follow",
    )


def leave_out(findings: Findings, config: MCPGRPOConfig, model: Any, rewards: list[Callable[..., Any]]) -> None:
    """Note what only the machine of the run can tell."""
    if config.use_vllm:
        findings.leave(f"vLLM {'in process' if config.vllm_mode == 'colocate' else 'as a server'}", "needs a GPU")
    if model is not None and (model.load_in_4bit or model.load_in_8bit):
        findings.leave(f"{4 if model.load_in_4bit else 8}-bit weights by bitsandbytes", "need a GPU")
    if not torch.cuda.is_available() and not config.use_cpu:
        findings.leave("bf16", "needs a GPU, or `use_cpu: true`")
    if config.push_to_hub:
        findings.leave("the Hub", "nothing is uploaded")
    for reward in rewards:
        if not is_computed_early(reward):
            findings.leave(f"reward `{reward_name(reward)}`", "only called with what the policy really did")


def _check_adapter(
    findings: Findings, config: MCPGRPOConfig, model: Any, policy: Any, saved_quantization: Any
) -> None:
    """Check the adapter and the precision of the weights below it against how vLLM gets them."""
    if not config.use_vllm:
        return
    if model.load_in_4bit or model.load_in_8bit or saved_quantization is not None:
        policy.config.quantization_config = SimpleNamespace(
            # What is quantised already is read by vLLM as it is.
            load_in_4bit=model.load_in_4bit and saved_quantization is None,
            bnb_4bit_quant_type=model.bnb_4bit_quant_type,
            bnb_4bit_use_double_quant=model.use_bnb_nested_quant,
        )
    sync = chosen_weight_sync(cast(Any, config.weight_sync), policy, config.vllm_mode)
    findings.ok("adapter", f"vLLM gets {'the adapter' if sync == 'adapter' else 'whole weights'} after each update")
