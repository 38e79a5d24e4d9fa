"""A tokenizer and a Qwen3 of half a million parameters, made on the spot."""

from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, set_seed

from mcp_grpo.quickstart.tasks import Row, scripted_solution
from mcp_grpo.trl_compat import qwen3_chat_template


SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# A name, a word and a pair of digits are one token each, wherever they stand: "phone" is the same token in a question
# and in `get_phone`, which makes copying easy to learn. JSON and the template's own text may grow into long tokens:
# that keeps the prompt short.
SPLIT_PATTERN = "|".join(
    (
        r"[A-Z][a-z]*",  # a name, or the letter before a number
        r"\d{1,2}",
        r"[a-z]+_",  # the verb of a tool
        r"[\n\"{}<#](?:(?![a-z]+_)[^A-Z\d])*",  # JSON
        r" (?:(?![a-z]+_)[^A-Z\d]){40,}",  # the template's own text, and descriptions
        r"[a-z]+",
        r".",
    )
)


def build_tokenizer(
    rows: Sequence[Row], tools: Sequence[dict[str, Any]], vocab_size: int = 1024
) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with Qwen3's special tokens and chat template."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(TAGS),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_texts(rows, tools), trainer)
    backend.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    return _wrap(backend)


def build_model(tokenizer: Any, seed: int = 0, hidden_size: int = 128, num_layers: int = 3) -> Qwen3ForCausalLM:
    """Make a small Qwen3 with random weights."""
    set_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config)


def _texts(rows: Sequence[Row], tools: Sequence[dict[str, Any]]) -> list[str]:
    """
    Yield whole conversations, the first few with the tools: often enough to be merged, too rarely to crowd names out.
    """
    renderer: Any = _wrap(Tokenizer(models.BPE()))
    conversations = [[*row["prompt"], *scripted_solution(row)] for row in rows]
    return [
        renderer.apply_chat_template(conversation, tools=tools if index < 10 else None, tokenize=False)
        for index, conversation in enumerate(conversations)
    ]


def _wrap(backend: Tokenizer) -> PreTrainedTokenizerFast:
    """Give a tokenizer Qwen3's chat template, end and padding."""
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        chat_template=qwen3_chat_template,
    )
