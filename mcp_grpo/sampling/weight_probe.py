"""Check that the sampler has the weights that are trained."""

import math
from collections.abc import Sequence

from mcp_grpo.errors import SamplerError


_GROWTH = 10.0  # allowed difference, as a multiple of the first one
TOLERANCE = 0.1  # nats per token
_ALWAYS = 1e-3  # nats per token that are always allowed


class WeightProbe:
    """
    Compares the sampler's and the trainer's log-probabilities of a few held-out sequences after weights were sent.

    Wrong weights differ by more than `TOLERANCE` or by far more than at the first time, when only
    precision differed. Stale weights may not, at first; they are nearer to what the trainer said before its last steps than
    to what it says now.
    """

    def __init__(self) -> None:
        self._noise: float | None = None  # the first difference, when nothing can be stale
        self._before: Sequence[float] | None = None

    def check(self, sampled: Sequence[float], trained: Sequence[float]) -> float:
        """Return the mean absolute difference; raises [`SamplerError`] if the sampler has other weights, or one of the two no numbers."""
        _check_numbers(
            "sampler",
            sampled,
            "run vLLM without graphs (`--vllm_engine_kwargs '{\"enforce_eager\": true}'`; `--enforce-eager` of a server)",
        )
        _check_numbers(
            "trainer", trained, "load the model with `dtype` float32, or with another `attn_implementation`"
        )
        mismatch = _distance(sampled, trained)
        before, self._before = self._before, trained
        noise = self._noise = mismatch if self._noise is None else self._noise
        limit = min(TOLERANCE, max(_ALWAYS, _GROWTH * noise))
        if mismatch > limit:
            raise SamplerError(
                f"After the weights were sent, the sampler's log-probabilities differ from the trainer's by {mismatch:.3g} "
                f"nats per token, {noise:.3g} at first; the limit is {limit:.3g}. It samples "
                "from another model than the one that is trained. Check that vLLM was "
                "started with the same base model, precision and quantisation, and that no other run has changed its "
                "weights; if in doubt, restart it."
            )
        if before is None or mismatch <= 2 * noise:
            return mismatch
        moved, stale = _distance(trained, before), _distance(sampled, before)
        if moved > 2 * noise and stale < mismatch:
            raise SamplerError(
                f"The sampler still has old weights: it is {stale:.3g} nats per token away from what the policy was before "
                f"its last steps, and {mismatch:.3g} from what it is now. vLLM did not load the new weights; restart it and "
                "resume the run."
            )
        return mismatch

    def beyond_noise(self, mismatch: float) -> float:
        """Return what of a difference is not numerical noise: the first one was, when the same weights had just been loaded."""
        return max(0.0, mismatch - (self._noise or 0.0))


def farthest(sampled: Sequence[Sequence[float]], trained: Sequence[float]) -> Sequence[float]:
    """Return the log-probabilities, of several engines, that are farthest from the trainer's; NaN is farthest."""
    return max(sampled, key=lambda each: (math.isnan(distance := _distance(each, trained)), distance))


def _check_numbers(whose: str, logps: Sequence[float], trial: str) -> None:
    """Say whose log-probabilities are no numbers, and what to try."""
    num_finite = sum(map(math.isfinite, logps))
    if num_finite < len(logps):
        raise SamplerError(
            f"{len(logps) - num_finite} of the {whose}'s {len(logps)} log-probabilities of held tokens are not finite. Either weights "
            f"are not, which a warm start at too high a learning rate may have done, or a kernel fails on this GPU: {trial}, and run "
            "it alone on the GPU, without a limit of MPS."
        )


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
