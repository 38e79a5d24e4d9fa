"""Fixtures of all tests. They are not in `conftest.py`, so that a process which only hands tests out need not import this."""

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from filelock import FileLock

from helpers.sums import save_adding_model
from helpers.vllm_server import VLLMServer, serve_sums
from mcp_grpo import ToolPool
from mcp_grpo.tools.sessions import breaker
from mcp_grpo.types import Task


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


@pytest.fixture(scope="module", autouse=True)
def own_precision() -> None:
    """Takes from an accelerator that a test makes the mixed precision that another module's had."""
    AcceleratorState._reset_state()


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small are slower on more threads."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the pauses between attempts to start a server short."""
    monkeypatch.setattr(breaker, "FIRST_DELAY", 0.01)
    monkeypatch.setattr(breaker, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(breaker, "MAX_PAUSE", 0.2)


@pytest.fixture(scope="module")
def undrawn() -> Iterator[None]:
    """Leaves out the curves on cards, which take longer to draw than the steps of a small run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mcp_grpo.publishing.publisher.plot_curves", lambda *args: None)
        yield


@pytest.fixture
def make_task() -> Callable[..., Task]:
    """Makes tasks about nothing."""

    def make(task_id: str = "t", **fields: Any) -> Task:
        return Task(task_id=task_id, prompt=({"role": "user", "content": "?"},), **fields)

    return make


@pytest.fixture(scope="session")
def adding_tools() -> list[dict[str, Any]]:
    """The schemas of `servers/sums.py`."""

    from servers.sums import server  # where it is imported first, it sets up logging

    async def schemas() -> list[dict[str, Any]]:
        async with ToolPool({"sums": server}) as pool:
            return [tool.schema for tool in pool.catalog.tools]

    return anyio.run(schemas)


def shared(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> str:
    """Return a folder that is made once, also where several processes share the tests."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            make(folder.with_suffix(".new"))
            folder.with_suffix(".new").rename(folder)
    return str(folder)


@pytest.fixture(scope="session")
def adding_model(tmp_path_factory: pytest.TempPathFactory, adding_tools: list[dict[str, Any]]) -> str:
    """Folder of a small policy that has learnt to call the tool of `servers/sums.py`."""
    return shared(tmp_path_factory, "adding", lambda folder: save_adding_model(folder, adding_tools))


@pytest.fixture(scope="session")
def fenced_adding_model(tmp_path_factory: pytest.TempPathFactory, adding_tools: list[dict[str, Any]]) -> str:
    """Folder of one that has learnt to call it in blocks of fenced JSON."""
    return shared(
        tmp_path_factory, "fenced_adding", lambda folder: save_adding_model(folder, adding_tools, call_format="json")
    )


@pytest.fixture(scope="session")
def wide_adding_model(tmp_path_factory: pytest.TempPathFactory, adding_tools: list[dict[str, Any]]) -> str:
    """The same with heads as wide as vLLM needs them on a CPU."""
    return shared(
        tmp_path_factory,
        "wide_adding",
        lambda folder: save_adding_model(folder, adding_tools, is_short=False, head_dim=32),
    )


@pytest.fixture(scope="session")
def vllm_server_process(tmp_path_factory: pytest.TempPathFactory, wide_adding_model: str) -> Iterator[VLLMServer]:
    """A vLLM server of `wide_adding_model` that may not be up yet."""
    with serve_sums(wide_adding_model, tmp_path_factory.mktemp("vllm_server") / "log.txt") as server:
        yield server


@pytest.fixture(scope="session")
def vllm_server(vllm_server_process: VLLMServer) -> str:
    """Address of a vLLM server of `wide_adding_model` that is up."""
    return vllm_server_process.wait()


@pytest.fixture
def scorings(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that trainers ran over a batch before its loss did, as they do."""
    from mcp_grpo.trl_compat import GRPOTrainer

    found, run = [], GRPOTrainer._get_per_token_logps_and_entropies

    @wraps(run)
    def counted(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            found.append(model)
        return run(self, model, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_get_per_token_logps_and_entropies", counted)
    return found
