"""The phases of a training step: where time and memory go, and what helps where memory runs out."""

import threading
import time
from collections import defaultdict
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from mcp_grpo.errors import OutOfMemoryError


PHASES = {
    "sync": "sending the weights to the sampler",
    "rollout": "sampling and tools",
    "scoring": "rewards, log-probabilities of the old policy and the reference, advantages",
    "loss": "the loss and its backward pass",
    "optimizer": "the optimizer's step",
    "other": "between the phases of a step",
}


class Phases:
    """
    The phases of a training step. Which one is under way is always known, so that an error can say so; seconds and memory
    are measured only once [`measure`] was called, since that waits for the device wherever a phase begins or ends.

    A phase within another one is taken out of it: `"rollout"` has the seconds of a rollout without those of sending the
    weights, `"loss"` those of the loss without those of the batch that is made for it.

    Args:
        settings (`Any`):
            Settings of the run, which the advice of an error goes by.
    """

    def __init__(self, settings: Any) -> None:
        self.is_measuring = False
        self._settings = settings
        self._thread = threading.get_ident()
        self._open: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._peaks: dict[str, int] = defaultdict(int)
        self._asleep = 0
        self._mark = self._start = time.perf_counter()

    def measure(self) -> None:
        """Measure from now on."""
        self.is_measuring = True
        self._turn()
        self._seconds.clear()
        self._start = self._mark

    @contextmanager
    def __call__(self, name: str) -> Generator[None]:
        """Enter a phase, a key of `PHASES`. Running out of memory in it becomes an [`OutOfMemoryError`] with advice."""
        if threading.get_ident() != self._thread:  # such as a rollout ahead, which waits for nobody
            yield
            return
        depth = len(self._open)
        self.begin(name)
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(advice(self._open[-1], self._settings, str(error))) from error
        finally:
            while len(self._open) > depth:
                self.end()

    def begin(self, name: str) -> None:
        """Begin a phase that has no context of its own."""
        self._turn()
        self._open.append(name)

    def end(self) -> None:
        """End the phase that was begun last."""
        self._turn()
        self._open.pop()

    def end_step(self) -> dict[str, float]:
        """
        Return what was measured since the last step: `profile/<phase>_seconds`, `profile/step_seconds` and, on a GPU,
        `profile/<phase>_peak_gib`, the most memory that tensors took, without an engine that slept all the while.
        """
        self._turn()
        total, self._start = self._mark - self._start, self._mark
        self._seconds["other"] = max(0.0, total - sum(s for name, s in self._seconds.items() if name != "other"))
        metrics = {f"profile/{name}_seconds": self._seconds[name] for name in PHASES if name in self._seconds}
        metrics["profile/step_seconds"] = total
        metrics |= {f"profile/{name}_peak_gib": self._peaks[name] / 2**30 for name in PHASES if name in self._peaks}
        self._seconds.clear()
        self._peaks.clear()
        return metrics

    def _turn(self) -> None:
        if not self.is_measuring:
            return
        name = self._open[-1] if self._open else "other"
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            asleep = _asleep()
            peak = torch.cuda.max_memory_allocated() - min(asleep, self._asleep)
            self._peaks[name] = max(self._peaks[name], peak)
            self._asleep = asleep
            torch.cuda.reset_peak_memory_stats()
        now = time.perf_counter()
        self._seconds[name] += now - self._mark
        self._mark = now


def _asleep() -> int:
    """Bytes, at least, that tensors have, but not on the device: those of an engine that sleeps."""
    free, total = torch.cuda.mem_get_info()
    return max(0, torch.cuda.memory_reserved() - (total - free))


def advice(phase: str, settings: Any, reason: str) -> str:
    """Return what to say where memory ran out: the phase, and the two settings that would help most of those not used yet."""
    first, second = remedies(phase, settings)[:2]
    # `accelerate` looks for these words, where it is to find a batch size by itself.
    return (
        f"The GPU ran out of memory. It was in the phase {phase!r} ({PHASES[phase]}). What would help most: {first}; then "
        f"{second}. The device says: {reason.splitlines()[0] if reason else 'nothing'}"
    )


def remedies(phase: str, settings: Any) -> list[str]:
    """Return settings that need less memory in a phase, at least two, those that help most first, without those in use."""
    in_process = settings.use_vllm and settings.vllm_mode == "colocate"
    batch_size, length = settings.per_device_train_batch_size, settings.max_completion_length or 1024
    share = settings.vllm_gpu_memory_utilization
    known = {
        "checkpointing": None
        if settings.gradient_checkpointing
        else "`gradient_checkpointing=True` (activations are computed again instead of being kept)",
        "batch": f"`per_device_train_batch_size={batch_size // 2}` with twice the `gradient_accumulation_steps` (the same "
        "update, half of it at a time)"
        if batch_size > 1
        else None,
        "sleep": "`vllm_enable_sleep_mode=True` (vLLM gives its memory back while the policy trains)"
        if in_process and not settings.vllm_enable_sleep_mode and not settings.max_staleness
        else None,
        "share": f"`vllm_gpu_memory_utilization={share * 0.7:.2f}` (now {share}, of the whole GPU)"
        if in_process
        else None,
        "adapter": '`weight_sync="adapter"`, with an adapter (the model is not merged and sent as a whole)'
        if settings.use_vllm and settings.weight_sync != "adapter"
        else None,
        "concurrent": f"`max_concurrent_trajectories={max(1, (settings.max_concurrent_trajectories or batch_size) // 2)}` "
        "(fewer trajectories share the cache of keys and values)"
        if not settings.use_vllm
        else None,
        "reference": "`beta=0` (no reference)" if settings.beta else None,
        "optimizer": '`optim="paged_adamw_8bit"` (a quarter of the optimizer\'s state)'
        if "8bit" not in str(settings.optim)
        else None,
        "peft": "`use_peft=True` (the optimizer only keeps state of an adapter)",
        "length": f"`max_completion_length={length // 2}`",
        "bits": "`load_in_4bit=True`, with an adapter (the weights take a quarter)",
    }
    order: Mapping[str, str] = {
        "sync": "adapter share sleep",
        "rollout": "share concurrent",
        "scoring": "sleep batch share reference",
        "loss": "checkpointing batch sleep share",
        "optimizer": "sleep peft optimizer share",
        "other": "sleep checkpointing batch share",
    }
    chosen = [known[name] for name in (*order[phase].split(), "length", "bits")]
    return [each for each in chosen if each is not None]


def profile_table(log_history: list[dict[str, Any]], num_skipped: int = 1) -> str:
    """
    Return where the steps of a run went, as a Markdown table.

    Args:
        log_history (`list[dict[str, Any]]`):
            What the trainer logged: `trainer.state.log_history`.
        num_skipped (`int`, *optional*, defaults to `1`):
            Steps at the start that are left out, if there are more: they warm up.

    Returns:
        `str`: The mean seconds of each phase, its share of a step, and its largest peak of memory.
    """
    logs = [entry for entry in log_history if "profile/step_seconds" in entry]
    logs = logs[num_skipped:] or logs
    if not logs:
        return "Nothing was measured."

    def mean(key: str) -> float:
        return sum(entry.get(key, 0.0) for entry in logs) / len(logs)

    total = mean("profile/step_seconds")
    lines = ["| phase | s/step | share | peak, GiB |", "|---|---|---|---|"]
    for name in (*PHASES, "step"):
        peaks = [entry[f"profile/{name}_peak_gib"] for entry in logs if f"profile/{name}_peak_gib" in entry]
        seconds = mean(f"profile/{name}_seconds")
        peak = f"{max(peaks):.2f}" if peaks else "-"
        lines.append(f"| {name} | {seconds:.3f} | {seconds / total:.0%} | {peak} |")
    return "\n".join(lines)
