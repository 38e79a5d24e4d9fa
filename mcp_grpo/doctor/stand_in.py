"""A tiny random Qwen3 in place of weights that are not here: it calls no tools, but everything around it is real."""

from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from mcp_grpo.errors import SettingsError
from mcp_grpo.trl_compat import qwen3_chat_template


STAND_IN = "stand-in"  # as `model_name_or_path`
QWEN3_CONTEXT = 40960
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def tokenizer_of(name: str, revision: str = "main") -> tuple[PreTrainedTokenizerFast, bool]:
    """Return the tokenizer of a model, or one of bytes with the chat template of Qwen3; and whether it is the model's."""
    if name != STAND_IN:
        try:
            return AutoTokenizer.from_pretrained(name, revision=revision, local_files_only=True), True
        except (OSError, ValueError) as error:
            if "qwen3" not in str(name).lower():
                raise SettingsError(
                    f"The tokenizer of {name!r} is not on this machine, and only the chat template of Qwen3 is known by heart. "
                    f"Fetch it first: `hf download {name} --include 'tokenizer*' '*.jinja' config.json`; or, if it is a folder that "
                    "`sft_warmup.py` is to write, warm up first."
                ) from error
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=qwen3_chat_template
    )
    return tokenizer, False


def config_of(name: str, revision: str = "main") -> Any:
    """Return the configuration of a model, or `None` if it is not on this machine."""
    try:
        return AutoConfig.from_pretrained(name, revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None


def save_stand_in(folder: str, tokenizer: PreTrainedTokenizerFast, context: int | None = None, seed: int = 0) -> None:
    """Write a tiny random Qwen3 where `from_pretrained` finds it; without a `context`, it has room for many bytes."""
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=context or 4 * QWEN3_CONTEXT,
        tie_word_embeddings=True,
        eos_token_id=cast(Any, tokenizer.eos_token_id),
        pad_token_id=cast(Any, tokenizer.pad_token_id),
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
