"""Groups that are rolled out while the policy trains, and which of them a batch is made of."""

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from mcp_grpo.errors import RolloutError
from mcp_grpo.rollout.engine import RolloutEngine
from mcp_grpo.rollout.progress import RolloutProgress
from mcp_grpo.sampling.generator import Generator
from mcp_grpo.types import Task, Trajectory


DROP_TIME = 60.0  # seconds for rollouts to end that are of no use any more
LOOK_EVERY = 1.0  # seconds between looks whether the thread that samples has failed


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StreamedGroup:
    """Attempts that are trained on together: their rows and tasks, and how many updates were done when they were begun."""

    rows: Sequence[dict[str, Any]]
    tasks: Sequence[Task]
    begun: int
    progress: RolloutProgress
    trajectories: Future[list[Trajectory]]

    @property
    def has_ended(self) -> bool:
        """Return whether it is not under way any more."""
        return self.trajectories.done()


def choose(
    groups: Sequence[StreamedGroup], num_groups: int, step: int, max_staleness: int
) -> list[StreamedGroup] | None:
    """
    Choose the groups of a batch: those that were begun first among those that have ended.

    Args:
        groups (`Sequence[StreamedGroup]`):
            All that were begun and not trained on, in the order in which they were begun.
        num_groups (`int`):
            How many a batch has.
        step (`int`):
            Updates done.
        max_staleness (`int`):
            Updates after which a group is waited for.

    Returns:
        `list[StreamedGroup]`, *optional*: The groups; `None` while there is something to wait for.
    """
    ended = [group for group in groups if group.has_ended]
    is_due = any(not group.has_ended and step - group.begun >= max_staleness for group in groups)
    return None if is_due or len(ended) < num_groups else ended[:num_groups]


class RolloutStream:
    """
    Rolls groups out in the background. A batch takes those that have ended; slow ones go on while it is trained on, until they
    were begun `max_staleness` updates ago.

    Each group is a task on the engine's event loop, and one thread serves the generator for all, as long as any is under way.

    Args:
        engine ([`RolloutEngine`]):
            Runs the groups.
        device (`torch.device`):
            Device of the thread that samples.
        max_staleness (`int`):
            Updates after which a group is waited for, at least 1.
    """

    def __init__(self, engine: RolloutEngine, device: torch.device, max_staleness: int) -> None:
        self._engine = engine
        is_current = device.type == "cuda" and device.index is None
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_current else device
        self._max_staleness = max_staleness
        self._groups: list[StreamedGroup] = []  # begun and not taken
        self._lock = threading.Lock()
        self._num_running = 0
        self._idle: Future[None] = Future()  # done when nothing is running
        self._idle.set_result(None)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def groups(self) -> list[StreamedGroup]:
        """Return what was begun and not taken."""
        return list(self._groups)

    def begin(
        self,
        rows: Sequence[dict[str, Any]],
        tasks: Sequence[Task],
        attempts: Callable[[], Awaitable[list[Trajectory]]],
        *,
        step: int,
        generator: Generator,
        progress: RolloutProgress,
    ) -> None:
        """
        Begin a group.

        Args:
            rows (`Sequence[dict[str, Any]]`):
                Its rows of the dataset.
            tasks (`Sequence[Task]`):
                Their tasks.
            attempts (`Callable`):
                Attempts them, on the engine's thread.
            step (`int`):
                Updates done.
            generator ([`Generator`]):
                The policy that they sample from, the same for all groups.
            progress ([`RolloutProgress`]):
                Where they count.
        """
        self._check()
        with self._lock:
            is_first = self._num_running == 0
            self._num_running += 1
            if is_first:
                self._idle = Future()
        trajectories = self._engine.start(partial(self._run, attempts))
        self._groups.append(
            StreamedGroup(rows=rows, tasks=tasks, begun=step, progress=progress, trajectories=trajectories)
        )
        if is_first:
            work = partial(self._sample, generator, self._idle)
            self._thread = threading.Thread(target=work, name="mcp-grpo-stream", daemon=True)
            self._thread.start()

    def take(self, num_groups: int, step: int) -> list[StreamedGroup]:
        """
        Wait for the groups of a batch, and take them out.

        Raises:
            [`RolloutError`] or what broke a group: If one could not be rolled out.
        """
        while (chosen := choose(self._groups, num_groups, step, self._max_staleness)) is None:
            self._wait()
        self._check()
        self._groups = [group for group in self._groups if group not in chosen]
        return chosen

    def wait(self) -> None:
        """Wait until nothing is under way."""
        while not all(group.has_ended for group in self._groups):
            self._wait()
        self._check()

    def drop(self) -> None:
        """End what is under way, and forget what was not taken."""
        self._cancel()
        self._groups = []
        wait([self._idle], timeout=DROP_TIME)
        if self._thread is not None and self._idle.done():
            self._thread.join(timeout=DROP_TIME)
        self._error = None

    def _wait(self) -> None:
        self._check()
        under_way = [group.trajectories for group in self._groups if not group.has_ended]
        wait(under_way, timeout=LOOK_EVERY, return_when=FIRST_COMPLETED)

    def _check(self) -> None:
        """Raise what has gone wrong."""
        if self._error is not None:
            raise self._error
        for group in self._groups:
            if group.trajectories.cancelled():
                raise RolloutError("A rollout was ended from outside. Train anew, or resume from the last checkpoint.")
            if group.has_ended:
                group.trajectories.result()

    def _cancel(self) -> None:
        for group in self._groups:
            group.trajectories.cancel()

    async def _run(self, attempts: Callable[[], Awaitable[list[Trajectory]]]) -> list[Trajectory]:
        try:
            return await attempts()
        finally:
            with self._lock:
                self._num_running -= 1
                ended = self._idle if self._num_running == 0 else None
            if ended is not None:
                ended.set_result(None)

    def _sample(self, generator: Generator, idle: Future[None]) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # each thread has its own
            self._engine.serve(generator, until=idle)
        except BaseException as error:  # who takes the next groups is told
            self._error = error
            self._cancel()
