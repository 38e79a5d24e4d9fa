"""Tokens and texts as strings with one character per byte and one per control token."""

import re
from collections.abc import Iterable, Mapping

from mcp_grpo.vocabulary import Vocabulary


# Characters below stand for bytes, those from here on for control tokens, by id.
FIRST_CONTROL = 256

# A control token. Not `\W` and its like: a control token may have the number of a letter or of a space.
CONTROL = "[^\x00-\xff]"


def spelled(text: str) -> str:
    """
    The spelling of a text without control tokens.

    Args:
        text (`str`):
            The text.

    Returns:
        `str`: One character per byte.
    """
    return text.encode().decode("latin-1")


def plain(spelling: str) -> str:
    """
    The text of a spelling.

    Args:
        spelling (`str`):
            One character per byte.

    Returns:
        `str`: The text. Raises `ValueError` if there is a control token in it, or half a character.
    """
    return spelling.encode("latin-1").decode()


class Spelling(dict[int, str]):
    """
    Spellings by token id.

    Args:
        vocabulary (`Vocabulary`):
            Bytes of the tokens.
        controls (`Mapping[str, int]`):
            Ids of the control tokens by their texts.
    """

    def __init__(self, vocabulary: Vocabulary, controls: Mapping[str, int]) -> None:
        super().__init__({token_id: chr(FIRST_CONTROL + token_id) for token_id in controls.values()})
        self._vocabulary = vocabulary
        self._controls = {literal: self[token_id] for literal, token_id in controls.items()}
        literals = sorted(controls, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, literals))})")

    def __missing__(self, token_id: int) -> str:
        self[token_id] = spelling = self._vocabulary.bytes_of(token_id).decode("latin-1")
        return spelling

    def tokens(self, token_ids: Iterable[int]) -> list[str]:
        """
        Spellings of tokens.

        Args:
            token_ids (`Iterable[int]`):
                Their ids.

        Returns:
            `list[str]`: One entry per token.
        """
        return list(map(self.__getitem__, token_ids))

    def text(self, text: str) -> str:
        """
        The spelling of what a chat template rendered.

        Args:
            text (`str`):
                A text in which the literal of a control token means the token.

        Returns:
            `str`: Its spelling.
        """
        return "".join(self._controls.get(part) or spelled(part) for part in self._split.split(text))

    def literals(self, spelling: str) -> list[str]:
        """
        What control tokens look like when they are written out in letters.

        Args:
            spelling (`str`):
                A spelling with control tokens.

        Returns:
            `list[str]`: Spellings of the literals of those in it.
        """
        return [spelled(literal) for literal, control in self._controls.items() if control in spelling]
