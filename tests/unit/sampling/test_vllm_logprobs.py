"""Log-probabilities that vLLM returns are those of the tokens that it sampled."""

from types import SimpleNamespace

import pytest

from mcp_grpo.errors import SamplerError
from mcp_grpo.sampling import Sampling
from mcp_grpo.sampling.vllm_generator import _sampled_logprobs


SAMPLING = Sampling(max_tokens=8, seed=0, trajectory=0)


def test_each_token_has_its_own() -> None:
    flat = SimpleNamespace(token_ids=[5, 7], logprobs=[-0.5, -1.5])
    assert _sampled_logprobs((5, 7), flat, SAMPLING) == (-0.5, -1.5)


@pytest.mark.parametrize("token_ids", [[5], [5, 8], [5, 6, 7]])
def test_those_of_other_tokens_are_refused(token_ids: list[int]) -> None:
    flat = SimpleNamespace(token_ids=token_ids, logprobs=[-0.5] * len(token_ids))
    with pytest.raises(SamplerError, match="other tokens than it sampled"):
        _sampled_logprobs((5, 7), flat, SAMPLING)
