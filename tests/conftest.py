import os


os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small are slower on more threads, and vLLM's spin

import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import anyio
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from helpers.sums import SERVERS, save_adding_model

from mcp_grpo import ToolPool


LONG = (
    "test_vllm_training.py",
    "test_vllm_server.py",
    "test_vllm_ranks.py",
    "test_serving.py",
    "test_trainer.py",
    "test_ranks.py",
    "test_sft_recipe.py",
    "test_grpo_recipe.py",
    "test_objective.py",
    "test_faults.py",
    "test_readme.py",
    "test_cli.py",
    "test_part_ranks.py",
    "test_interrupt.py",
)
"""Files that take half a minute or more. They come first, so that no process is left alone with one at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if find_spec("vllm") is None:
        reason = "needs vLLM: `make test` installs it where it can, `python tests/install_vllm.py` says why it cannot"
        for item in items:
            if item.get_closest_marker("vllm"):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Last, because a vLLM server may be up then, and others look whether processes are left.
    paths = {item.path for item in items if item.get_closest_marker("vllm")}
    ranks = {name: rank for rank, name in enumerate(LONG)}
    items.sort(key=lambda item: (item.path in paths, ranks.get(item.path.name, len(ranks))))


@pytest.fixture(scope="module", autouse=True)
def same_process(request: pytest.FixtureRequest) -> Iterator[None]:
    """Ends the engine that a module's tests marked `vllm` ran in this process, and undoes what it did to the process."""
    items = [item for item in request.session.items if item.path == request.path]
    if find_spec("vllm") is None or not any(item.get_closest_marker("vllm") for item in items):
        yield
        return
    environ, hook, set_num_threads = dict(os.environ), sys.excepthook, torch.set_num_threads
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if any("vllm_server" in getattr(item, "fixturenames", ()) for item in items):
        request.getfixturevalue("vllm_server_process")  # it takes a minute to start
    yield
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: TID251

    AcceleratorState._reset_state(reset_partial_state=True)  # it may have taken the engine's process group for its own

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
def adding_tools() -> list[dict[str, Any]]:
    """The schemas of `servers/sums.py`."""

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool(SERVERS) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    return anyio.run(schemas)


@pytest.fixture(scope="session")
def adding_model(tmp_path_factory: pytest.TempPathFactory, adding_tools: list[dict[str, Any]]) -> str:
    """Folder of a small policy that has learnt to call the tool of `servers/sums.py`."""
    return save_adding_model(tmp_path_factory.mktemp("adding"), adding_tools)


@pytest.fixture(scope="session")
def wide_adding_model(tmp_path_factory: pytest.TempPathFactory, adding_tools: list[dict[str, Any]]) -> str:
    """The same with heads as wide as vLLM needs them on a CPU."""
    return save_adding_model(tmp_path_factory.mktemp("wide_adding"), adding_tools, head_dim=32)


@pytest.fixture(scope="session")
def vllm_server_process(
    tmp_path_factory: pytest.TempPathFactory, wide_adding_model: str
) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    """A vLLM server of `wide_adding_model` that may not be up yet: its address, process and log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {
        "model": wide_adding_model,
        "served-model-name": "sums",
        "dtype": "float32",
        "max-model-len": 2048,
        "max-num-seqs": 16,
        "kv-cache-memory-bytes": 64 << 20,
        "block-size": 32,
        "logprobs-mode": "processed_logprobs",
        "max-lora-rank": 8,
        "host": "127.0.0.1",
        "port": port,
    }
    options = [f"--{name}={value}" for name, value in settings.items()]
    switches = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    switches |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    log = tmp_path_factory.mktemp("vllm_server") / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager", "--enable-lora", *options],
            env={**os.environ, **switches},
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    yield f"http://127.0.0.1:{port}", process, log
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def vllm_server(vllm_server_process: tuple[str, subprocess.Popen[bytes], Path]) -> str:
    """Address of a vLLM server of `wide_adding_model` that is up."""
    url, process, log = vllm_server_process
    deadline = time.monotonic() + 270
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return url
        except (URLError, OSError):
            time.sleep(0.5)
    pytest.fail(f"The vLLM server is not up: {log.read_text()[-3000:]}")
