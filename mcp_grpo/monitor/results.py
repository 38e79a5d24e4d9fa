"""Results of a run before and after training, as the card, the report and `results.json` have them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mcp_grpo.evaluation import Evaluation, Judged, compare, comparison_rows
from mcp_grpo.evaluation.report import Comparison
from mcp_grpo.evaluation.statistics import mean_difference
from mcp_grpo.monitor.report import kept_of, learning_rows, learning_sentence, share_text


RESULTS_FILE = "results.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """A table of what was measured before and after training, and sentences on it."""

    title: str = ""
    rows: Sequence[tuple[str, str, str]] = ()
    notes: Sequence[str] = ()

    @classmethod
    def of_evaluations(cls, before: Evaluation, after: Evaluation, title: str) -> "Results":
        """Compare two evaluations of the same tasks."""
        success = ("success, with 95 % interval", share_text(before.interval), share_text(after.interval))
        others = [(name, f"{first:.2f}", f"{last:.2f}") for name, first, last in comparison_rows(before, after)[1:]]
        num_failed = before.num_failed + after.num_failed
        failed = f", {num_failed} of them failed by a server and not counted" if num_failed else ""
        size = f"{after.num_tasks} tasks, {before.num_trajectories} attempts before and {after.num_trajectories} after{failed}."
        notes = (size, compare(before, after).sentence("The trained policy"))
        return cls(title=title, rows=(success, *others), notes=notes)

    @classmethod
    def of_metrics(cls, before: Mapping[str, float], after: Mapping[str, float], title: str) -> "Results":
        """Put metrics side by side."""
        rows = [(name, f"{before[name]:.2f}", f"{after[name]:.2f}") for name in before if name in after]
        return cls(title=title, rows=rows)

    @classmethod
    def of_run(cls, evaluations: Sequence[Judged], kept_step: int) -> "Results":
        """Compare the first evaluation with that of the policy that was kept; empty where there is only one."""
        if len(evaluations) < 2:
            return cls()
        before, kept = evaluations[0], kept_of(evaluations[1:], kept_step)
        rows = [(label, first, last) for label, (first, last) in learning_rows([before, kept])]
        per_task = before.num_attempts / max(1, len(before.rewards))
        notes = [
            f"{len(before.rewards)} tasks, {per_task:.3g} attempts each, at step {before.step} and at step {kept.step}."
        ]
        notes += [learning_sentence(evaluations, kept_step)] if before.step == 0 else []
        if before.solved and kept.solved:
            num_shared = len(before.solved.keys() & kept.solved.keys())
            gain = Comparison(num_tasks=num_shared, gain=mean_difference(before.solved, kept.solved))
            notes.append(f"By success: {gain.sentence('the trained policy')}")
        return cls(title="On the tasks to judge by:", rows=rows, notes=notes)

    def with_baselines(self, baselines: Mapping[str, float]) -> "Results":
        """Add what others score on the same tasks."""
        if not self.rows or not baselines:
            return self
        scores = ", ".join(f"{name} {value:.1%}" for name, value in baselines.items())
        return replace(self, notes=(*self.notes, f"Success of others on the same tasks: {scores}."))


def write_results(folder: Path, content: Mapping[str, Any]) -> None:
    """Write `results.json` into the folder of a run."""
    (folder / RESULTS_FILE).write_text(json.dumps(content, indent=2, default=str) + "\n")


def read_results(folder: Path) -> dict[str, Any]:
    """Read `results.json` from the folder of a run; return nothing if it is not there."""
    file = folder / RESULTS_FILE
    return json.loads(file.read_text()) if file.is_file() else {}


def results_content(
    results: Results, evaluations: tuple[Evaluation, Evaluation] | None, **facts: Any
) -> dict[str, Any]:
    """Return what `results.json` holds."""
    before, after = evaluations or (None, None)
    measured = {"before": before and asdict(before), "after": after and asdict(after)}
    return {"results": asdict(results), **measured, **facts}
