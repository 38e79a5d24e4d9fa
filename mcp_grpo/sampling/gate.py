"""Hold turns back while weights are sent, so that each is sampled by one version of the policy."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from mcp_grpo.sampling.generator import Generation, Generator, Sampling


class GatedGenerator:
    """
    A generator whose turns can be held back: those that are being sampled end, and others begin later. Tools go on meanwhile.

    Args:
        generator ([`Generator`]):
            What samples.
    """

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self._change = threading.Condition()
        self._num_turns = 0  # that are being sampled
        self._opening: Future[None] | None = None  # while turns are held back

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Generation:
        """See [`Generator.generate`]."""
        while (opening := self._enter()) is not None:
            # Shielded: one trajectory that is given up must not end the waiting of all.
            await asyncio.shield(asyncio.wrap_future(opening))
        try:
            return await self._generator.generate(prompt_ids, sampling)
        finally:
            with self._change:
                self._num_turns -= 1
                self._change.notify_all()

    def serve(self, until: Future[Any]) -> None:
        """See [`Generator.serve`]."""
        self._generator.serve(until)

    @contextmanager
    def between_turns(self) -> Iterator[None]:
        """Hold turns back, after those under way have ended, which another thread must serve if there are any."""
        opening: Future[None] = Future()
        try:
            with self._change:
                self._opening = opening
                self._change.wait_for(lambda: not self._num_turns)
            yield
        finally:
            with self._change:
                self._opening = None
            opening.set_result(None)

    def _enter(self) -> Future[None] | None:
        """Count a turn, or return what it has to wait for."""
        with self._change:
            if self._opening is None:
                self._num_turns += 1
            return self._opening
