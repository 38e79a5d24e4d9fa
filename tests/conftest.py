import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import random
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from helpers.sums import SERVERS, save_adding_model

from mcp_grpo import ToolPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        reason = "needs vLLM: `make test` installs it where it can, `python tests/install_vllm.py` says why it cannot"
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module", autouse=True)
def same_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the engine that a module's tests marked `vllm` ran in this process, and undoes what it did to the process."""
    if not any(item.get_closest_marker("vllm") for item in request.session.items if item.path == request.path):
        yield
        return
    environ, hook, set_num_threads = dict(os.environ), sys.excepthook, torch.set_num_threads
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    yield
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: TID251

    cleanup_dist_env_and_memory()
    torch.set_num_threads, sys.excepthook = set_num_threads, hook
    os.environ.clear()
    os.environ.update(environ)
    for restore, state in zip((torch.set_rng_state, np.random.set_state, random.setstate), states, strict=True):
        restore(state)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small are slower on more threads."""
    torch.set_num_threads(1)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def adding_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a small policy that has learnt to call the tool of `servers/sums.py`."""

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool(SERVERS) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    return save_adding_model(tmp_path_factory.mktemp("adding"), anyio.run(schemas))
