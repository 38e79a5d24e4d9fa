"""A tiny vision-language policy that has learnt to ask the server of `servers/pictures.py` for a picture."""

import re
import sys
from pathlib import Path
from typing import Any

import torch
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    PreTrainedTokenizerFast,
    ProcessorMixin,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from helpers.families import end_of_turn_ids, family_tokenizer
from helpers.policies import teach
from mcp_grpo.rollout import Renderer


SERVER = Path(__file__).parent.parent / "servers" / "pictures.py"
SERVERS = {"pictures": {"command": sys.executable, "args": [str(SERVER)]}}
LOOKING = {"pictures": {**SERVERS["pictures"], "x-mcp-grpo": {"allowed_tools": ["look"]}}}
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QUESTION = "Which colour?"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {{}}}}\n</tool_call><|im_end|>'
ROWS = [{"task_id": f"colour-{i}", "prompt": QUESTION, "answer": "red"} for i in range(4)]


class PictureProcessor(ProcessorMixin):
    """That of Qwen3-VL, without the part for videos, which needs torchvision."""

    valid_processor_kwargs = Qwen3VLProcessor.valid_processor_kwargs
    replace_image_token = Qwen3VLProcessor.replace_image_token
    model_input_names = Qwen3VLProcessor.model_input_names

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        self.image_token = "<|image_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        super().__init__(image_processor, tokenizer, chat_template=chat_template)


def vision_processor(family: str = "qwen3_vl", max_tokens: int = 16) -> PictureProcessor:
    """A processor that makes at least four tokens of a picture."""
    tokenizer = family_tokenizer(family)
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in TOKENS])
    # Most of every prompt is what it says of tools in general.
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": ""}], tools=[{}], tokenize=False)
    lines = [part for part in re.split(r"\n|</?tool_call>", prompt) if len(part) > 30]
    tokenizer.add_tokens([AddedToken(line, normalized=False) for line in lines])
    images = Qwen2VLImageProcessorPil(patch_size=4, size={"shortest_edge": 16 * 16, "longest_edge": 64 * max_tokens})
    return PictureProcessor(images, tokenizer, chat_template=tokenizer.chat_template)


def vision_model(
    tokenizer: PreTrainedTokenizerFast, seed: int = 0, head_dim: int = 16
) -> Qwen3VLForConditionalGeneration:
    """A random Qwen3-VL of some ten thousand parameters."""
    torch.manual_seed(seed)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": head_dim,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [head_dim // 4, head_dim // 8, head_dim // 8],
            "mrope_interleaved": True,
        },
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
        "initializer_range": 0.2,
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")
    }
    ids |= {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}_pad|>") for name in ("image", "video")}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **ids)
    model = Qwen3VLForConditionalGeneration(config).eval()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def save_looking_policy(folder: Path, tools: list[dict[str, Any]], head_dim: int = 16) -> str:
    """Write a policy that asks for a picture at first, and then says something about it."""
    tokenizer = vision_processor().tokenizer
    model = vision_model(tokenizer, head_dim=head_dim)
    renderer = Renderer(tokenizer, end_of_turn_ids=end_of_turn_ids("qwen3_vl", tokenizer))
    prompt = tokenizer.decode(renderer.prompt_ids([{"role": "user", "content": QUESTION}], tools))
    teach(model, tokenizer, [(prompt, CALL.format("look"))], steps=80)
    model.save_pretrained(folder)
    return str(folder)


def gemma_policy() -> tuple[Gemma3ForConditionalGeneration, Gemma3Processor]:
    """A random Gemma 3, which has no tools, sees a picture at once, and writes more than one token around it."""
    vocabulary = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    own = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    special = ("<bos>", "<eos>", "<pad>", "<start_of_turn>", "<end_of_turn>", *own.values())
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<end_of_turn>",
        bos_token="<bos>",
        pad_token="<pad>",
        extra_special_tokens=own,
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / "gemma3.jinja").read_text()
    images = Gemma3ImageProcessorPil(size={"height": 16, "width": 16})
    processor = Gemma3Processor(images, tokenizer, chat_template=tokenizer.chat_template, image_seq_length=4)
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
    }
    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
    }
    ids = {
        f"{name}_token_index": tokenizer.convert_tokens_to_ids(own[f"{name}_token"])
        for name in ("boi", "eoi", "image")
    }
    torch.manual_seed(0)
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids)
    model = Gemma3ForConditionalGeneration(config).eval()
    torch.nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.5)  # zeros show nothing
    return model, processor
