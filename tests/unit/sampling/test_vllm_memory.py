"""What is said where vLLM finds too little memory to start."""

import pytest

from mcp_grpo.sampling.vllm_backend import memory_problem


# As vLLM says it; only a GPU of the right size would make it say most of these.
NO_CACHE = (
    "No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing the engine."
)
SHORT = "To serve at least one request with the model's max seq len (8192), (0.88 GiB KV cache is needed, which is larger than"
TAKEN = "Free memory on device cuda:0 (20.1/139.8 GiB) on startup is less than desired GPU memory utilization (0.5, 69.9 GiB)."
GIVEN_BACK = "Error in memory profiling. Initial free memory 60.1 GiB, current free memory 71.2 GiB."


@pytest.mark.parametrize(
    ("says", "named"),
    [
        (NO_CACHE, ["raise it", "start them one after another", "`vllm_gpu_memory_utilization` (0.1)"]),
        (SHORT, ["lower `vllm_max_model_length` (8192)", "`vllm_gpu_memory_utilization` (0.1)"]),
        (TAKEN, ["Lower it", "`vllm_gpu_memory_utilization` (0.1)"]),
        (GIVEN_BACK, ["start one after another"]),
    ],
)
def test_settings_are_named_as_they_are_called_here(says: str, named: list[str]) -> None:
    problem = memory_problem(ValueError(says), 0.1, 8192)
    assert problem is not None
    assert all(each in problem for each in named)
    assert says in problem


def test_without_a_length_of_the_run_it_is_the_models_own() -> None:
    problem = memory_problem(ValueError(SHORT), 0.1, None)
    assert problem is not None
    assert "(the model's own length)" in problem


def test_other_errors_are_left_as_they_are() -> None:
    assert memory_problem(ValueError("The tokenizer has no chat template."), 0.1, 8192) is None
