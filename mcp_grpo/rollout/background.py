"""Run work on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import torch


T = TypeVar("T")


class Background(Generic[T]):
    """Work on a daemon thread, with the given device (without an index, this thread's) as its current one."""

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._future: Future[T] = Future()
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        threading.Thread(target=self._run, args=(work, device), name="mcp-grpo-ahead", daemon=True).start()

    def result(self) -> T:
        """Wait for the work, and return what it returned or raise what it raised."""
        return self._future.result()

    @property
    def is_done(self) -> bool:
        """Return whether it has ended or failed."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it has ended or failed, at most `timeout` seconds."""
        wait([self._future], timeout=timeout)

    def _run(self, work: Callable[[], T], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            self._future.set_result(work())
        except BaseException as error:
            self._future.set_exception(error)
