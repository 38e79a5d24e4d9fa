"""Tokens and texts as strings with one character per byte and one per control token."""

import re
from collections.abc import Iterable, Mapping

from mcp_grpo.vocabulary import Vocabulary


# Characters below stand for bytes, those from here on for control tokens, by id.
FIRST_CONTROL = 256

# A control token. Not `\W` and its like: a control token may have the number of a letter or of a space.
CONTROL = "[^\x00-\xff]"

BLANKS = " \t\r\n"


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


def parts(spelling: str) -> list[str | int]:
    """
    What a spelling consists of.

    Args:
        spelling (`str`):
            One character per byte and one per control token.

    Returns:
        `list[str | int]`: Texts, and ids of control tokens between them.
    """
    found: list[str] = re.findall(f"{CONTROL}|[\x00-\xff]+", spelling)
    return [plain(part) if ord(part[0]) < FIRST_CONTROL else ord(part) - FIRST_CONTROL for part in found]


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
        self.controls = controls
        self._vocabulary = vocabulary
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
        found = self._split.split(text)
        return "".join(self[self.controls[part]] if part in self.controls else spelled(part) for part in found)

    def shown(self, spelling: str) -> str:
        """
        A spelling as the chat template would render it.

        Args:
            spelling (`str`):
                One character per byte and one per control token.

        Returns:
            `str`: The text, with the literals of control tokens.
        """
        literals = {token_id: literal for literal, token_id in self.controls.items()}
        return "".join(part if isinstance(part, str) else literals[part] for part in parts(spelling))

    def literals(self, spelling: str) -> list[str]:
        """
        What control tokens look like when they are written out in letters.

        Args:
            spelling (`str`):
                A spelling with control tokens.

        Returns:
            `list[str]`: Spellings of the literals of those in it.
        """
        return [spelled(literal) for literal, token_id in self.controls.items() if self[token_id] in spelling]
