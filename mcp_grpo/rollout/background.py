"""Work on a thread of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

import torch


T = TypeVar("T")


class Background(Generic[T]):
    """
    Something that goes on while this thread does something else. It does not keep the interpreter from ending.

    Args:
        work (`Callable[[], T]`):
            What is to be done.
        device (`torch.device`):
            The device it is to be done on. Without an index, this thread's.
    """

    def __init__(self, work: Callable[[], T], device: torch.device) -> None:
        self._future: Future[T] = Future()
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        threading.Thread(target=self._run, args=(work, device), name="mcp-grpo-ahead", daemon=True).start()

    def result(self) -> T:
        """
        Wait for it.

        Returns:
            `T`: What came of it. An error of the work is raised here.
        """
        return self._future.result()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, however it has."""
        return self._future.done()

    def wait(self, timeout: float | None = None) -> None:
        """
        Wait until it has ended, however it has.

        Args:
            timeout (`float`, *optional*):
                Seconds to wait at most.
        """
        wait([self._future], timeout=timeout)

    def _run(self, work: Callable[[], T], device: torch.device) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # which each thread has for itself
            self._future.set_result(work())
        except BaseException as error:
            self._future.set_exception(error)
