"""The exact bytes behind each token id."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

from transformers import PreTrainedTokenizerBase

from mcp_grpo.errors import SettingsError


class Vocabulary:
    """
    What each token of a tokenizer stands for, in bytes.

    A token of its own may be a part of a character, so it has bytes but no text. The bytes of several tokens, joined,
    are the text that those tokens add to what stands before them: a token's leading space counts, also where the
    tokenizer would drop it at the beginning of a text.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            A tokenizer with a byte-level vocabulary (GPT-2, Llama 3, Qwen), or one in the manner of SentencePiece (Llama
            2, Gemma), with or without tokens for single bytes. Others are refused.

    Example:

    ```python
    vocabulary = Vocabulary(AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B"))
    vocabulary.pieces([151657, 198, 4913, 606, 788])  # [b'<tool_call>', b'\\n', b'{"', b'name', b'":']
    ```
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self.added = {token.content: token_id for token_id, token in added.items()}
        """Ids of the tokens that were added to the vocabulary, special or not, by their text."""
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        """Ids of the special tokens."""
        self._pieces = _Pieces(tokenizer)

    def bytes_of(self, token_id: int) -> bytes:
        """
        The bytes of one token.

        Args:
            token_id (`int`):
                Its id.

        Returns:
            `bytes`: Its bytes: of an added token its text; none for an id that stands for no token, which models with a
            padded vocabulary can sample.
        """
        return self._pieces[token_id]

    def pieces(self, token_ids: Iterable[int]) -> list[bytes]:
        """
        The bytes of each of several tokens.

        Args:
            token_ids (`Iterable[int]`):
                Their ids.

        Returns:
            `list[bytes]`: One entry per token.
        """
        return list(map(self._pieces.__getitem__, token_ids))


class _Pieces(dict[int, bytes]):
    """Bytes by token id. A policy uses few of its tokens, so each is read when it is first met."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        decoder = getattr(self._backend, "decoder", None)
        to_bytes = _reader(json.loads(decoder.__getstate__())) if decoder is not None else None
        if to_bytes is None:
            raise SettingsError(
                f"The bytes of this tokenizer's tokens cannot be known: {type(tokenizer).__name__} decodes with "
                f"{'code of its own' if decoder is None else decoder}, which is neither byte-level nor in the manner of "
                "SentencePiece. Set `schema_mask='off'`, or use a model whose tokenizer is."
            )
        self._to_bytes = to_bytes

    def __missing__(self, token_id: int) -> bytes:
        token: str | None = self._backend.id_to_token(token_id)
        self[token_id] = piece = b"" if token is None else self._to_bytes(token)
        return piece


def _reader(decoder: dict[str, Any]) -> Callable[[str], bytes] | None:
    """How a decoder of `tokenizers` turns a token into bytes, if that does not depend on the tokens around it."""
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
                pass  # of a whole text, not of what continues one
            case _:
                return None

    def to_bytes(token: str) -> bytes:
        for old, new in replaced:
            token = token.replace(old, new)
        byte = _BYTE.fullmatch(token) if has_bytes else None
        return bytes.fromhex(byte[1]) if byte else token.encode()

    return to_bytes


def _alphabet() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes([_BYTES[letter] for letter in token])
    except KeyError:
        return token.encode()  # an added token, which is written as it is
