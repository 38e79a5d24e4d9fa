"""What finished and interrupted runs have learnt, from the evaluations in their folders: one run, or several of the same tasks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import EVALUATIONS_FILE, Judged, read_judged
from mcp_grpo.evaluation.comparison import joint_change, joint_mean
from mcp_grpo.monitor.grid import Grid
from mcp_grpo.monitor.kinds import kinds_grid, stuck_sentence
from mcp_grpo.monitor.report import (
    column_name,
    evaluations_grid,
    learning_sentence,
    points_text,
    reward_text,
    share_text,
)
from mcp_grpo.monitor.results import read_results
from mcp_grpo.monitor.run_file import RUN_FILE


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """
    The evaluations of a run.

    Args:
        name (`str`):
            What to call it.
        evaluations (`Sequence[Judged]`):
            At least one.
        kept_step (`int`, *optional*):
            Step of the policy that was kept; `None` for a run that has not ended.
    """

    name: str
    evaluations: Sequence[Judged]
    kept_step: int | None = None


def read_judged_runs(folders: Sequence[Path]) -> list[JudgedRun]:
    """
    Read the evaluations of runs from their folders.

    Args:
        folders (`Sequence[Path]`):
            Output folders of runs.

    Returns:
        `list[JudgedRun]`: The runs, with what was written until now, named by what tells their folders apart.

    Raises:
        [`SettingsError`]: If one has no evaluations.
    """
    above = os.path.commonpath([folder.resolve().parent for folder in folders])
    return [_read(folder, os.path.relpath(folder.resolve(), above)) for folder in folders]


def _read(folder: Path, name: str) -> JudgedRun:
    evaluations = read_judged(folder / EVALUATIONS_FILE, up_to=10**12)
    if not evaluations:
        raise SettingsError(
            f"There are no evaluations in {folder}. Name the output folder of a run that was judged: with `eval_strategy`, and "
            "`eval_on_start` for how it began."
        )
    return JudgedRun(name=name, evaluations=evaluations, kept_step=kept_step_of(folder))


def kept_step_of(folder: Path) -> int | None:
    """Return the step of the policy that a run has kept; `None` where it has not ended, or has not said so."""
    file = folder / RUN_FILE
    has_ended = file.is_file() and json.loads(file.read_text(encoding="utf-8")).get("state") == "ended"
    return read_results(folder).get("kept_step") if has_ended else None  # until then, it is that of a checkpoint


def learnt(runs: Sequence[JudgedRun]) -> tuple[list[Grid], list[str]]:
    """
    Lay out what was learnt: all evaluations of one run, or several runs beside each other and added up.

    Args:
        runs (`Sequence[JudgedRun]`):
            The runs, at least one; several must have been judged by the same tasks.

    Returns:
        `tuple[list[Grid], list[str]]`: Tables, and sentences on them.

    Raises:
        [`SettingsError`]: If the runs cannot be added up.
    """
    if len(runs) > 1:
        runs = _on_shared_tasks(runs)
        columns = _columns(runs)
        grids = [_runs_grid(runs, columns), kinds_grid(columns)]
        notes = []
    else:
        (run,) = runs
        names = {column_name(each.step, is_kept=each.step == run.kept_step): [each] for each in run.evaluations}
        grids = [evaluations_grid(run.evaluations, run.kept_step), kinds_grid(names)]
        notes = [] if run.kept_step is None else [learning_sentence(run.evaluations, run.kept_step)]
    stuck = stuck_sentence(chain.from_iterable(run.evaluations for run in runs))
    return [grid for grid in grids if grid is not None], [*notes, *([stuck] if stuck else [])]


def _on_shared_tasks(runs: Sequence[JudgedRun]) -> list[JudgedRun]:
    """Return the runs with only the tasks that all of them were judged by."""
    shared = set.intersection(*(set(run.evaluations[0].rewards) for run in runs))
    if not shared:
        raise SettingsError(
            "The runs were judged by different tasks, so they cannot be added up. Name them one at a time."
        )
    return [
        replace(run, evaluations=[found for each in run.evaluations if (found := _only(each, shared)).rewards])
        for run in runs
    ]


def _only(judged: Judged, tasks: set[str]) -> Judged:
    rewards = {task: values for task, values in judged.rewards.items() if task in tasks}
    solved = {task: values for task, values in judged.solved.items() if task in tasks}
    return replace(judged, rewards=rewards, solved=solved)


def _columns(runs: Sequence[JudgedRun]) -> dict[str, list[Judged]]:
    """Return what to show beside each other: the steps at which all runs were judged, their ends, and what they kept."""
    by_step = [{each.step: each for each in run.evaluations} for run in runs]
    steps = sorted(set.intersection(*map(set, by_step)))
    if not steps:
        raise SettingsError("There is no step at which all runs were judged. Name them one at a time.")
    kept = [run.kept_step for run in runs]
    columns = {column_name(step, is_kept=set(kept) == {step}): [found[step] for found in by_step] for step in steps}
    if any(run.evaluations[-1].step != steps[-1] for run in runs):
        columns["last"] = [run.evaluations[-1] for run in runs]
    policies = [found[step] for found, step in zip(by_step, kept, strict=True) if step in found]
    if len(policies) == len(runs) and policies not in columns.values():
        columns["kept"] = policies
    return columns


def _runs_grid(runs: Sequence[JudgedRun], columns: Mapping[str, Sequence[Judged]]) -> Grid:
    """Lay out the success of each run and of all together, or the reward where it is not known what success is."""
    is_known = all(each.solved for judged in columns.values() for each in judged)
    show, show_change = (share_text, points_text) if is_known else (str, reward_text)
    values = [[each.solved if is_known else each.rewards for each in judged] for judged in columns.values()]
    rows = []
    for number, run in enumerate(runs):
        cells = [show(joint_mean([found[number]])) for found in values]
        steps = [_step_beside(judged, number) for judged in columns.values()]
        rows.append((run.name, [cell + step for cell, step in zip(cells, steps, strict=True)]))
    rows.append((f"mean of {len(runs)} runs", [show(joint_mean(found)) for found in values]))
    changes = [joint_change(list(zip(values[0], found, strict=True))) for found in values[1:]]
    if any(changes):
        first = column_name(next(iter(columns.values()))[0].step)
        label = f"{'points' if is_known else 'reward'} since {first}, with 95 % interval"
        rows.append((label, ["", *(show_change(each) if each else "" for each in changes)]))
    return Grid(
        title=f"{'Success' if is_known else 'Reward'} of {len(runs)} runs on {len(values[0][0])} tasks, with 95 % interval",
        columns=list(columns),
        rows=rows,
    )


def _step_beside(evaluations: Sequence[Judged], number: int) -> str:
    """Name the step of an evaluation where those beside it are of others."""
    step = evaluations[number].step
    return "" if all(each.step == step for each in evaluations) else f", step {step}"
