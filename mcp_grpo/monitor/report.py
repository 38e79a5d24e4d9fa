"""What a run has learnt, said at its end."""

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from rich.table import Table

from mcp_grpo.evaluation import Interval, Judged, best_of, change
from mcp_grpo.evaluation.comparison import success_change
from mcp_grpo.monitor.grid import Grid
from mcp_grpo.monitor.health import HealthNote


# Metrics of an evaluation that say how tasks were attempted, and how to call them.
ROWS = {
    "stop/answered": "ended with an answer",
    "stop/max_tokens": "cut by length",
    "stop/max_turns": "cut by turns",
    "tools/call_frequency": "calls per attempt",
    "tools/valid_rate": "calls that could be made",
    "entropy": "entropy",
}
TENTH = 10  # part of a run's steps that its start and its end are averaged over


def learning_table(evaluations: Sequence[Judged], kept_step: int) -> Table:
    """
    Lay out the evaluations before training, at its best, and at its end, side by side.

    Args:
        evaluations (`Sequence[Judged]`):
            Those of the run, at least one.
        kept_step (`int`):
            Step of the policy that was kept.

    Returns:
        `rich.table.Table`: Print it with `rich.print`.
    """
    return evaluations_grid(before_kept_last(evaluations, kept_step), kept_step).table()


def evaluations_grid(evaluations: Sequence[Judged], kept_step: int | None) -> Grid:
    """
    Lay out evaluations of a run side by side, each with what has changed since the first one.

    Args:
        evaluations (`Sequence[Judged]`):
            Which ones, at least one.
        kept_step (`int`, *optional*):
            Step of the policy that was kept, where that is known.

    Returns:
        [`Grid`]: A column for each.
    """
    first, rows = evaluations[0], learning_rows(evaluations)
    if (changes := change_row(evaluations)) is not None:
        rows.insert(2 if any(each.solved for each in evaluations) else 1, changes)  # below what it is a change of
    num_tasks = len(first.rewards)
    return Grid(
        title=f"{num_tasks} tasks to judge by, {first.num_attempts / max(1, num_tasks):.3g} attempts each",
        columns=[column_name(each.step, is_kept=each.step == kept_step) for each in evaluations],
        rows=rows,
    )


def before_kept_last(evaluations: Sequence[Judged], kept_step: int) -> list[Judged]:
    """Return the evaluations before training, of the policy that was kept, and at the end, each once."""
    ends = (evaluations[0], kept_of(evaluations, kept_step), evaluations[-1])
    return list({id(each): each for each in ends}.values())


def column_name(step: int, *, is_kept: bool = False) -> str:
    """Return how to call the evaluation of a step."""
    name = "before" if step == 0 else f"step {step}"
    return f"{name}, kept" if is_kept else name


def change_row(evaluations: Sequence[Judged]) -> tuple[str, list[str]] | None:
    """
    Return how each evaluation differs from the first one on the tasks that both have: in success where that is known, else in the
    reward; `None` where there is nothing to compare.
    """
    first, others = evaluations[0], evaluations[1:]
    since = f"since {column_name(first.step)}, with 95 % interval"
    if first.solved:
        label, gains, show = f"points {since}", [success_change(first, each) for each in others], points_text
    else:
        label, gains, show = f"reward {since}", [change(first, each) for each in others], reward_text
    if not any(gains):
        return None
    return label, ["", *(show(gain) if gain else "" for gain in gains)]


def learning_rows(evaluations: Sequence[Judged]) -> list[tuple[str, list[str]]]:
    """Return what is shown of evaluations: a label, and a text for each of them."""
    rows = [("reward, with 95 % interval", [str(each.reward) for each in evaluations])]
    successes = [each.success for each in evaluations]
    if any(successes):
        rows.insert(0, ("success, with 95 % interval", [share_text(each) if each else "" for each in successes]))
    parts = [name for name in evaluations[0].metrics if name.startswith("rewards/") and name.endswith("/mean")]
    # The only reward function there is has nothing to add.
    parts = [
        name for name in parts if any(each.metrics.get(name) != each.metrics.get("reward") for each in evaluations)
    ]
    labels = {name: f"  {name.removeprefix('rewards/').removesuffix('/mean')}" for name in parts}
    for name, label in (labels | ROWS).items():
        if any(name in each.metrics for each in evaluations):
            values = [each.metrics.get(name) for each in evaluations]
            rows.append((label, ["" if value is None else f"{value:.3f}" for value in values]))
    return rows


def share_text(share: Interval) -> str:
    """Return a share with its interval, in words."""
    return f"{share.mean:.1%} ({share.low:.1%} to {share.high:.1%})"


def points_text(change: Interval) -> str:
    """Return a change of a share with its interval, in percentage points."""
    mean, low, high = (100 * each for each in (change.mean, change.low, change.high))
    return f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def reward_text(change: Interval) -> str:
    """Return a change of the reward with its interval."""
    return f"{change.mean:+.3f} ({change.low:+.3f} to {change.high:+.3f})"


def learning_sentence(evaluations: Sequence[Judged], kept_step: int) -> str:
    """
    Say whether a policy has learnt, and whether that may be chance.

    Args:
        evaluations (`Sequence[Judged]`):
            Those of the run.
        kept_step (`int`):
            Step of the policy that was kept.

    Returns:
        `str`: A sentence or two.
    """
    trained = [each for each in evaluations if each.step > 0]
    if not trained or evaluations[0].step > 0:
        return (
            "What was learnt is not known: the policy was not evaluated both before and after. Set `eval_strategy` and "
            "`eval_on_start`."
        )
    before, kept = evaluations[0], kept_of(evaluations, kept_step)
    gain = change(before, kept)
    if gain is None:
        return "What was learnt is not known: there are fewer than two tasks to judge by."
    words = f"from before training to step {kept.step}, the reward changed by {_signed(gain)}"
    if gain.low == gain.high == 0:
        sentence = f"Nothing was learnt: at step {kept.step}, the reward of every task is what it was before training."
    elif gain.low > 0:
        sentence = _risen(before, kept, words)
    elif gain.high < 0:
        sentence = f"It got worse: {words}. The policy as it was before training is the better one."
    else:
        sentence = (
            f"Nothing is shown: {words}, which may be chance. More steps, or more tasks to judge by, would tell."
        )
    success = success_change(before, kept)
    if gain.low <= 0 <= gain.high and success is not None and success.high < 0:
        sentence += (
            f" Success got worse all the same, by {_signed(success)}: the reward does not pay for what the tasks ask."
        )
    if len(trained) > 2 and gain.low > 0:
        sentence += f" Step {kept.step} was chosen among {len(trained)} evaluations by this figure, which flatters it a little."
    last = trained[-1]
    fall = change(best_of(trained), last)
    if fall is not None and fall.high < 0:
        sentence += f" It fell after step {best_of(trained).step}: by {_signed(fall)} until step {last.step}."
    return sentence


def _risen(before: Judged, kept: Judged, words: str) -> str:
    """Say what a policy learnt whose reward has risen: that need not be what its tasks ask."""
    success = success_change(before, kept)
    if _gave_tools_up(before, kept):
        return (
            f"It learnt to leave its tools alone, not to use them: {words}, as calls that cannot be made cost it no more. "
            "Warm it up on solutions first (`recipes/sft_warmup.py`), or pay for calls that can be made."
        )
    if success is None or success.low > 0:
        return f"It learnt: {words}."
    if kept.success is not None and kept.success.mean == 1:
        return f"It learnt to earn more: {words}. It does all tasks, as it did before."
    if success.high <= 0:
        return (
            f"It learnt to earn more without doing more tasks: {words}, and success by {_signed(success)}. Look at what it does "
            "(`mcp-grpo dashboard`), and pay for what the tasks ask."
        )
    return f"It learnt to earn more: {words}. That it does more tasks is not shown: success changed by {_signed(success)}."


def training_sentence(log_history: Sequence[dict[str, Any]]) -> str:
    """
    Say how the reward of training moved, for a run that was not evaluated.

    Args:
        log_history (`Sequence[dict[str, Any]]`):
            What the trainer logged: `trainer.state.log_history`.

    Returns:
        `str`: A sentence.
    """
    rewards = [entry["reward"] for entry in log_history if entry.get("reward") is not None]
    if len(rewards) < 2:
        return "The run was too short to say what it learnt."
    part = max(1, len(rewards) // TENTH)
    return (
        f"Reward of training: {fmean(rewards[:part]):.3f} at the start, {fmean(rewards[-part:]):.3f} at the end (of {part} logged "
        f"{'steps' if part > 1 else 'step'} each). Other tasks may be harder: set `eval_strategy` and tasks to judge by."
    )


def health_lines(notes: Sequence[HealthNote]) -> list[str]:
    """
    List what was said about the run's health.

    Args:
        notes (`Sequence[HealthNote]`):
            The notes.

    Returns:
        `list[str]`: A line each, with its step; one line that says so if there are none.
    """
    if not notes:
        return ["Health: nothing was found wrong."]
    return [f"Health, step {note.step}: {note.sentence}" for note in notes]


def _gave_tools_up(before: Judged, kept: Judged) -> bool:
    """Return whether a policy called tools, and hardly does any more."""
    first, last = (each.metrics.get("tools/call_frequency") for each in (before, kept))
    return first is not None and last is not None and last < first / TENTH


def kept_of(evaluations: Sequence[Judged], step: int) -> Judged:
    """Return the evaluation of the policy that was kept."""
    return next((each for each in reversed(evaluations) if each.step == step), evaluations[-1])


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} (95 % interval {interval.low:+.3f} to {interval.high:+.3f})"
