"""Hold turns back while weights are sent, so that each is sampled by one version of the policy."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling.generator import Generation, Generator, Sampling


END_TIME = 60.0  # seconds for a turn to end that has taken too long and was given up


class GatedGenerator:
    """
    A generator whose turns can be held back: those that are being sampled end, and others begin later. Tools go on meanwhile.

    Args:
        generator ([`Generator`]):
            What samples.
        turn_timeout (`float`):
            Seconds after which a turn is given up by who asked for it.
    """

    def __init__(self, generator: Generator, turn_timeout: float) -> None:
        self._generator = generator
        self._longest = min(turn_timeout + END_TIME, threading.TIMEOUT_MAX)
        self._change = threading.Condition()
        self._num_turns = 0  # that are being sampled
        self._num_serving = 0  # threads
        self._failure: BaseException | None = None  # of a thread that served the turns under way
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
        with self._change:
            self._num_serving += 1
        failure: BaseException | None = None
        try:
            self._generator.serve(until)
        except BaseException as error:
            failure = error
            raise
        finally:
            with self._change:
                self._num_serving -= 1
                self._failure = failure or self._failure
                self._change.notify_all()

    @contextmanager
    def between_turns(self) -> Iterator[None]:
        """
        Hold turns back, after those under way have ended, which another thread must serve if there are any.

        Raises:
            [`SamplerError`]: If they do not end, or the thread that served them has failed.
        """
        opening: Future[None] = Future()
        try:
            with self._change:
                self._opening = opening
                if self._num_turns:
                    self._wait_for_turns()
            yield
        finally:
            with self._change:
                self._opening = None
            opening.set_result(None)

    def _wait_for_turns(self) -> None:
        self._change.wait_for(lambda: self._is_lost or not self._num_turns, timeout=self._longest)
        if not self._num_turns:
            return
        if self._is_lost:
            raise SamplerError(
                f"The thread that sampled for the rollouts under way has failed: {self._failure!r}. Resume from the last checkpoint."
            ) from self._failure
        raise SamplerError(
            f"New weights have waited {self._longest:.0f} seconds for turns that are being sampled ({self._num_turns} by now), "
            f"{END_TIME:.0f} more than `trajectory_timeout`: what samples them hangs. Look at vLLM's own output and at its "
            "GPU, and resume from the last checkpoint."
        )

    @property
    def _is_lost(self) -> bool:
        """Return whether nobody is left to sample turns, since a thread has failed."""
        return self._failure is not None and not self._num_serving

    def _enter(self) -> Future[None] | None:
        """Count a turn, or return what it has to wait for."""
        with self._change:
            if self._opening is None:
                self._failure = self._failure if self._num_turns else None  # an earlier one is not of this turn
                self._num_turns += 1
            return self._opening
