"""How well a policy does its tasks, and how much better than before."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.table import Table

from mcp_grpo.learning import trajectory_metrics
from mcp_grpo.rewards import is_answered
from mcp_grpo.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """
    What a policy did on a set of tasks.

    Args:
        success (`float`):
            Share of trajectories that did their task. Those that a server failed do not count.
        success_by_difficulty (`dict[str, float]`):
            The same, for each `difficulty` that the tasks name.
        valid_calls (`float`):
            Share of tool calls that could be made; 0 if there were none.
        calls (`float`):
            Tool calls per trajectory.
        turns (`float`):
            Turns per trajectory.
        num_trajectories (`int`):
            How many there were.
        num_failed (`int`):
            How many of them a server failed.
    """

    success: float
    success_by_difficulty: dict[str, float]
    valid_calls: float
    calls: float
    turns: float
    num_trajectories: int
    num_failed: int


def evaluate(trajectories: Sequence[Trajectory], is_success: Callable[[Trajectory], bool] = is_answered) -> Evaluation:
    """
    Sum up a set of trajectories.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Finished trajectories, such as [`MCPGRPOTrainer.roll_out`] returns.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task; whether it gave the task's answer, if not given.

    Returns:
        [`Evaluation`]: The figures.
    """
    counted = [trajectory for trajectory in trajectories if not trajectory.is_failed]
    if not counted:
        raise ValueError(f"There is nothing to evaluate: of {len(trajectories)} trajectories all failed.")
    outcomes: dict[str, list[bool]] = defaultdict(list)
    for trajectory in counted:
        outcomes[trajectory.task.difficulty or ""].append(is_success(trajectory))
    metrics = {key: ratio.total / max(1, ratio.count) for key, ratio in trajectory_metrics(counted).items()}
    return Evaluation(
        success=sum(map(sum, outcomes.values())) / len(counted),
        success_by_difficulty={name: sum(found) / len(found) for name, found in sorted(outcomes.items()) if name},
        valid_calls=metrics["tools/valid_rate"],
        calls=metrics["tools/call_frequency"],
        turns=metrics["turns/mean"],
        num_trajectories=len(trajectories),
        num_failed=len(trajectories) - len(counted),
    )


def comparison_rows(before: Evaluation, after: Evaluation) -> list[tuple[str, float, float]]:
    """
    Two evaluations of the same tasks, figure by figure.

    Args:
        before ([`Evaluation`]):
            The policy before training.
        after ([`Evaluation`]):
            The policy after training.

    Returns:
        `list[tuple[str, float, float]]`: What it is, before, after.
    """
    labels = sorted(before.success_by_difficulty.keys() & after.success_by_difficulty.keys())
    return [
        ("success", before.success, after.success),
        *((f"  {label}", before.success_by_difficulty[label], after.success_by_difficulty[label]) for label in labels),
        ("valid tool calls", before.valid_calls, after.valid_calls),
        ("tool calls per task", before.calls, after.calls),
        ("turns per task", before.turns, after.turns),
    ]


def comparison_table(before: Evaluation, after: Evaluation, title: str = "Before and after") -> Table:
    """
    Two evaluations of the same tasks, side by side.

    Args:
        before ([`Evaluation`]):
            The policy before training.
        after ([`Evaluation`]):
            The policy after training.
        title (`str`, *optional*, defaults to `"Before and after"`):
            Heading.

    Returns:
        `rich.table.Table`: Print it with `rich.print`.
    """
    table = Table(title=title)
    table.add_column("")
    for name in ("before", "after", "change"):
        table.add_column(name, justify="right")
    for name, first, second in comparison_rows(before, after):
        table.add_row(name, f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}")
    return table
