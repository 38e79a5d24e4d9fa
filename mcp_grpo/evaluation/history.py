"""The evaluations of a run, and whether the policy does worse than it did before."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch

from mcp_grpo.evaluation.comparison import (
    EVALUATIONS_FILE,
    Judged,
    best_of,
    change,
    read_judged,
    write_judged,
)


class EvaluationHistory:
    """
    The evaluations of a run, kept in `evaluations.jsonl` of its folder.

    Args:
        folder (`Path`):
            Output folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.all: list[Judged] = []
        self._file = folder / EVALUATIONS_FILE
        self._rewards: dict[str, list[float]] = defaultdict(list)  # of the evaluation under way, by task
        self._solved: dict[str, list[bool]] = defaultdict(list)
        self._kinds: dict[str, str] = {}
        self._cut = Counter[str]()
        self.batch_sizes: list[int] = []  # attempts in each batch of it

    def begin(self) -> None:
        """Forget an evaluation that was not ended."""
        self._rewards.clear()
        self._solved.clear()
        self._kinds.clear()
        self._cut.clear()
        self.batch_sizes.clear()

    def add(
        self,
        task_ids: Sequence[str],
        rewards: torch.Tensor,
        weights: torch.Tensor,
        solved: Sequence[bool] = (),
        kinds: Sequence[str | None] = (),
        cut: Sequence[bool] = (),
    ) -> None:
        """
        Add the rewards of a batch, of shape `(N, F)`, of all processes, NaN where there is none; and where it is known, whether
        each attempt did its task, what kind of task that was, and whether it ran out of turns or tokens.
        """
        self.batch_sizes.append(len(task_ids))
        totals = (rewards * weights.to(rewards.device)).nansum(dim=1).tolist()
        is_judged = (~rewards.isnan().all(dim=1)).tolist()
        for task_id, total, counts in zip(task_ids, totals, is_judged, strict=True):
            if counts:
                self._rewards[task_id].append(total)
        for task_id, is_done, counts in zip(task_ids, solved, is_judged, strict=False):
            if counts:
                self._solved[task_id].append(is_done)
        self._kinds |= {task_id: kind for task_id, kind in zip(task_ids, kinds, strict=False) if kind is not None}
        # Also those that are left out as they were cut.
        self._cut.update(each for each, is_cut in zip(task_ids, cut, strict=False) if is_cut)

    def end(self, step: int, metrics: dict[str, float]) -> Judged | None:
        """Return the evaluation that has just ended, if it is the first one of this step."""
        rewards, solved, cut = dict(self._rewards), dict(self._solved), dict(self._cut)
        kinds = {task_id: kind for task_id, kind in self._kinds.items() if task_id in rewards or task_id in cut}
        self.begin()  # of several datasets, the first to be evaluated is the one that counts
        if not rewards or any(each.step == step for each in self.all):
            return None
        return Judged(step=step, rewards=rewards, metrics=metrics, solved=solved, kinds=kinds, cut=cut)

    def keep(self, judged: Judged, *, is_main: bool) -> None:
        """Add an evaluation, and write all of them on the main process."""
        self.all.append(judged)
        if is_main:
            write_judged(self.all, self._file)

    def load(self, up_to: int) -> None:
        """Go on from the evaluations of an earlier run, up to a step."""
        self.all = read_judged(self._file, up_to=up_to)

    def fall(self, judged: Judged, *, is_best_kept: bool) -> str | None:
        """Return what to say if a policy does worse on the same tasks than it did before, by more than chance."""
        if not self.all:
            return None
        best = best_of(self.all)
        fall = change(best, judged)
        if fall is None or fall.high >= 0:
            return None
        kept = f" The policy of step {best.step} is kept." if is_best_kept and best.step else ""
        return (
            f"The policy does worse on the tasks it is judged by: reward {best.reward.mean:.3f} at step {best.step}, "
            f"{judged.reward.mean:.3f} now (change {fall.mean:+.3f}, 95 % interval {fall.low:+.3f} to {fall.high:+.3f}).{kept} "
            "Lower `learning_rate`, raise `beta`, train on more tasks, or end the run earlier."
        )
