"""Encode prompts, of which many begin with the same tools, without encoding those again."""

from collections.abc import Sequence
from typing import Any

from mcp_grpo.rollout.recent import Recent


NUM_HEADS = 64  # beginnings of prompts that are kept as tokens


class PromptEncoder:
    """
    Encodes a prompt in two parts, which meet after its first message, and keeps the tokens of the first.

    The tokens are those of the whole text: a tokenizer finds the token that ends a message before it reads what is around it. The first prompt
    is encoded in both ways, and where they differ, all prompts are encoded whole.

    Args:
        tokenizer (`PreTrainedTokenizerBase`):
            Tokenizer of the policy.
        ends (`Sequence[str]`):
            Literals of the tokens that end a message.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._heads: Recent[tuple[int, ...]] = Recent(NUM_HEADS)
        self._is_exact: bool | None = None  # not known yet

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt."""
        found = [(text.find(end), end) for end in self._ends if end in text]
        if self._is_exact is False or not found:
            return self._encoded(text)
        first, end = min(found)
        head, tail = text[: first + len(end)], text[first + len(end) :]
        ids = self._heads.get(head, lambda: self._encoded(head)) + self._encoded(tail)
        if self._is_exact is None:
            whole = self._encoded(text)
            self._is_exact = ids == whole
            return whole
        return ids

    def _encoded(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
