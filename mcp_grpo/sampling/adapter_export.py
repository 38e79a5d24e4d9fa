"""Write the policy's adapter as vLLM reads it."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor


_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM accepts as its maximum
_PLAIN_INITS = (True, False, "gaussian", "orthogonal")  # that leave the base model unchanged


def adapter_problem(policy: Any) -> str | None:
    """Return a clause that says why vLLM cannot apply the adapter of the unwrapped policy, or `None`."""
    if not isinstance(policy, PeftModel):
        return "the policy has no adapter"
    found = config_problem(policy.peft_config["default"])
    base: Any = policy.get_base_model()
    # On a GPU, vLLM ignores it in the log-probabilities of prompts, which the weight probe compares.
    if found is None and isinstance(base.get_output_embeddings(), LoraLayer):
        found = "its adapter reaches the output layer"
    if found is None and base.config.get_text_config() is not base.config:
        found = "the model reads more than text, and vLLM applies adapters to the layers for text only"
    return found


def config_problem(config: Any) -> str | None:
    """Return a clause that says why vLLM cannot apply an adapter of this configuration, or `None`."""
    if not isinstance(config, LoraConfig):
        return f"its adapter is {config.peft_type}, not LoRA"
    problems = {
        "`bias` is not 'none'": config.bias != "none" or config.lora_bias,
        "`use_dora` is on": config.use_dora,
        "`modules_to_save` are whole layers": config.modules_to_save,
        "`target_parameters` are no layers": config.target_parameters,
        "`trainable_token_indices` are rows of an embedding": config.trainable_token_indices,
        "`layer_replication` repeats layers": config.layer_replication,
        f"`init_lora_weights={config.init_lora_weights!r}` changes the base model": config.init_lora_weights
        not in _PLAIN_INITS,
        f"its rank of {_rank(config)} is above {_RANKS[-1]}": _rank(config) > _RANKS[-1],
    }
    return next((problem for problem, is_there in problems.items() if is_there), None)


def max_lora_rank(config: Any) -> int:
    """Return the smallest maximum rank of vLLM that fits the adapter."""
    return next(rank for rank in _RANKS if rank >= _rank(config))


def save_adapter(policy: PeftModel, folder: Path, whole: Any, *, is_writer: bool = True) -> int:
    """
    Write the adapter of the unwrapped policy to a new folder, and return its bytes. On several processes all must call it
    together: `whole` is a context that gathers parameters, and only the writer writes.

    The scale of each layer is multiplied into the adapter: vLLM has one factor for all layers, and would be silently wrong
    where `rank_pattern`, `alpha_pattern` or `use_rslora` give them different ones.
    """
    scales = {
        name: module.scaling["default"]
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.scaling
    }
    state = {name: value.contiguous() for name, value in _adapter_state(policy, scales, whole).items()}
    if is_writer:
        folder.mkdir(parents=True)
        config: Any = deepcopy(policy.peft_config["default"])
        config.r = config.lora_alpha = _rank(config)
        # For readers that support a rank per layer, as PEFT does: the factor of each is 1.
        config.rank_pattern = config.alpha_pattern = _smaller_ranks(policy)
        config.use_rslora = False
        config.inference_mode = True
        config.save_pretrained(str(folder))
        save_file(state, folder / "adapter_model.safetensors")
    return sum(value.numel() * value.element_size() for value in state.values())


@torch.no_grad()
def _adapter_state(policy: PeftModel, scales: dict[str, float], whole: Any) -> dict[str, torch.Tensor]:
    named = {name: p for name, p in policy.named_parameters() if ".default" in name and "lora_" in name}
    values: dict[str, torch.Tensor] = {}
    with whole(list(named.values())):
        for name, parameter in named.items():
            value = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            layer, _, rest = name.partition(".lora_")
            is_second = rest.startswith(("B.", "embedding_B."))
            values[name] = (value * scales[layer] if is_second else value).detach().cpu()
    return get_peft_model_state_dict(policy, values, adapter_name="default", save_embedding_layers=False)


def _smaller_ranks(policy: PeftModel) -> dict[str, int]:
    ranks = {
        name.removeprefix("base_model.model."): module.r["default"]
        for name, module in policy.named_modules()
        if isinstance(module, LoraLayer) and "default" in module.r
    }
    return {name: rank for name, rank in ranks.items() if rank < _rank(policy.peft_config["default"])}


def _rank(config: Any) -> int:
    return max([config.r, *(config.rank_pattern or {}).values()])
