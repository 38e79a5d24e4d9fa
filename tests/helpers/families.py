"""Small tokenizers that carry the real chat templates and control tokens of the families TRL knows tool calls of."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import trl
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mcp_grpo.rollout import set_call_format


_CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_QWEN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA = (
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|python_tag|>",
    "<|end_of_text|>",
)
_GLM = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>", "<|endoftext|>")
_HARMONY = (
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
)
_LFM = tuple(f"<|tool_{part}_{side}|>" for part in ("list", "call", "response") for side in ("start", "end"))
_GEMMA = ("<bos>", "<eos>", "<|turn>", "<turn|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>")
_GEMMA += ("<|tool_response>", "<tool_response|>", "<|channel>", "<channel|>", '<|"|>', "<|think|>")


@dataclass(frozen=True)
class Family:
    """Control tokens of a family: special ones, other added ones, those that end a turn, and how it opens a text."""

    special: tuple[str, ...]
    added: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str | None = None


_CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")
_QWEN_FAMILY = Family(_CHATML, _QWEN, _CHATML_ENDS)
_LLAMA_FAMILY = Family(_LLAMA, (), ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), "<|begin_of_text|>")
_LFM_FAMILY = Family(("<|startoftext|>", *_CHATML, *_LFM), ("<think>", "</think>"), _CHATML_ENDS, "<|startoftext|>")
_GEMMA_FAMILY = Family(_GEMMA, (), ("<eos>", "<turn|>", "<|tool_response>"), "<bos>")

FAMILIES = {
    "qwen2_5": Family(_CHATML, ("<tool_call>", "</tool_call>"), _CHATML_ENDS),
    "qwen3": _QWEN_FAMILY,
    "qwen3_instruct_2507": _QWEN_FAMILY,
    "qwen3_vl": _QWEN_FAMILY,
    "qwen3_5_nothink": _QWEN_FAMILY,
    "qwen3_5_think": _QWEN_FAMILY,
    "qwen3_6": _QWEN_FAMILY,
    "qwen3_8": _QWEN_FAMILY,
    "nemotron_3_nano": _QWEN_FAMILY,
    "nemotron_3_super": _QWEN_FAMILY,
    "nemotron_3_ultra": _QWEN_FAMILY,
    "nemotron_3_5_lightning": _QWEN_FAMILY,
    "llama3_1": _LLAMA_FAMILY,
    "llama3_2": _LLAMA_FAMILY,
    "glm4moe": Family(
        _GLM,
        (*_QWEN, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ("<|endoftext|>", "<|user|>", "<|observation|>"),
    ),
    "gptoss": Family(_HARMONY, (), ("<|return|>", "<|call|>", "<|endoftext|>")),
    "lfm2_v2": _LFM_FAMILY,
    "lfm2_2_5": _LFM_FAMILY,
    "lfm2_2_5_v2": _LFM_FAMILY,
    "lfm2_2_5_vl": _LFM_FAMILY,
    "gemma4": _GEMMA_FAMILY,
    "gemma4_v2": _GEMMA_FAMILY,
    "gemma4_v3": _GEMMA_FAMILY,
    "gemma4_v4": _GEMMA_FAMILY,
    "gemma4_v5": _GEMMA_FAMILY,
}

FENCED = "_json"
FENCED_FAMILIES = [f"{name}{FENCED}" for name in ("qwen2_5", "qwen3", "llama3_1", "lfm2_v2", "gemma4_v5")]
"""Families whose calls are in fenced JSON, as `call_format="json"` makes them: with and without reasoning and tags of their own."""

ONE_PER_FORMAT = ("qwen3", "qwen3_6", "llama3_1", "glm4moe", "gptoss", "lfm2_v2", "gemma4_v5", "qwen2_5_json")
EVERY_FAMILY = [
    name if name in ONE_PER_FORMAT else pytest.param(name, marks=pytest.mark.full)
    for name in [*FAMILIES, *FENCED_FAMILIES]
]
"""All families, for tests that take long: those that write calls as another one does are left to `make test-all`."""


def family_tokenizer(
    name: str, merges: tuple[tuple[str, str], ...] = (), *, by_words: bool = False
) -> PreTrainedTokenizerFast:
    """
    A byte-level tokenizer with the family's control tokens and its stock chat template, around which `_json` at the end of
    the name puts the one that writes calls in fenced JSON.

    Merges reach over any border, unless a text is split by words before.
    """
    own_name = name.removesuffix(FENCED)
    family = FAMILIES[own_name]
    vocabulary = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(vocabulary)}, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=by_words or not merges)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.added])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=family.ends[0], pad_token=family.ends[-1], bos_token=family.bos
    )
    tokenizer.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{own_name}.jinja").read_text()
    if name != own_name:
        set_call_format(tokenizer, "json")
    return tokenizer


def end_of_turn_ids(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids at which a turn of the family ends."""
    return [tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[name.removesuffix(FENCED)].ends]
