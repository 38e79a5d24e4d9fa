"""Reads the spelling of a turn from left to right and notes which of its characters were forced."""

from collections.abc import Sequence
from re import Match, Pattern


class Unreadable(ValueError):
    """What stands here is not a tool call in the format, or not a valid one."""


class Cursor:
    """
    A place in the spelling of a turn.

    Args:
        text (`str`):
            Spelling of the turn.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self._forced = bytearray(len(text))
        self._choices: list[int] = []

    def forced(self) -> bytearray:
        """
        What was found out about the turn.

        Returns:
            `bytearray`: One entry per character, 1 where it was forced.
        """
        for position in self._choices:
            if position < len(self.text):
                self._forced[position] = 0
        return self._forced

    def choice(self) -> None:
        """Note that the next character is a choice, whatever it turns out to belong to."""
        self._choices.append(self.position)

    def skip(self, length: int, num_choices: int = 0) -> str:
        """
        Read on: so many characters are choices, the rest of them is forced.

        Args:
            length (`int`):
                How many characters to read.
            num_choices (`int`, *optional*, defaults to `0`):
                How many of the first are choices. If it is more than there are, so is the character that follows.

        Returns:
            `str`: What was read.
        """
        start, end = self.position, self.position + length
        self.position = end
        if num_choices < length:
            self._forced[start + num_choices : end] = b"\1" * (length - num_choices)
        elif num_choices > length:
            self.choice()
        return self.text[start:end]

    def literal(self, literal: str) -> None:
        """
        Read what must come.

        Args:
            literal (`str`):
                What must come.

        Raises:
            [`Unreadable`]: If something else comes.
        """
        if not self.text.startswith(literal, self.position):
            raise Unreadable
        self.skip(len(literal))

    def one_of(self, options: Sequence[str]) -> str:
        """
        Read one of several things of which one must come. Where they part, the character is a choice.

        Args:
            options (`Sequence[str]`):
                What can come. Of two that begin alike, the longer one is meant if it is there.

        Returns:
            `str`: The one that came.

        Raises:
            [`Unreadable`]: If none did.
        """
        found: str | None = None
        for option in options:
            if self.text.startswith(option, self.position) and (found is None or len(option) > len(found)):
                found = option
        if found is None:
            raise Unreadable
        for option in options:
            if option != found:
                self._choices.append(self.position + num_shared(option, found))
        self.skip(len(found))
        return found

    def match(self, pattern: Pattern[str]) -> Match[str]:
        """
        Look at what comes, without reading it.

        Args:
            pattern (`Pattern[str]`):
                What is expected.

        Returns:
            `Match[str]`: The match.

        Raises:
            [`Unreadable`]: If there is none.
        """
        if (found := pattern.match(self.text, self.position)) is None:
            raise Unreadable
        return found

    def until(self, literal: str) -> str:
        """
        Look at what comes before a literal, without reading it.

        Args:
            literal (`str`):
                The literal.

        Returns:
            `str`: What comes before it.

        Raises:
            [`Unreadable`]: If it does not come.
        """
        end = self.text.find(literal, self.position)
        if end < 0:
            raise Unreadable
        return self.text[self.position : end]


def num_shared(one: str, other: str) -> int:
    """
    How far two texts agree.

    Args:
        one, other (`str`):
            The texts.

    Returns:
        `int`: The length of their common beginning.
    """
    for length, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return length
    return min(len(one), len(other))
