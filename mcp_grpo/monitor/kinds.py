"""What a run has learnt, kind of task by kind of task."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean

from mcp_grpo.evaluation import Judged
from mcp_grpo.monitor.grid import Grid
from mcp_grpo.monitor.report import before_kept_last, column_name
from mcp_grpo.tasks.rows import few


MAX_KINDS = 40  # with more, tasks are named rather than their kinds
MAX_NAMED = 12  # in a sentence
MIN_ATTEMPTS = 4  # at tasks of a kind, before it is said that none succeeds


def kinds_of(evaluations: Iterable[Judged]) -> dict[str, str]:
    """Return the kind of each task that says it; none where there are too many for a table."""
    kinds = {task: kind for each in evaluations for task, kind in each.kinds.items()}
    return kinds if len(set(kinds.values())) <= MAX_KINDS else {}


def kinds_report(evaluations: Sequence[Judged], kept_step: int) -> Grid | None:
    """
    Lay out before training, the policy that was kept, and the end, kind of task by kind of task.

    Args:
        evaluations (`Sequence[Judged]`):
            Those of the run, at least one.
        kept_step (`int`):
            Step of the policy that was kept.

    Returns:
        [`Grid`], *optional*: Its `table()` can be printed with `rich.print`. `None` where there are fewer than two kinds.
    """
    shown = before_kept_last(evaluations, kept_step)
    return kinds_grid({column_name(each.step, is_kept=each.step == kept_step): [each] for each in shown})


def kinds_grid(columns: Mapping[str, Sequence[Judged]]) -> Grid | None:
    """
    Lay out success kind by kind, or the reward where it is not known what success is; what rose most comes first. Attempts that ran out
    of turns or tokens are told of.

    Args:
        columns (`Mapping[str, Sequence[Judged]]`):
            For each column the evaluations that are added up in it: that of a step, of one or several runs.

    Returns:
        [`Grid`], *optional*: `None` where there are fewer than two kinds.
    """
    every = list(chain.from_iterable(columns.values()))
    kinds = kinds_of(every)
    if len(set(kinds.values())) < 2:
        return None
    is_known = any(each.solved for each in every)
    found = [_by_kind(judged, kinds, is_known=is_known) for judged in columns.values()]
    names = sorted(set().union(*found), key=lambda kind: _rank(kind, found))
    show = _count if is_known else _mean
    cut = [_cut(judged, kinds) for judged in columns.values()]
    rows = [
        (
            kind,
            [_cell(show(own[kind]), lost[kind]) if kind in own else "" for own, lost in zip(found, cut, strict=True)],
        )
        for kind in names
    ]
    title = "Attempts that succeeded" if is_known else "Reward"
    return Grid(title=f"{title}, by kind of task", head="kind", columns=list(columns), rows=rows)


def stuck_sentence(evaluations: Iterable[Judged]) -> str | None:
    """
    Name the kinds of tasks at which no attempt ever succeeded.

    Args:
        evaluations (`Iterable[Judged]`):
            Those of one or several runs.

    Returns:
        `str`, *optional*: A sentence; `None` where there is no such kind, or it is not known what success is.
    """
    evaluations = list(evaluations)
    found = _by_kind(evaluations, kinds_of(evaluations), is_known=True)
    stuck = [f"`{kind}`" for kind, values in sorted(found.items()) if len(values) >= MIN_ATTEMPTS and not any(values)]
    if not stuck:
        return None
    return (
        f"No attempt at {few(stuck, MAX_NAMED)} succeeded in any evaluation: see whether the limits allow their solutions, and "
        "whether they are too hard."
    )


def _by_kind(
    evaluations: Sequence[Judged], kinds: Mapping[str, str], *, is_known: bool
) -> dict[str, list[float] | list[bool]]:
    """Return whether each attempt succeeded, or where that is not known, the rewards, by kind."""
    found = defaultdict(list)
    for each in evaluations:
        for task, values in (each.solved if is_known else each.rewards).items():
            if task in kinds:
                found[kinds[task]] += values
    return found


def _cut(evaluations: Sequence[Judged], kinds: Mapping[str, str]) -> Counter[str]:
    """Count the attempts that ran out of turns or tokens, by kind."""
    found = Counter[str]()
    for each in evaluations:
        for task, number in each.cut.items():
            if task in kinds:
                found[kinds[task]] += number
    return found


def _cell(shown: str, num_cut: int) -> str:
    return f"{shown}, {num_cut} cut" if num_cut else shown


def _rank(kind: str, found: Sequence[Mapping[str, Sequence[float]]]) -> tuple[float, float, str]:
    """Return what kinds are sorted by: what they have gained, then where they are, then their names."""
    means = [fmean(values[kind]) for values in found if kind in values]
    return means[0] - means[-1], -means[-1], kind


def _count(values: Sequence[float]) -> str:
    return f"{sum(values):.0f} of {len(values)}"


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}"
