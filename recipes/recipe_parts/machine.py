"""Settings for a machine, where no configuration is named: one of the recipes' own, and what is changed in it, with reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mcp_grpo.doctor.machine import Machine
from recipe_parts.command_line import CONFIGS


WHOLE = "qwen3_0.6b_lora_vllm"  # for a GPU of 24 GB or more
IN_4_BITS = "qwen3_0.6b_qlora"
LARGE_GPU = 20.0  # GiB: what a GPU of 24 GB has, with some room
MEDIUM_GPU = 10.0
CACHE_OF_A_TRAJECTORY = 0.7  # GiB of keys and values: 6,200 tokens of Qwen3-0.6B in bf16


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
    reasons: list[str] = field(default_factory=list)

    def change(self, reason: str, **settings: Any) -> None:
        """Change settings, for a reason."""
        self.settings |= settings
        self.reasons.append(reason)

    def __str__(self) -> str:
        names = ", ".join(path.stem for path in sorted(CONFIGS.glob("*.yaml")))
        lines = [f"No --config is given. Chosen for this machine, from recipes/configs/{self.config}.yaml:"]
        lines += [f"  {reason}" for reason in self.reasons]
        lines.append(
            f"Choose otherwise with flags (--help lists them) or --config recipes/configs/NAME.yaml: {names}."
        )
        return "\n".join(lines)


def choose(machine: Machine, given: Mapping[str, Any]) -> Choice:
    """Choose settings for a machine that go with those of the command line, which come first."""
    has_gpu = machine.gpu is not None and not given.get("use_cpu", False)
    uses_vllm = given.get("use_vllm", has_gpu and machine.has_bf16 and "vllm" in machine.packages)
    is_small = has_gpu and machine.memory < LARGE_GPU
    in_4_bits = is_small and uses_vllm and "bitsandbytes" in machine.packages
    config = IN_4_BITS if in_4_bits else WHOLE
    settings = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    choice = Choice(config=config, settings=settings)
    model = given.get("model_name_or_path", settings["model_name_or_path"])
    settings["output_dir"] = f"outputs/{Path(model).name}"
    adapter = "all weights" if given.get("use_peft") is False else "a LoRA adapter"
    place = (
        "servers of " + str(given["servers"]) if given.get("servers") else "the desk (finance, search, Python, Slack)"
    )
    choice.reasons.append(f"train     {model} with {adapter}, on {place}")
    if has_gpu:
        _fit_to_gpu(choice, machine, in_4_bits)
    else:
        _fit_to_cpu(choice, "`use_cpu` is set" if machine.gpu else "there is no GPU")
    if uses_vllm:
        choice.reasons.append(
            "sample    by vLLM, on the GPU that trains" if has_gpu else "sample    by vLLM, as you ask"
        )
    else:
        _without_vllm(choice, machine, has_gpu, given)
    if given.get("servers") and not given.get("eval_tasks"):
        choice.change("evaluate  never: name tasks to judge by with --eval_tasks", eval_strategy="no")
    return choice


def fit_to_tasks(choice: Choice, num_tasks: int, num_processes: int, given: Mapping[str, Any]) -> None:
    """Lower the passes per step so that it is no larger than there are tasks, unless they were given."""
    settings = {**choice.settings, **given}
    passes = settings["gradient_accumulation_steps"]
    per_pass = settings["per_device_train_batch_size"] * num_processes
    most = max(num_tasks * settings["num_generations"] // per_pass, 1)
    if passes > most and "gradient_accumulation_steps" not in given:
        choice.change(
            f"step      {most * per_pass} trajectories instead of {passes * per_pass}: there are only {num_tasks} tasks",
            gradient_accumulation_steps=most,
        )


def _fit_to_gpu(choice: Choice, machine: Machine, in_4_bits: bool) -> None:
    where = f"on {machine.gpu} with {machine.memory:.0f} GiB"
    settings = choice.settings
    if machine.memory >= LARGE_GPU:
        choice.reasons.append(f"compute   {where}, {settings['per_device_train_batch_size']} trajectories in a pass")
    else:
        per_pass = 4 if machine.memory >= MEDIUM_GPU else 2
        whole = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
        choice.change(
            f"compute   {where}{', weights in 4 bits' if in_4_bits else ''}, {per_pass} trajectories in a pass",
            per_device_train_batch_size=per_pass,
            gradient_accumulation_steps=whole // per_pass,
            per_device_eval_batch_size=2 * per_pass,
        )
    if not machine.has_bf16:
        choice.change("precision float32: this GPU does not compute in bf16", dtype="float32", bf16=False)


def _fit_to_cpu(choice: Choice, why: str) -> None:
    choice.change(
        f"compute   on the CPU, in float32, 8 trajectories a step: {why}. A step takes long; `make quickstart` shows "
        "learning within minutes, without a GPU",
        use_cpu=True,
        dtype="float32",
        bf16=False,
        gradient_checkpointing=False,
        num_generations=4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        max_turn_tokens=512,
        max_completion_length=2048,
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
