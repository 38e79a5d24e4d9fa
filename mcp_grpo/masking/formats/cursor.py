"""Read the spelling of a turn from left to right, noting which of its characters were forced."""

from collections.abc import Sequence
from re import Match, Pattern


class Unreadable(ValueError):
    """Say that what comes is no tool call in the format, or no valid one."""


class Cursor:
    """A position in the spelling of a turn. Methods raise [`Unreadable`] if something else comes than they expect."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._forced = bytearray(len(text))
        self._choices: list[int] = []

    def forced(self) -> bytearray:
        """Return one entry per character, 1 where it was forced."""
        for position in self._choices:
            if position < len(self.text):
                self._forced[position] = 0
        return self._forced

    def choice(self) -> None:
        """Mark the next character as a choice, whatever it belongs to."""
        self._choices.append(self.position)

    def skip(self, length: int, num_choices: int = 0) -> str:
        """
        Read characters of which the first `num_choices` are choices and the rest is forced. If there are more choices than
        characters, the character that follows is one too.
        """
        start, end = self.position, self.position + length
        self.position = end
        if num_choices < length:
            self._forced[start + num_choices : end] = b"\1" * (length - num_choices)
        elif num_choices > length:
            self.choice()
        return self.text[start:end]

    def literal(self, literal: str) -> None:
        """Read a text that must come."""
        if not self.text.startswith(literal, self.position):
            raise Unreadable
        self.skip(len(literal))

    def one_of(self, options: Sequence[str]) -> str:
        """Read the longest of several texts that comes. The character where two of them part is a choice."""
        found = max(
            (option for option in options if self.text.startswith(option, self.position)), key=len, default=None
        )
        if found is None:
            raise Unreadable
        self._choices += [self.position + num_shared(option, found) for option in options if option != found]
        return self.skip(len(found))

    def match(self, pattern: Pattern[str]) -> Match[str]:
        """Match what comes, without reading it."""
        if (found := pattern.match(self.text, self.position)) is None:
            raise Unreadable
        return found

    def until(self, literal: str) -> str:
        """Return what comes before a literal, without reading it."""
        end = self.text.find(literal, self.position)
        if end < 0:
            raise Unreadable
        return self.text[self.position : end]


def num_shared(one: str, other: str) -> int:
    """Return the length of the common beginning of two texts."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
