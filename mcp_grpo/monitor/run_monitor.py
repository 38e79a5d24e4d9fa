"""What is seen of a run while it trains: metrics of each step, its phases, its GPU, and its health."""

import logging
from typing import Any

import torch

from mcp_grpo.learning import TokenMetrics, token_metrics
from mcp_grpo.monitor.gpu import GPUWatch
from mcp_grpo.monitor.health import Health, HealthNote
from mcp_grpo.monitor.phases import Phases


FALLING = "falling_evaluation"  # the sign of ill health that evaluations show

logger = logging.getLogger(__name__)


class RunMonitor:
    """
    Collects the metrics of a step, and says what they mean for the health of the run.

    Args:
        args ([`MCPGRPOConfig`]):
            Settings of the run.
    """

    def __init__(self, args: Any) -> None:
        self.phases = Phases(args)
        self.gpu = GPUWatch()
        self.health = Health(args.on_unhealthy)
        self.seen: dict[str, float] = {}  # of the step at hand
        self._args = args
        self._tokens = TokenMetrics()
        self._entropies: list[float] = []
        self._policy_loss: torch.Tensor | None = None  # of this rank

    def begin_anew(self) -> None:
        """Forget what was seen and said of an earlier run."""
        self.health = Health(self._args.on_unhealthy)

    def add_pass(
        self, sums: dict[str, float], quantiles: dict[str, float], *, policy_loss: torch.Tensor, entropy: float
    ) -> None:
        """Add one pass of the update at hand."""
        self._tokens.add(sums, quantiles)
        self._entropies.append(entropy)
        self._policy_loss = policy_loss if self._policy_loss is None else self._policy_loss + policy_loss

    def end_passes(self, accelerator: Any) -> dict[str, float]:
        """Return the metrics of the passes of an update, over all ranks."""
        metrics, self._tokens = self._tokens.metrics(), TokenMetrics()
        if self._policy_loss is not None:
            metrics["loss/policy"] = accelerator.reduce(self._policy_loss, reduction="mean").item()
            self._policy_loss = None
        return metrics

    def end_step(self) -> dict[str, float]:
        """Return what was measured of the machine since the last step."""
        measured = self.phases.end_step() if self.phases.is_measuring else {}
        return measured | self.gpu.metrics()

    def check_health(self, step: int, *, is_on_policy: bool, is_learning_calls: bool) -> list[HealthNote]:
        """Return what is to be said about the step that has just ended."""
        seen, self.seen = self.seen, {}
        entropies, self._entropies = self._entropies, []
        if entropies:
            seen["entropy"] = sum(entropies) / len(entropies)
        if self._args.kl_target is not None and self._args.beta > 0:
            seen["kl_target"] = self._args.kl_target
        if self._args.constrained_decoding:  # ratios are to what the constraint left, and not 1
            seen.pop("align/score", None)
        if is_learning_calls:
            seen.pop("tools/valid_rate", None)
        return self.health.check(seen, step=step, is_on_policy=is_on_policy)

    def note_fall(self, sentence: str, step: int) -> HealthNote | None:
        """Note, once, that evaluations fall."""
        if any(note.name == FALLING for note in self.health.notes):
            return None
        return self.health.note(FALLING, sentence, step)


def pass_metrics(
    sums: dict[str, float], quantiles: dict[str, float], policy_loss: torch.Tensor, accelerator: Any
) -> dict[str, float]:
    """Return the metrics of one pass of an evaluation, over all ranks."""
    loss = accelerator.reduce(policy_loss, reduction="mean").item()
    return token_metrics(sums) | quantiles | {"loss/policy": loss}
