"""CUDA graphs that an engine in process captures."""

import bisect
from types import SimpleNamespace
from typing import Any

import pytest

from mcp_grpo.sampling.vllm_backend import VLLMBackend, VLLMSettings, graph_sizes


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


class _NoEngine(VLLMBackend):
    """A backend whose engine is not started."""

    def __init__(self, device: str, engine: dict[str, Any]) -> None:
        self.accelerator = SimpleNamespace(device=SimpleNamespace(type=device))
        self.max_num_seqs = 64
        self._settings = VLLMSettings(engine=engine)


@pytest.mark.parametrize(("engine", "most"), [({}, 64), ({"max_num_seqs": 160}, 160), ({"max_num_seqs": None}, 512)])
def test_graphs_are_those_of_the_requests_at_a_time(engine: dict[str, Any], most: int) -> None:
    given = _NoEngine("cuda", engine)._gpu_arguments()["compilation_config"]
    assert given == {"cudagraph_capture_sizes": graph_sizes(most), "cudagraph_specialize_lora": False}
