"""Look for garbage only among new objects while trajectories are under way."""

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


LOOK_EVERY = 60.0  # seconds between looks at all objects, which take up to a second


class GarbageWatch:
    """Leaves old objects out of Python's search for garbage: to look through all of torch and a model takes a second each time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0  # of contexts that are open, in all threads
        self._last_look = float("-inf")
        self._is_others = False  # somebody else leaves them out, with what they know, as vLLM does

    @contextmanager
    def only_new_objects(self) -> Iterator[None]:
        """Leave out what there is now, for as long as the context lasts. Threads may open several."""
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._look()
                if not self._is_others:
                    gc.freeze()
        try:
            yield
        finally:
            with self._lock:
                self._depth -= 1
                if self._depth == 0 and not self._is_others:
                    gc.unfreeze()

    def _look(self) -> None:
        """Collect old garbage, which is found at no other time, and see what others do. Not each time: objects are counted one by one."""
        if time.monotonic() - self._last_look <= LOOK_EVERY:
            return
        self._is_others = gc.get_freeze_count() > 0
        if not self._is_others:
            gc.collect()
        self._last_look = time.monotonic()


GARBAGE = GarbageWatch()
