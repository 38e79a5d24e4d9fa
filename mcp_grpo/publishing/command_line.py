"""The command that started a run, fit to be published."""

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from mcp_grpo.tools.secrets import without_secrets


# How `accelerate launch` tells a process that weights are shared, and by which flag it was told so itself.
_SHARDING: dict[str, dict[str, str]] = {
    "fsdp": {
        "FSDP_VERSION": "fsdp_version",
        "FSDP_SHARDING_STRATEGY": "fsdp_sharding_strategy",
        "FSDP_RESHARD_AFTER_FORWARD": "fsdp_reshard_after_forward",
        "FSDP_OFFLOAD_PARAMS": "fsdp_offload_params",
        "FSDP_MIN_NUM_PARAMS": "fsdp_min_num_params",
        "FSDP_AUTO_WRAP_POLICY": "fsdp_auto_wrap_policy",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_transformer_layer_cls_to_wrap",
        "FSDP_STATE_DICT_TYPE": "fsdp_state_dict_type",
        "FSDP_CPU_RAM_EFFICIENT_LOADING": "fsdp_cpu_ram_efficient_loading",
        "FSDP_ACTIVATION_CHECKPOINTING": "fsdp_activation_checkpointing",
    },
    "deepspeed": {
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config_file",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "zero_stage",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "offload_optimizer_device",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "offload_param_device",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "zero3_init_flag",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "zero3_save_16bit_model",
    },
}


def run_command(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> str | None:
    """Return the command that started this process."""
    argv = sys.argv if argv is None else argv
    environ = os.environ if environ is None else environ
    script = argv[0] if argv else ""
    if script in ("", "-c", "-m") or "ipykernel" in script or PurePath(script).name == "ipython":
        return None
    words = [_without_folder(word) for word in without_secrets(argv)]
    if not script.endswith(".py"):
        return shlex.join(words)
    # Set by every launch, and by nothing else.
    is_launched = "WORLD_SIZE" in environ or "ACCELERATE_MIXED_PRECISION" in environ
    return shlex.join([*(_launch(environ) if is_launched else ["python"]), *words])


def _launch(environ: Mapping[str, str]) -> list[str]:
    """Return `accelerate launch`, with the flags that left traces in this process."""
    words = ["accelerate", "launch"]
    num_processes = int(environ.get("WORLD_SIZE", "1"))
    num_machines = num_processes // int(environ.get("LOCAL_WORLD_SIZE", str(num_processes)))
    if num_machines > 1:
        words += ["--num_machines", str(num_machines)]
    if num_processes > 1:
        words += ["--num_processes", str(num_processes)]
    precision = environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision != "no":
        words += ["--mixed_precision", precision]
    for name, flags in _SHARDING.items():
        if environ.get(f"ACCELERATE_USE_{name.upper()}", "false").lower() == "true":
            words.append(f"--use_{name}")
            for variable, flag in flags.items():
                if variable in environ:
                    words += [f"--{flag}", _without_folder(environ[variable])]
    return words


def _without_folder(word: str) -> str:
    flag, is_assigned, value = word.partition("=")
    if is_assigned and flag.startswith("-"):
        return f"{flag}={_without_folder(value)}"
    is_elsewhere = word.startswith(("/", "~", "..")) or os.path.isabs(word)
    return (PurePath(word).name or word) if is_elsewhere else word
