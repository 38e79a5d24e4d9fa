"""Tiny policies and references for them."""

from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import Qwen3ForCausalLM

from helpers.families import family_tokenizer
from helpers.policies import tiny_model


IDS = torch.arange(40, 52)[None]
KINDS = ("lora", "float32", "bfloat16")
LORA = {"r": 4, "target_modules": ["q_proj", "up_proj"], "lora_dropout": 0.1}


def full(dtype: torch.dtype = torch.float32, **settings: Any) -> Qwen3ForCausalLM:
    return tiny_model(family_tokenizer("qwen3"), **settings).to(dtype)


def with_lora(**settings: Any) -> PeftModel:
    return get_peft_model(full(), LoraConfig(**{**LORA, **settings}))


def logps(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits.float().log_softmax(-1)
