import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from typing import Any

import anyio
import pytest
import torch
from helpers.sums import SERVERS, save_adding_model

from mcp_grpo import ToolPool


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
