"""Tokens and texts as strings with one character per byte and one per control token."""

import re
from collections.abc import Iterable, Mapping

from mcp_grpo.masking.vocabulary import Vocabulary


# Characters below stand for bytes, those from here on for control tokens, by id.
FIRST_CONTROL = 256

# A control token. Not `\W` or the like: a control token may have the number of a letter or of a space.
CONTROL = "[^\x00-\xff]"

BLANKS = " \t\r\n"


def spelled(text: str) -> str:
    """Spell a text without control tokens."""
    return text.encode().decode("latin-1")


def plain(spelling: str) -> str:
    """Return the text of a spelling. Raises `ValueError` for a control token or half a character."""
    return spelling.encode("latin-1").decode()


def parts(spelling: str) -> list[str | int]:
    """Split a spelling into texts and ids of control tokens."""
    found: list[str] = re.findall(f"{CONTROL}|[\x00-\xff]+", spelling)
    return [plain(part) if ord(part[0]) < FIRST_CONTROL else ord(part) - FIRST_CONTROL for part in found]


class Spelling(dict[int, str]):
    """Spellings by token id, given the ids of the control tokens by their texts."""

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
        """Spell each token."""
        return list(map(self.__getitem__, token_ids))

    def text(self, text: str) -> str:
        """Spell what a chat template rendered, in which the text of a control token means the token."""
        found = self._split.split(text)
        return "".join(self[self.controls[part]] if part in self.controls else spelled(part) for part in found)

    def shown(self, spelling: str) -> str:
        """Return the text of a spelling, with the texts of control tokens."""
        literals = {token_id: literal for literal, token_id in self.controls.items()}
        return "".join(part if isinstance(part, str) else literals[part] for part in parts(spelling))

    def literals(self, spelling: str) -> list[str]:
        """Spell out in letters each control token in a spelling."""
        return [spelled(literal) for literal, token_id in self.controls.items() if self[token_id] in spelling]
