"""Pseudo-random numbers that are the same on every machine and every version of Python."""

import hashlib
from array import array
from collections.abc import Sequence
from typing import TypeVar


T = TypeVar("T")


class Stream:
    """
    A stream of pseudo-random integers, determined by its key alone.

    Streams with different keys are independent, so that one more draw in one place changes nothing elsewhere.
    """

    def __init__(self, *key: object) -> None:
        self._key = "/".join(map(str, key))
        self._block = 0
        self._words = iter(())

    def below(self, limit: int) -> int:
        """Draw a number from 0 to `limit - 1`."""
        word = next(self._words, None)
        if word is None:
            self._words = iter(words(f"{self._key}#{self._block}", "I", 64))
            self._block += 1
            word = next(self._words)
        return word * limit >> 32

    def between(self, low: int, high: int) -> int:
        """Draw a number from `low` to `high`, both included."""
        return low + self.below(high - low + 1)

    def chance(self, percent: int) -> bool:
        """Return true in `percent` of 100 draws."""
        return self.below(100) < percent

    def pick(self, values: Sequence[T]) -> T:
        """Draw one of `values`."""
        return values[self.below(len(values))]

    def some(self, values: Sequence[T], count: int) -> list[T]:
        """Draw `count` different `values`, in random order."""
        left = list(values)
        for place in range(min(count, len(left))):
            other = self.between(place, len(left) - 1)
            left[place], left[other] = left[other], left[place]
        return left[:count]

    def shuffled(self, values: Sequence[T]) -> list[T]:
        """Return all `values` in random order."""
        return self.some(values, len(values))


def words(key: str, code: str, count: int) -> array:
    """Return `count` unsigned numbers for a key; `code` is their type code in `array`."""
    numbers = array(code)
    numbers.frombytes(hashlib.shake_256(key.encode()).digest(count * numbers.itemsize))
    if _IS_BIG_ENDIAN:
        numbers.byteswap()
    return numbers


_IS_BIG_ENDIAN = array("H", [1]).tobytes() == b"\x00\x01"
