"""Optional packages: which settings need one, and what to install or change if it is missing."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

from transformers.training_args import OptimizerNames

from mcp_grpo.errors import SettingsError


# Packages, and the extra of this library that installs each.
EXTRAS = {"vllm": "vllm", "deepspeed": "deepspeed", "bitsandbytes": "quantization", "llguidance": "grammar"}

_BITSANDBYTES_OPTIMIZERS = {
    optimizer.value
    for optimizer in OptimizerNames
    if optimizer.value.startswith(("paged_", "ademamix", "rmsprop_bnb", "galore_adamw_8bit"))
    or optimizer.value in ("adamw_8bit", "adamw_bnb_8bit", "lion_8bit", "lion_32bit")
}


def missing_packages(args: Any, model: Any = None) -> list[str]:
    """Return a sentence for each setting that needs a missing package: what to install, or what to set instead."""
    return [
        f"{setting} needs `{package}`, which is not installed: `pip install 'mcp-grpo[{EXTRAS[package]}]'`, or {otherwise}."
        for package, setting, otherwise in _needed(args, model)
        if find_spec(package) is None
    ]


def check_packages(args: Any, model: Any = None) -> None:
    """Raise [`SettingsError`] if settings of the run, or of how its model is loaded, need missing packages."""
    if missing := missing_packages(args, model):
        raise SettingsError(" ".join(missing))


def _needed(args: Any, model: Any) -> Iterator[tuple[str, str, str]]:
    """Yield each package that is needed, the setting that needs it, and how to do without it."""
    if getattr(args, "use_vllm", False) and args.vllm_mode == "colocate":  # a server is installed elsewhere
        yield "vllm", "`use_vllm: true`", "set `--use_vllm false`"
    if getattr(args, "deepspeed", None):
        yield "deepspeed", "`deepspeed`", "leave it out"
    elif os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        yield "deepspeed", "`accelerate launch` with DeepSpeed", "launch by `recipes/accelerate/fsdp2.yaml`"
    optimizer = getattr(args.optim, "value", args.optim)
    if optimizer in _BITSANDBYTES_OPTIMIZERS:
        yield "bitsandbytes", f"`optim: {optimizer}`", "set `--optim adamw_torch`"
    for setting in ("load_in_4bit", "load_in_8bit"):
        if getattr(model, setting, False):
            yield "bitsandbytes", f"`{setting}: true`", f"set `--{setting} false`"
    if getattr(args, "schema_mask", "off") == "grammar":
        yield "llguidance", "`schema_mask: grammar`", "set `--schema_mask syntax`"
    if getattr(args, "constrained_decoding", False):
        yield "llguidance", "`constrained_decoding: true`", "set `--constrained_decoding false`"
