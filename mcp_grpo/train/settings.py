"""Settings for a machine and a model, with the reasons: those of the recipes, in code, as a wheel has no YAML files."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mcp_grpo.config import MIN_RESULT_TOKENS
from mcp_grpo.doctor.machine import Machine
from mcp_grpo.doctor.stand_in import config_of
from mcp_grpo.errors import SettingsError
from mcp_grpo.train.arguments import MODEL


LARGE_GPU = 20.0  # GiB: what a GPU of 24 GB has, with some room
MEDIUM_GPU = 10.0
LONG_CONTEXT = 16_384  # tokens that vLLM is to hold for one trajectory: many tools take thousands
SHORT_RESULTS = 1024  # tokens: a trajectory has room for several, of tools that nobody has looked at
RESULTS = 2.5  # of the longest kind that a trajectory is to have room for
MOST_OF_A_WIDE_MODEL = 8  # trajectories in a pass
CACHE_OF_A_TRAJECTORY = 0.7  # GiB of keys and values: 6,200 tokens of Qwen3-0.6B in bf16

_ADAPTER = {"use_peft": True, "lora_r": 32, "lora_alpha": 64, "lora_dropout": 0.0, "lora_target_modules": "all-linear"}
_LEARNING = {
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant_with_warmup",
    "warmup_steps": 5,
    "max_steps": 100,
    "num_generations": 8,
    "per_device_train_batch_size": 16,  # two groups: fewer passes, and the tools once for both tasks
    "gradient_accumulation_steps": 4,
    "scale_rewards": "none",
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "beta": 0.0,
}
_TRAJECTORIES = {
    "max_turns": 10,
    "max_turn_tokens": 1024,
    "max_completion_length": 4096,
    "max_result_tokens": 3072,
    "chat_template_kwargs": {"enable_thinking": False},
}
_VLLM = {
    "use_vllm": True,
    "vllm_mode": "colocate",
    "vllm_enable_sleep_mode": True,
    "vllm_gpu_memory_utilization": 0.5,
    "vllm_max_model_length": 8192,
}
_KEPT = {
    "logging_steps": 1,
    "save_steps": 25,
    "save_total_limit": 3,
    "eval_strategy": "steps",
    "eval_on_start": True,
    "eval_steps": 25,
    "num_eval_tasks": 64,
    "num_generations_eval": 2,
    "per_device_eval_batch_size": 16,
}
WHOLE: dict[str, Any] = {
    "model_name_or_path": MODEL,
    "dtype": "bfloat16",
    "gradient_checkpointing": True,
    **_ADAPTER,
    **_LEARNING,
    **_TRAJECTORIES,
    **_VLLM,
    **_KEPT,
}
"""For a GPU of 24 GB or more: what `recipes/configs/qwen3_0.6b_lora_vllm.yaml` says."""
IN_4_BITS: dict[str, Any] = {
    **WHOLE,
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "use_bnb_nested_quant": True,  # vLLM quantises like that, and the two must have the same weights
    "optim": "paged_adamw_8bit",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 8,
    "vllm_max_model_length": 6656,
    "per_device_eval_batch_size": 8,
}
"""For a smaller one: what `recipes/configs/qwen3_0.6b_qlora.yaml` says."""
CONFIGS = {"qwen3_0.6b_lora_vllm": WHOLE, "qwen3_0.6b_qlora": IN_4_BITS}


@dataclass(kw_only=True)
class Choice:
    """
    Settings that were chosen for a machine.

    Args:
        config (`str`):
            The configuration that they are from.
        settings (`dict[str, Any]`):
            The settings.
        reasons (`list[str]`, *optional*):
            What was chosen, and why.
    """

    config: str
    settings: dict[str, Any]
    reasons: list[str] = field(default_factory=list[str])

    def change(self, reason: str, **settings: Any) -> None:
        """Change settings, for a reason."""
        self.settings |= settings
        self.reasons.append(reason)


def choose(machine: Machine, given: Mapping[str, Any], *, is_wide: bool = False) -> Choice:
    """Choose settings for a machine that go with those that are given, which come first; a model `is_wide` above a billion weights."""
    has_gpu = machine.gpu is not None and not given.get("use_cpu", False)
    uses_vllm = given.get("use_vllm", has_gpu and machine.has_bf16 and "vllm" in machine.packages)
    is_small = has_gpu and machine.memory < LARGE_GPU
    in_4_bits = is_small and uses_vllm and "bitsandbytes" in machine.packages
    config = "qwen3_0.6b_qlora" if in_4_bits else "qwen3_0.6b_lora_vllm"
    choice = Choice(config=config, settings=dict(CONFIGS[config]))
    if has_gpu:
        _fit_to_gpu(choice, machine, in_4_bits, MOST_OF_A_WIDE_MODEL if is_wide else math.inf)
    else:
        _fit_to_cpu(choice, "`use_cpu` is set" if machine.gpu else "there is no GPU")
    if uses_vllm:
        choice.reasons.append(
            "sample    by vLLM, on the GPU that trains" if has_gpu else "sample    by vLLM, as you ask"
        )
    else:
        _without_vllm(choice, machine, has_gpu, given)
    return choice


def fit_to_tasks(choice: Choice, num_tasks: int, num_processes: int, given: Mapping[str, Any]) -> None:
    """Lower the passes per step, and their size, so that it is no larger than there are tasks, unless they were given."""
    settings = {**choice.settings, **given}
    passes, group, rows = (
        settings[name] for name in ("gradient_accumulation_steps", "num_generations", "per_device_train_batch_size")
    )
    available, whole = num_tasks * group, passes * rows * num_processes
    if whole <= available or "gradient_accumulation_steps" in given:
        return
    if available % (rows * num_processes) and "per_device_train_batch_size" not in given:
        rows = min(rows, group)
    per_pass = rows * num_processes
    most = max(available // per_pass, 1)
    choice.change(
        f"step      {most * per_pass} trajectories instead of {whole}: there are only {num_tasks} tasks",
        gradient_accumulation_steps=most,
        per_device_train_batch_size=rows,
    )


def _fit_to_gpu(choice: Choice, machine: Machine, in_4_bits: bool, most: float) -> None:
    where = f"on {machine.gpu} with {machine.memory:.0f} GiB"
    settings = choice.settings
    per_pass = settings["per_device_train_batch_size"]
    if machine.memory < LARGE_GPU:
        per_pass = 4 if machine.memory >= MEDIUM_GPU else 2
        settings["per_device_eval_batch_size"] = 2 * per_pass
    per_pass = int(min(per_pass, most))
    whole = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    choice.change(
        f"compute   {where}{', weights in 4 bits' if in_4_bits else ''}, {per_pass} trajectories in a pass",
        per_device_train_batch_size=per_pass,
        gradient_accumulation_steps=whole // per_pass,
    )
    if not machine.has_bf16:
        choice.change("precision float32: this GPU does not compute in bf16", dtype="float32", bf16=False)


def _fit_to_cpu(choice: Choice, why: str) -> None:
    choice.change(
        f"compute   on the CPU, in float32, 8 trajectories a step: {why}",
        use_cpu=True,
        dtype="float32",
        bf16=False,
        gradient_checkpointing=False,
        num_generations=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_turn_tokens=512,
        max_completion_length=2048,
        max_result_tokens=1024,
        num_eval_tasks=8,
        per_device_eval_batch_size=2,
    )


def _without_vllm(choice: Choice, machine: Machine, has_gpu: bool, given: Mapping[str, Any]) -> None:
    if "use_vllm" in given:
        why = "as you ask"
    elif not has_gpu:
        why = "vLLM needs a GPU"
    elif "vllm" not in machine.packages:
        why = "vLLM, which is faster, is not installed (`pip install 'mcp-grpo[vllm]'`)"
    else:
        why = "vLLM is only chosen for GPUs with bf16 (`--use_vllm true --dtype float16 --fp16 true` tries it)"
    vllm = [name for name in choice.settings if name.startswith("vllm_")]
    for name in vllm:  # of no use without it
        del choice.settings[name]
    choice.change(f"sample    by Transformers: {why}", use_vllm=False)
    if has_gpu:  # which has room for the keys and values of so many
        choice.settings["max_concurrent_trajectories"] = max(2, int(machine.memory / 3 / CACHE_OF_A_TRAJECTORY))


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """
    How large a model is.

    Args:
        parameters (`int`, *optional*):
            Its weights; `None` where that is not known here.
        context (`int`, *optional*):
            Tokens that it can read.
    """

    parameters: int | None = None
    context: int | None = None

    @classmethod
    def of(cls, name: str) -> "ModelSize":
        """Look at the configuration of a model, in a folder, in the cache, or on the Hub."""
        if Path(name, "adapter_config.json").is_file():
            raise SettingsError(
                f"{name!r} is an adapter. Name a whole model: `mcp_grpo.export_for_serving({name!r}, 'whole-model')` makes one "
                "of it."
            )
        try:
            config = config_of(name) or AutoConfig.from_pretrained(name)
            with torch.device("meta"):
                parameters = AutoModelForCausalLM.from_config(config).num_parameters()
        except (OSError, ValueError):  # the doctor says what is wrong
            return cls()
        return cls(parameters=parameters, context=getattr(config.get_text_config(), "max_position_embeddings", None))

    @property
    def is_tiny(self) -> bool:
        """Tell whether a CPU trains it within minutes."""
        return self.parameters is not None and self.parameters <= TINY

    @property
    def is_wide(self) -> bool:
        """Tell whether it may have more than a billion weights."""
        return self.parameters is None or self.parameters > MEDIUM

    def __str__(self) -> str:
        if self.parameters is None:
            return "of unknown size"
        if self.parameters >= 1e9:
            return f"of {self.parameters / 1e9:.1f} billion weights"
        return f"of {self.parameters / 1e6:.{0 if self.parameters >= 1e7 else 1}f} million weights"


TINY, SMALL, MEDIUM, LARGE = 20_000_000, 300_000_000, 1_000_000_000, 2_000_000_000
_CAREFUL = {
    "learning_rate": 2e-5,
    "warmup_steps": 10,
    "max_steps": 200,
    "lora_r": 16,
    "lora_alpha": 32,
    "beta": 0.05,
    "use_bias_correction_kl": True,
    "ref_sync": "ema",
    "ref_sync_steps": 10,
    "ref_ema_decay": 0.99,
}
BY_SIZE: tuple[tuple[float, dict[str, Any]], ...] = (
    # `make quickstart`
    (
        TINY,
        {
            "learning_rate": 2e-3,
            "lr_scheduler_type": "linear",
            "warmup_steps": 2,
            "max_steps": 30,
            "lora_r": 16,
            "lora_alpha": 32,
        },
    ),
    # recipes/configs/smollm2_135m.yaml
    (SMALL, {"learning_rate": 5e-4, "warmup_steps": 3, "max_steps": 70}),
    # recipes/configs/qwen2.5_coder_0.5b.yaml
    (MEDIUM, {}),
    # recipes/configs/qwen2.5_coder_1.5b.yaml
    (LARGE, {"max_steps": 60}),
    # recipes/configs/qwen3_4b_lora_server.yaml
    (math.inf, _CAREFUL),
)
"""What is learnt with, by the most weights of a model: as in the recipes that were seen to learn, up to two billion."""
CPU_STEPS = 20  # of a model that is not tiny, which take long
NUM_EVALUATIONS = 4  # during training, for the best policy
NUM_CHECKPOINTS = 10
WARM_UP_BATCH, WARM_UP_LENGTH = 8, 8192
MIN_WARM_UP_STEPS, MAX_WARM_UP_STEPS = 24, 200


def learning_for(size: ModelSize) -> dict[str, Any]:
    """Return what a model is taught with by an adapter, where that differs from [`WHOLE`]; carefully, if its size is not known."""
    parameters = math.inf if size.parameters is None else size.parameters
    return next(found for most, found in BY_SIZE if parameters <= most)


def settings_for(
    machine: Machine,
    size: ModelSize,
    *,
    use_cpu: bool = False,
    steps: int | None = None,
    learning_rate: float | None = None,
) -> Choice:
    """
    Choose the settings of `mcp-grpo train`: by what the machine has, by the size of the model, and what was given.

    Args:
        machine ([`Machine`]):
            The machine.
        size ([`ModelSize`]):
            The model.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Whether to leave the GPU alone.
        steps (`int`, *optional*):
            Steps of training.
        learning_rate (`float`, *optional*):
            Learning rate.

    Returns:
        [`Choice`]: The settings, with reasons.
    """
    choice = choose(machine, {"use_cpu": True} if use_cpu else {}, is_wide=size.is_wide)
    settings, is_cpu = choice.settings, use_cpu or machine.gpu is None
    settings |= learning_for(size) | {"max_result_tokens": SHORT_RESULTS}
    if size.is_tiny:
        settings |= {"num_generations": 8, "per_device_train_batch_size": 64, "gradient_accumulation_steps": 1}
        settings |= {
            "per_device_eval_batch_size": 64,
            "gradient_checkpointing": False,
            "dtype": "float32",
            "bf16": False,
        }
        choice.reasons = [
            reason.replace("8 trajectories a step", "64 trajectories a step") for reason in choice.reasons
        ]
    elif is_cpu:
        settings["max_steps"] = CPU_STEPS
    if machine.memory >= LARGE_GPU and "vllm_max_model_length" in settings:
        settings["vllm_max_model_length"] = LONG_CONTEXT
    if size.context is not None:
        _fit_to_context(settings, size.context)
    settings |= {"learning_rate": learning_rate} if learning_rate is not None else {}
    settings |= {"max_steps": steps} if steps is not None else {}
    settings |= {
        "save_steps": max(1, settings["max_steps"] // NUM_CHECKPOINTS),
        "save_total_limit": 2,
        "eval_steps": max(1, settings["max_steps"] // NUM_EVALUATIONS),
    }
    choice.reasons.append(
        f"learn     for {settings['max_steps']} steps at a learning rate of {settings['learning_rate']:g}, "
        + ("as given" if steps is not None and learning_rate is not None else f"for a model {size}")
    )
    return choice


def show_results(settings: dict[str, Any], max_tokens: int, context: int | None) -> None:
    """Show tool results of so many tokens, and make room for several, as far as the context has it."""
    length = max(settings["max_completion_length"], int(RESULTS * max_tokens))
    settings |= {"max_result_tokens": max_tokens, "max_completion_length": length}
    if context is not None:
        _fit_to_context(settings, context)


def fit_step(settings: dict[str, Any], num_tasks: int) -> None:
    """Make a step no larger than there are tasks, in whole groups."""
    group = settings["num_generations"]
    per_pass = settings["per_device_train_batch_size"]
    whole = min(per_pass * settings["gradient_accumulation_steps"], num_tasks * group)
    per_pass = min(per_pass, whole)
    settings["per_device_train_batch_size"] = per_pass
    settings["gradient_accumulation_steps"] = max(1, whole // per_pass)
    if per_pass * settings["gradient_accumulation_steps"] % group:  # groups are made whole over the passes of a step
        settings["gradient_accumulation_steps"] = math.lcm(per_pass, group) // per_pass


def _fit_to_context(settings: dict[str, Any], context: int) -> None:
    """Leave half of the context to the prompt and its tools."""
    length = min(settings["max_completion_length"], context // 2)
    settings["max_completion_length"] = length
    settings["max_turn_tokens"] = min(settings["max_turn_tokens"], length)
    settings["max_result_tokens"] = max(MIN_RESULT_TOKENS, min(settings["max_result_tokens"], length // 2))
    if "vllm_max_model_length" in settings:
        settings["vllm_max_model_length"] = min(settings["vllm_max_model_length"], context)


def warm_up_steps(size: ModelSize, num_solutions: int) -> int:
    """
    Return the steps of a warm start: three passes over the solutions, or one for models of more than 300 million weights.

    Those learn the form of calls within one, and what they go on imitating takes from them what reinforcement learning compares: with 24 steps
    a model of half a billion weights went from 12 to 44 % and from 17 to 49 %, with 50 it stayed at what it had.
    """
    passes = 1 if (size.parameters or MEDIUM) > SMALL else 3
    return min(max(passes * num_solutions // WARM_UP_BATCH, MIN_WARM_UP_STEPS), MAX_WARM_UP_STEPS)


def warm_up_settings(size: ModelSize, num_solutions: int, *, is_cpu: bool) -> dict[str, Any]:
    """
    Choose the settings of a warm start: as in the recipes, all weights of a small model, an adapter on a larger one.

    Args:
        size ([`ModelSize`]):
            The model.
        num_solutions (`int`):
            Solutions to imitate.
        is_cpu (`bool`):
            Whether it is on a CPU.

    Returns:
        `dict[str, Any]`: Settings of [`~mcp_grpo.train.imitation.WarmupConfig`], and `use_peft` and `dtype`.
    """
    parameters = size.parameters or MEDIUM
    per_pass = 4 if is_cpu else 2
    return {
        "use_peft": parameters > MEDIUM,
        "dtype": "float32" if is_cpu or parameters <= SMALL else "bfloat16",
        "learning_rate": 2e-3
        if size.is_tiny
        else 5e-4
        if parameters <= SMALL
        else 5e-5
        if parameters <= MEDIUM
        else 1e-4,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 2,
        "max_steps": warm_up_steps(size, num_solutions),
        "per_device_train_batch_size": per_pass,
        "gradient_accumulation_steps": WARM_UP_BATCH // per_pass,
        "max_length": min(size.context or WARM_UP_LENGTH, WARM_UP_LENGTH),
    }
