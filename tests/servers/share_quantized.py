"""
Trains an adapter on a model in 4 bits, and holds each pass with prompts shared against one on rows. Arguments: the model, and a
folder. Prints as JSON how the weights are kept, how many passes were compared, and how large gradients were.
"""

import json
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from bitsandbytes.nn import Linear4bit
from helpers.both_ways import Twice, rewards_by_place
from helpers.runs import make_trainer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig


torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(
    sys.argv[1],
    quantization_config=BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.float32,
    ),
    dtype=torch.float32,
    device_map="cpu",
)
for layer in model.modules():
    if isinstance(layer, Linear4bit):
        # Where a CPU multiplies bf16, an evaluation would put weights into another form, which computes in bf16 and has no gradient.
        assert layer.support_avx512bf16_for_cpu in (True, False)
        layer.support_avx512bf16_for_cpu = False
with make_trainer(
    Path(sys.argv[2]),
    model,
    Twice,
    reward=rewards_by_place,
    peft_config=LoraConfig(r=4, target_modules="all-linear"),
    gradient_accumulation_steps=2,
    max_steps=1,
    max_completion_length=80,
    temperature=1.5,
    old_logps="trainer",
    num_iterations=2,
) as trainer:
    for name, parameter in trainer.model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()  # as TRL keeps them, in bf16, rounding would hide what differs
        if "lora_B" in name:  # with zeros there, A has no gradient
            torch.nn.init.normal_(parameter, std=0.02)
    trainer.train()
kinds = sorted({type(each).__name__ for each in trainer.model.modules() if "4bit" in type(each).__name__})
print(json.dumps({"kinds": kinds, "compared": trainer.num_compared, "gradients": sum(trainer.sizes.values())}))  # noqa: T201
