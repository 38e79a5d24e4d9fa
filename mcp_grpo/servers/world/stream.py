"""Numbers that look random and are the same on every machine and every version of Python."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import TypeVar


T = TypeVar("T")


class Stream:
    """
    A stream of numbers, named by its key.

    Integers only: what is drawn depends on SHAKE-256 and on nothing else.

    Args:
        *key (`object`):
            Names the stream. Streams with different keys have nothing to do with each other, so that one more draw in
            one place changes nothing elsewhere.
    """

    def __init__(self, *key: object) -> None:
        self._key = "/".join(map(str, key))
        self._block = 0
        self._words = iter(())

    def below(self, limit: int) -> int:
        """A number from 0 to `limit - 1`."""
        word = next(self._words, None)
        if word is None:
            self._words = iter(words(f"{self._key}#{self._block}", "I", 64))
            self._block += 1
            word = next(self._words)
        return word * limit >> 32

    def between(self, low: int, high: int) -> int:
        """A number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        """Whether something happens that happens `percent` times in a hundred."""
        return self.below(100) < percent

    def pick(self, values: Sequence[T]) -> T:
        """One of `values`."""
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], count: int) -> list[T]:
        """`count` different ones of `values`, in a random order."""
        left = list(values)
        for place in range(min(count, len(left))):
            other = self.between(place, len(left) - 1)
            left[place], left[other] = left[other], left[place]
        return left[:count]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """All `values` in a random order."""
        return self.some(values, len(values))


def words(key: str, code: str, count: int) -> array:
    """
    `count` unsigned numbers that belong to a key.

    Args:
        key (`str`):
            Names them.
        code (`str`):
            Their size, as a type code of `array`: `"H"` for 16 bits, `"I"` for 32.
        count (`int`):
            How many.

    Returns:
        `array`: The numbers.
    """
    numbers = array(code)
    numbers.frombytes(hashlib.shake_256(key.encode()).digest(count * numbers.itemsize))
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers


_IS_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"
