"""How busy the GPU is, and how full."""

import logging
import threading
from collections.abc import Callable
from typing import Self

import torch


SAMPLE_SECONDS = 1.0
MAX_WAIT = 5.0  # seconds for the thread to end

logger = logging.getLogger(__name__)


def device_sample() -> tuple[float | None, float]:
    """
    Look at the GPU of this process once.

    Returns:
        `tuple[float | None, float]`: Share of the last moment in which it worked (`None` where NVML cannot tell), and GiB of
        its memory that are taken, by whomever.
    """
    free, total = torch.cuda.mem_get_info()
    try:
        return torch.cuda.utilization() / 100, (total - free) / 2**30
    except (ImportError, RuntimeError):  # `nvidia-ml-py` is not installed, or has no access
        return None, (total - free) / 2**30


class GPUWatch:
    """
    Watches the GPU while a context is open, on a thread of its own.

    Args:
        sample (`Callable`, *optional*):
            Looks at the GPU once, as [`device_sample`] does. If `None`, that one where there is a GPU, else nothing.
    """

    def __init__(self, sample: Callable[[], tuple[float | None, float]] | None = None) -> None:
        self._sample = sample or (device_sample if torch.cuda.is_available() else None)
        self._lock = threading.Lock()
        self._samples: list[tuple[float | None, float]] = []
        self._end = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._sample is not None:
            self._end.clear()
            self._thread = threading.Thread(target=self._watch, args=[self._sample], name="gpu-watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(timeout=MAX_WAIT)

    def metrics(self) -> dict[str, float]:
        """
        Sum up what was seen since the last time.

        Returns:
            `dict[str, float]`: `gpu/utilization`, the mean share of time in which it worked, and `gpu/memory_gib`, the most
            memory that was taken; nothing where there is no GPU.
        """
        with self._lock:
            samples, self._samples = self._samples, []
        if not samples:
            return {}
        shares = [share for share, _ in samples if share is not None]
        metrics = {"gpu/memory_gib": max(memory for _, memory in samples)}
        return metrics | ({"gpu/utilization": sum(shares) / len(shares)} if shares else {})

    def _watch(self, sample: Callable[[], tuple[float | None, float]]) -> None:
        while not self._end.wait(SAMPLE_SECONDS):
            try:
                seen = sample()
            except RuntimeError as error:  # the device is gone: the run itself will say so
                logger.info("The GPU is no longer watched: %s", error)
                return
            with self._lock:
                self._samples.append(seen)
