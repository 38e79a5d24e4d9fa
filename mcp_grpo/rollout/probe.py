"""Whether the sampler has the weights that are trained."""

import math
from collections.abc import Sequence

from mcp_grpo.errors import SamplerError


_GROWTH = 10.0  # how much more than at the first time the two may differ
_ALWAYS = 1e-3  # nats per token that they may always differ by


class WeightProbe:
    """
    Compares the log-probabilities of a few held sequences, the sampler's and the trainer's, after weights were sent.

    Weights that are plainly wrong differ by more than the tolerance, or by far more than at the first time, when precision
    was all that differed. Weights that are merely old do not, at first: they are found out by being nearer to what the
    trainer said before its last steps than to what it says now.

    Args:
        tolerance (`float`):
            Largest mean difference, in nats per token, that precision and kernels may make.
    """

    def __init__(self, tolerance: float) -> None:
        self._tolerance = tolerance
        self._noise: float | None = None  # difference at the first time, when nothing can be old
        self._before: Sequence[float] | None = None

    def check(self, sampled: Sequence[float], trained: Sequence[float]) -> float:
        """
        Compare.

        Args:
            sampled (`Sequence[float]`):
                The sampler's log-probabilities.
            trained (`Sequence[float]`):
                The trainer's, of the same tokens.

        Returns:
            `float`: The mean absolute difference.

        Raises:
            [`SamplerError`]: If the sampler has other weights than the trainer.
        """
        mismatch = _distance(sampled, trained)
        before, self._before = self._before, trained
        noise = self._noise = mismatch if self._noise is None else self._noise
        limit = min(self._tolerance, max(_ALWAYS, _GROWTH * noise))
        if not mismatch <= limit:  # and not if it is nan
            raise SamplerError(
                f"After the weights were sent, the sampler's log-probabilities differ from the trainer's by {mismatch:.3g} "
                f"nats per token, {noise:.3g} at first; the limit is {limit:.3g} (`weight_sync_tolerance` is "
                f"{self._tolerance:g}). It samples from another model than the one that is trained. Check that vLLM was "
                "started with the same base model and precision, without quantisation that the trainer does not have, and "
                "that no other run has changed its weights; if in doubt, restart it."
            )
        if before is None or mismatch <= 2 * noise:
            return mismatch
        moved, stale = _distance(trained, before), _distance(sampled, before)
        if moved > 2 * noise and stale < mismatch:
            raise SamplerError(
                f"The sampler still has old weights: it is {stale:.3g} nats per token away from what the policy was before "
                f"its last steps, and {mismatch:.3g} from what it is now. The weights were not taken over; restart vLLM and "
                "resume the run."
            )
        return mismatch


def farthest(sampled: Sequence[Sequence[float]], trained: Sequence[float]) -> Sequence[float]:
    """
    The log-probabilities, of several engines or servers, that are farthest from the trainer's.

    Args:
        sampled (`Sequence[Sequence[float]]`):
            Those of each.
        trained (`Sequence[float]`):
            The trainer's, of the same tokens.

    Returns:
        `Sequence[float]`: One of `sampled`. One that is not a number is as far as can be.
    """
    return max(sampled, key=lambda each: (math.isnan(distance := _distance(each, trained)), distance))


def _distance(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(left, right, strict=True)) / len(left)
