import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.fork_server import ForkServer


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """What runs programs in processes that begin with the trainer imported."""
    if shared := os.environ.get("FORK_SERVER"):
        yield ForkServer(Path(shared))
        return
    with tempfile.TemporaryDirectory() as folder:
        server = ForkServer(Path(folder))
        with server.serve():
            yield server
