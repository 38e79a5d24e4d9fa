"""The exact bytes behind each token id."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mcp_grpo.errors import SettingsError


class Vocabulary:
    """
    The bytes that each token of a tokenizer stands for.

    A token may be a part of a character, so it has bytes but no text. The bytes of several tokens, joined, are the text that
    they add to what precedes them: a token's leading space counts, even where the tokenizer would drop it at the beginning
    of a text.

    The vocabulary must be byte-level (GPT-2, Llama 3, Qwen) or SentencePiece-like (Llama 2, Gemma), with or without tokens
    for single bytes. Others are refused.

    Example:

    ```python
    vocabulary = Vocabulary(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"))
    vocabulary.pieces([151657, 198, 4913, 606, 788])  # [b'<tool_call>', b'\\n', b'{"', b'name', b'":']
    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self.added = {token.content: token_id for token_id, token in added.items()}  # special or not
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(backend, "decoder", None)
        to_bytes = _reader(json.loads(decoder.__getstate__())) if decoder is not None else None
        if to_bytes is None:
            raise SettingsError(
                f"The bytes of this tokenizer's tokens are unknown: {type(tokenizer).__name__} decodes with "
                f"{'code of its own' if decoder is None else decoder}, which is neither byte-level nor SentencePiece-like. "
                "Set `schema_mask='off'`, or use a model with such a tokenizer."
            )

        @cache
        def bytes_of(token_id: int) -> bytes:
            token: str | None = backend.id_to_token(token_id)
            return b"" if token is None else to_bytes(token)

        self.bytes_of = bytes_of  # none for an id without a token, which models with a padded vocabulary can sample

    def pieces(self, token_ids: Iterable[int]) -> list[bytes]:
        """Return the bytes of each token."""
        return list(map(self.bytes_of, token_ids))


def _reader(decoder: dict[str, Any]) -> Callable[[str], bytes] | None:
    """Return how a decoder of `tokenizers` turns a token into bytes, if that does not depend on other tokens."""
    match decoder:
        case {"type": "ByteLevel"}:
            return _byte_level
        case {"type": "Metaspace", "replacement": str(mark)}:
            return lambda token: token.replace(mark, " ").encode()
        case {"type": "Sequence", "decoders": [*steps]}:
            return _sequence(steps)
    return None


_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def _sequence(steps: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
    replaced: list[tuple[str, str]] = []
    has_bytes = is_fused = False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return _byte_level
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not is_fused:
                replaced.append((old, new))
            case {"type": "ByteFallback"}:
                has_bytes = True
            case {"type": "Fuse"}:
                is_fused = True
            case {"type": "Strip", "stop": 0} if is_fused:
                pass  # only at the start of a text
            case _:
                return None

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = _BYTE.fullmatch(token) if has_bytes else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return to_bytes


_BYTES = {letter: byte for byte, letter in bytes_to_unicode().items()}  # GPT-2's letters for bytes


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return token.encode()  # an added token, written as it is
