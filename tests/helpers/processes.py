"""Which processes a test has left behind."""

from contextlib import suppress

import psutil


# Those of a vLLM server or a fork server that several files share, and Python's own.
OTHERS = ("vllm", "multiprocessing", "fork_server.py")


def left_behind() -> list[psutil.Process]:
    """Children of this process, and theirs, that are nobody else's."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if not any(other in " ".join([child.name(), *child.cmdline()]).lower() for other in OTHERS):
                found.append(child)
    return found
