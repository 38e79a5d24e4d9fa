"""Choose the number of threads for a model on a CPU."""

import logging
import math
import os
from contextlib import suppress
from pathlib import Path

import psutil
import torch


logger = logging.getLogger(__name__)

# Below this many parameters, threads wait for each other longer than they compute.
_MAX_PARAMETERS_OF_ONE_THREAD = 10_000_000
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def choose_threads(num_parameters: int) -> int:
    """
    Set and return the number of threads that torch computes with on a CPU: one for a small model, else the free cores.

    OpenMP threads spin while they wait for each other, so on cores that others use too, one more thread may make a step many
    times slower. They sleep instead if `OMP_WAIT_POLICY=PASSIVE` is set before torch is imported.

    An explicit choice is kept: `OMP_NUM_THREADS`, `--num_cpu_threads_per_process` of `accelerate launch`, or
    `torch.set_num_threads` with another number than torch's own.
    """
    if _is_chosen():
        logger.info("Computing with %d threads, as set.", torch.get_num_threads())
        return torch.get_num_threads()
    cores = max(1, free_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
    num_threads = 1 if num_parameters <= _MAX_PARAMETERS_OF_ONE_THREAD else cores
    torch.set_num_threads(num_threads)  # for this thread and those that have not computed yet
    logger.info("Computing with %d threads, for %d parameters and %d free cores.", num_threads, num_parameters, cores)
    return num_threads


def free_cores() -> int:
    """Return how many cores this process may use and others leave free, by affinity, quota and load; at least 1."""
    cores = min(_num_allowed(), _quota())
    busy = min(1.0, psutil.getloadavg()[0] / (os.cpu_count() or 1))
    return max(1, round(cores * (1 - busy)))


def _is_chosen() -> bool:
    """Return whether the number of threads was set explicitly, not by torch or a launcher."""
    present, given = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    if given is None:
        return present not in (_num_allowed(), psutil.cpu_count(logical=False))
    return given != str(present) or not _is_set_by_launcher()


def _is_set_by_launcher() -> bool:
    """Return whether `accelerate launch` set `OMP_NUM_THREADS` by itself: to 1, with `--cpu` to the cores."""
    with suppress(psutil.Error):
        launcher = psutil.Process().parent()
        command = launcher.cmdline() if launcher is not None else []
        if launcher is not None and any("accelerate" in Path(word).name for word in command[:3]):
            is_told = any(word.startswith("--num_cpu_threads_per_process") for word in command)
            return not is_told and "OMP_NUM_THREADS" not in launcher.environ()
    return False


def _num_allowed() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _quota() -> float:
    """Return how many cores' time a container may use; infinite without a limit."""
    with suppress(OSError, ValueError):
        quota, period = _CPU_MAX.read_text().split()
        return int(quota) / int(period)
    return math.inf
