"""Keep what was computed last, for those that ask the same again."""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar


V = TypeVar("V")


class Recent(Generic[V]):
    """
    Keeps the values of the keys that were asked for last. Threads may share it: at worst, a value is computed twice.

    Args:
        size (`int`):
            How many values are kept.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], V]) -> V:
        """Return the value of a key, made if it is not there."""
        try:
            value = self._values[key]
            self._values.move_to_end(key)
            return value
        except KeyError:  # not there, or gone in between
            pass
        value = self._values[key] = make()
        while len(self._values) > self._size:
            try:
                self._values.popitem(last=False)
            except KeyError:  # another thread was first
                break
        return value
