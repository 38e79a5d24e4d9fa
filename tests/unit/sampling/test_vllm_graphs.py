"""What an engine in process is started with: CUDA graphs that it captures, and whether it is to sleep."""

import bisect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

from mcp_grpo.sampling.vllm_backend import VLLMBackend, VLLMSettings, graph_sizes
from mcp_grpo.trl_compat import VLLMGeneration


@pytest.mark.parametrize("max_num_seqs", [1, 8, 64, 100, 512, 4096])
def test_every_step_finds_a_graph_that_is_not_much_larger(max_num_seqs: int) -> None:
    sizes = graph_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == 2048
    assert min(max_num_seqs, 512) in sizes  # all requests at a time
    for num_tokens in range(1, min(max_num_seqs, 512) + 1):
        assert sizes[bisect.bisect_left(sizes, num_tokens)] - num_tokens < 16
    for num_tokens in range(96, 2049):
        assert sizes[bisect.bisect_left(sizes, num_tokens)] <= 1.5 * num_tokens


def _arguments(monkeypatch: pytest.MonkeyPatch, device: str, engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what an engine is started with, which is not started."""
    given: list[Mapping[str, Any]] = []

    @contextmanager
    def noting(arguments: Mapping[str, Any]) -> Iterator[None]:
        given.append(arguments)
        yield

    monkeypatch.setattr("mcp_grpo.sampling.vllm_backend.engine_arguments", noting)
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda _: None)
    backend: Any = object.__new__(VLLMBackend)
    backend.accelerator = SimpleNamespace(distributed_type=DistributedType.NO, device=torch.device(device))
    backend._settings, backend.weight_sync, backend.enable_sleep_mode = VLLMSettings(engine=engine), "merge", False
    backend.max_num_seqs, backend.max_model_length = 64, 128
    backend._init_vllm()
    return given[0]


@pytest.mark.parametrize(("engine", "most"), [({}, 64), ({"max_num_seqs": 160}, 160), ({"max_num_seqs": None}, 512)])
def test_an_engine_captures_those_of_its_requests_at_a_time(
    monkeypatch: pytest.MonkeyPatch, engine: dict[str, Any], most: int
) -> None:
    given = _arguments(monkeypatch, "cuda", engine)["compilation_config"]
    assert given == {"cudagraph_capture_sizes": graph_sizes(most), "cudagraph_specialize_lora": False}


def test_a_choice_of_the_user_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {"cudagraph_capture_sizes": [1, 8]}
    assert _arguments(monkeypatch, "cuda", {"compilation_config": own})["compilation_config"] == own


def test_there_are_none_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "compilation_config" not in _arguments(monkeypatch, "cpu", {})


@pytest.mark.parametrize(("device", "sleeps"), [("cuda", True), ("cpu", False)])
def test_an_engine_sleeps_only_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch, device: str, *, sleeps: bool
) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(VLLMGeneration, "__init__", lambda self, **kwargs: given.update(kwargs))
    accelerator = SimpleNamespace(device=torch.device(device))
    model = SimpleNamespace(config=SimpleNamespace(), dtype=torch.float32)
    VLLMBackend(settings=VLLMSettings(), model=model, mode="colocate", accelerator=accelerator, enable_sleep_mode=True)
    assert given["enable_sleep_mode"] == sleeps
