"""Settings for a machine, where no configuration is named: those of `mcp_grpo.train.settings`, for this recipe."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mcp_grpo.doctor.machine import Machine
from mcp_grpo.train.arguments import MODEL
from mcp_grpo.train.settings import Choice, ModelSize, fit_to_tasks, learning_for
from mcp_grpo.train.settings import choose as choose_for_machine
from recipe_parts.command_line import CONFIGS


ALL_WEIGHTS = {"learning_rate": 1e-6, "beta": 0.0}  # as `qwen3_8b_zero3.yaml`
ROOMY_GPU = 75.0  # GiB: what a GPU of 80 GB has, with some room
AWAKE = 21.0  # GiB: Qwen3-0.6B, vLLM's graphs, and the keys and values of 64 trajectories

__all__ = ["Choice", "Machine", "choose", "describe", "fit_to_tasks"]


def choose(machine: Machine, given: Mapping[str, Any]) -> Choice:
    """Choose settings for a machine that go with those of the command line, which come first."""
    model = str(given.get("model_name_or_path", MODEL))
    size = None if model == MODEL else ModelSize.of(model)
    choice = choose_for_machine(machine, given, is_wide=size is not None and size.is_wide)
    settings = choice.settings
    if size is None and machine.memory >= ROOMY_GPU and settings["use_vllm"]:
        _stay_awake(choice, machine, given)
    if size is not None:
        settings |= learning_for(size)
    if given.get("use_peft") is False:
        settings |= ALL_WEIGHTS
    if settings["beta"] == 0 or given.get("beta") == 0:  # without a reference, none follows
        settings = choice.settings = {name: value for name, value in settings.items() if not name.startswith("ref_")}
    if "learning_rate" not in given and (size is not None or given.get("use_peft") is False):
        taught = "all weights" if given.get("use_peft") is False else f"a model {size}"
        choice.reasons.append(f"learn     at a rate of {settings['learning_rate']:g}, for {taught}")
    settings["output_dir"] = f"outputs/{Path(model).name}"
    adapter = "all weights" if given.get("use_peft") is False else "a LoRA adapter"
    place = (
        "servers of " + str(given["servers"]) if given.get("servers") else "the desk (finance, search, Python, Slack)"
    )
    choice.reasons.insert(0, f"train     {model} with {adapter}, on {place}")
    if settings.get("use_cpu"):
        choice.reasons.append(
            "time      a step takes long; `make quickstart` shows learning within minutes, without a GPU"
        )
    if given.get("servers") and not given.get("eval_tasks"):
        choice.change("evaluate  never: name tasks to judge by with --eval_tasks", eval_strategy="no")
    return choice


def _stay_awake(choice: Choice, machine: Machine, given: Mapping[str, Any]) -> None:
    """Give vLLM a share that it keeps: putting it to sleep and waking it takes longer than the memory is worth here."""
    share = {"vllm_enable_sleep_mode": False, "vllm_gpu_memory_utilization": round(AWAKE / machine.memory, 2)}
    is_elsewhere = choice.settings.get("use_cpu") or given.get("vllm_mode") == "server"
    if is_elsewhere or share.keys() & given.keys():
        return
    choice.change(
        f"keep      {AWAKE:.0f} GiB of the GPU for vLLM, which need not sleep while the policy trains", **share
    )


def describe(choice: Choice) -> str:
    """Say what was chosen, and how to choose otherwise."""
    names = ", ".join(path.stem for path in sorted(CONFIGS.glob("*.yaml")))
    lines = [f"No --config is given. Chosen for this machine, from recipes/configs/{choice.config}.yaml:"]
    lines += [f"  {reason}" for reason in choice.reasons]
    lines.append(f"Choose otherwise with flags (--help lists them) or --config recipes/configs/NAME.yaml: {names}.")
    return "\n".join(lines)
