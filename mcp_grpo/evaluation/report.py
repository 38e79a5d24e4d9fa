"""Sum up how well a policy does its tasks, and compare two policies on the same tasks."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from rich.table import Table
from rich.text import Text

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation.attempts import Attempt, attempt_of, is_solved
from mcp_grpo.evaluation.statistics import Interval, ks_of, mean_difference, mean_of_tasks, pass_all, pass_at
from mcp_grpo.inert import inert, markdown, markdown_code
from mcp_grpo.rewards import is_answered
from mcp_grpo.types import ResultKind, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """
    How a tool was used.

    Args:
        calls (`int`):
            How often it was called.
        errors (`dict[str, int]`):
            How often that gave an error, by kind; see [`ResultKind`].
        seconds (`float`):
            Mean time of a call.
    """

    calls: int
    errors: dict[str, int]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """
    Prices of tokens at an endpoint, for a million.

    Args:
        read (`float`):
            Price of those it reads.
        written (`float`):
            Price of those it writes.
    """

    read: float
    written: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """
    Results of a policy on a set of tasks. Attempts that a server failed do not count.

    Args:
        success (`float`):
            Share of attempts that did their task, as a mean over tasks.
        interval ([`Interval`]):
            The same, with its 95 % confidence interval. Attempts at one task are not independent, so tasks are counted.
        pass_at (`dict[int, float]`):
            Chance that at least one of `k` attempts does its task (pass@k), by `k`.
        pass_all (`dict[int, float]`):
            Chance that all of `k` attempts do (pass^k), by `k`.
        success_by_difficulty (`dict[str, float]`):
            Success for each `difficulty` that the tasks name.
        success_by_family (`dict[str, float]`):
            The same for each `family`.
        tools (`dict[str, ToolUse]`):
            How each tool was used.
        valid_calls (`float`):
            Share of tool calls that could be made; 0 if there were none.
        calls (`float`):
            Tool calls per attempt.
        turns (`float`):
            Turns per attempt.
        tokens (`float`):
            Tokens that the policy wrote per attempt.
        seconds (`float`):
            Seconds per attempt.
        stop_reasons (`dict[str, float]`):
            Share of attempts that ended for each reason.
        num_tasks (`int`):
            Tasks with an attempt that counts.
        num_trajectories (`int`):
            Attempts, those that failed included.
        num_failed (`int`):
            Attempts that a server failed.
        cost (`float`, *optional*):
            Price of all attempts, where prices were given.
        outcomes (`dict[str, list[bool]]`):
            Whether each attempt did its task, by task.
    """

    success: float
    interval: Interval
    pass_at: dict[int, float]
    pass_all: dict[int, float]
    success_by_difficulty: dict[str, float]
    success_by_family: dict[str, float]
    tools: dict[str, ToolUse]
    valid_calls: float
    calls: float
    turns: float
    tokens: float
    seconds: float
    stop_reasons: dict[str, float]
    num_tasks: int
    num_trajectories: int
    num_failed: int
    cost: float | None = None
    outcomes: dict[str, list[bool]] = field(repr=False)

    @classmethod
    def of(cls, attempts: Sequence[Attempt], prices: Prices | None = None) -> "Evaluation":
        """
        Sum attempts up.

        Args:
            attempts (`Sequence[Attempt]`):
                The attempts.
            prices ([`Prices`], *optional*):
                Prices of tokens.

        Raises:
            [`SettingsError`]: If servers failed all of them.
        """
        counted = [attempt for attempt in attempts if not attempt.is_failed]
        if not counted:
            why = Counter(str(attempt.error) for attempt in attempts).most_common(1)
            reason = f" Most often: {why[0][0]}" if why else ""
            raise SettingsError(f"There is nothing to evaluate: of {len(attempts)} attempts all failed.{reason}")
        by_task: dict[str, list[Attempt]] = defaultdict(list)
        for attempt in counted:
            by_task[attempt.task_id].append(attempt)
        outcomes = {task: [attempt.is_solved for attempt in found] for task, found in by_task.items()}
        interval = mean_of_tasks({task: fmean(found) for task, found in outcomes.items()})
        ks = ks_of(map(len, outcomes.values()))
        calls = [call for attempt in counted for call in attempt.calls]
        stops = Counter(attempt.stop_reason for attempt in counted)
        num_valid = sum(not ResultKind(call["kind"]).is_policy_fault for call in calls)
        return cls(
            success=interval.mean,
            interval=interval,
            pass_at={k: fmean(pass_at(len(found), sum(found), k) for found in outcomes.values()) for k in ks},
            pass_all={k: fmean(pass_all(len(found), sum(found), k) for found in outcomes.values()) for k in ks},
            success_by_difficulty=_success_by(by_task, lambda attempt: attempt.difficulty),
            success_by_family=_success_by(by_task, lambda attempt: attempt.family),
            tools=tool_use(calls),
            valid_calls=num_valid / max(1, len(calls)),
            calls=len(calls) / len(counted),
            turns=fmean(attempt.num_turns for attempt in counted),
            tokens=fmean(attempt.sampled_tokens for attempt in counted),
            seconds=fmean(attempt.seconds for attempt in counted),
            stop_reasons={reason: count / len(counted) for reason, count in stops.most_common()},
            num_tasks=len(by_task),
            num_trajectories=len(attempts),
            num_failed=len(attempts) - len(counted),
            cost=None if prices is None else sum(_price(attempt, prices) for attempt in attempts),
            outcomes=outcomes,
        )


def summarize(
    trajectories: Sequence[Trajectory], is_success: Callable[[Trajectory], bool] = is_answered
) -> Evaluation:
    """
    Sum up how well trajectories did their tasks.

    Args:
        trajectories (`Sequence[Trajectory]`):
            Finished trajectories, such as [`MCPGRPOTrainer.roll_out`] returns.
        is_success (`Callable[[Trajectory], bool]`, *optional*):
            Whether a trajectory did its task; whether it gave the task's answer, if not given.

    Returns:
        [`Evaluation`]: The metrics.
    """
    indices: Counter[str] = Counter()
    attempts: list[Attempt] = []
    for trajectory in trajectories:
        task_id = trajectory.task.task_id
        attempts.append(attempt_of(trajectory, indices[task_id], is_solved=is_solved(trajectory, is_success)))
        indices[task_id] += 1
    return Evaluation.of(attempts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """
    Two policies on the same tasks.

    Args:
        num_tasks (`int`):
            Tasks that both attempted.
        gain ([`Interval`], *optional*):
            How much more of them the second one did, task by task; `None` with fewer than two.
    """

    num_tasks: int
    gain: Interval | None

    def __str__(self) -> str:
        return self.sentence()

    def sentence(self, policy: str = "The second") -> str:
        """Say whether the difference means anything, with a name for the second policy."""
        if self.gain is None:
            return f"The two share {self.num_tasks} tasks: too few to compare them."
        gain = self.gain
        numbers = f"{gain.mean:+.1%} of {self.num_tasks} tasks (95 % interval {gain.low:+.1%} to {gain.high:+.1%})"
        if gain.low > 0:
            return f"{policy} is better: {numbers}."
        if gain.high < 0:
            return f"{policy} is worse: {numbers}."
        return f"No difference is shown: {numbers}. It may be chance; more tasks would tell."


def compare(before: Evaluation, after: Evaluation) -> Comparison:
    """
    Compare two policies on the tasks that both attempted.

    Args:
        before ([`Evaluation`]):
            One policy.
        after ([`Evaluation`]):
            The other.

    Returns:
        [`Comparison`]: The gain, with an interval; printed, a sentence on whether it means anything.
    """
    both = before.outcomes.keys() & after.outcomes.keys()
    return Comparison(num_tasks=len(both), gain=mean_difference(before.outcomes, after.outcomes))


def comparison_rows(before: Evaluation, after: Evaluation) -> list[tuple[str, float, float]]:
    """
    Compare two evaluations of the same tasks, metric by metric.

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
    Show two evaluations of the same tasks side by side.

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
        table.add_row(Text(inert(name)), f"{first:.2f}", f"{second:.2f}", f"{second - first:+.2f}")
    return table


def markdown_report(name: str, evaluation: Evaluation, baselines: Mapping[str, float] | None = None) -> str:
    """
    Write an evaluation as Markdown.

    Args:
        name (`str`):
            The policy's name.
        evaluation ([`Evaluation`]):
            Its results.
        baselines (`Mapping[str, float]`, *optional*):
            Success of others on the same tasks, to compare with, by name.

    Returns:
        `str`: Headings and tables.
    """
    one = evaluation
    low, high = one.interval.low, one.interval.high
    lines = [f"# Evaluation of {markdown(name)}", ""]
    lines += [
        f"{one.num_tasks} tasks, {one.num_trajectories} attempts, {one.num_failed} of them failed by a server.",
        "",
    ]
    rows: list[tuple[str, str]] = [("success", f"{one.success:.1%} (95 % interval {low:.1%} to {high:.1%})")]
    rows += [(f"pass@{k}", f"{value:.1%}") for k, value in one.pass_at.items() if k > 1]
    rows += [(f"pass^{k}", f"{value:.1%}") for k, value in one.pass_all.items() if k > 1]
    rows += [(f"success of {other}", f"{value:.1%}") for other, value in (baselines or {}).items()]
    rows += [
        ("valid tool calls", f"{one.valid_calls:.1%}"),
        ("tool calls per attempt", f"{one.calls:.2f}"),
        ("turns per attempt", f"{one.turns:.2f}"),
        ("tokens written per attempt", f"{one.tokens:.0f}"),
        ("seconds per attempt", f"{one.seconds:.1f}"),
    ]
    rows += [("cost", f"{one.cost:.4f}")] if one.cost is not None else []
    rows += [(f"ended by `{reason}`", f"{share:.1%}") for reason, share in one.stop_reasons.items()]
    lines += _table(("", ""), rows)
    for title, found in (("difficulty", one.success_by_difficulty), ("family", one.success_by_family)):
        if found:
            lines += [
                "",
                f"## By {title}",
                "",
                *_table((title, "success"), [(markdown(n), f"{v:.1%}") for n, v in found.items()]),
            ]
    if one.tools:
        used = [
            (
                markdown_code(name),
                str(use.calls),
                ", ".join(f"{n} {kind}" for kind, n in use.errors.items()),
                f"{use.seconds:.3f}",
            )
            for name, use in one.tools.items()
        ]
        lines += ["", "## By tool", "", *_table(("tool", "calls", "errors", "seconds per call"), used)]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _success_by(by_task: Mapping[str, Sequence[Attempt]], label: Callable[[Attempt], str | None]) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for found in by_task.values():
        if (name := label(found[0])) is not None:
            groups[name].append(fmean(attempt.is_solved for attempt in found))
    return {name: fmean(shares) for name, shares in sorted(groups.items())}


def tool_use(calls: Sequence[Mapping]) -> dict[str, ToolUse]:
    """Sum up how tools were used, from calls with `name`, `kind` and `seconds`."""
    by_name: dict[str, list[Mapping]] = defaultdict(list)
    for call in calls:
        # A name that the policy made up is no tool.
        is_tool = ResultKind(call["kind"]) not in (ResultKind.UNKNOWN_TOOL, ResultKind.MALFORMED_CALL)
        by_name[call["name"] if is_tool else "(none)"].append(call)
    return {
        name: ToolUse(
            calls=len(found),
            errors=dict(Counter(call["kind"] for call in found if call["kind"] != ResultKind.OK).most_common()),
            seconds=fmean(call["seconds"] for call in found),
        )
        for name, found in sorted(by_name.items())
    }


def _price(attempt: Attempt, prices: Prices) -> float:
    return (attempt.prompt_tokens * prices.read + attempt.sampled_tokens * prices.written) / 1e6
