"""Attempt the tasks of an environment with a policy, and say how well it does beside doing nothing."""

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mcp_grpo.environments import Environment
from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import GROUND_TRUTH, NOTHING, Attempt, Evaluation
from mcp_grpo.policy_evaluation import evaluate, read_attempts
from mcp_grpo.tasks import tasks_from_rows


BENCH_FILE = "bench.json"
SCRIPTED = {policy.name: policy for policy in (GROUND_TRUTH, NOTHING)}
"""Policies that every environment has, by name."""
_MAX_CONCURRENT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """
    Count of one kind of attempts.

    Args:
        policy (`str`):
            Name of the policy.
        what (`str`):
            What is counted, and among which tasks.
        count (`int`):
            How many attempts it is true of.
        total (`int`):
            Attempts that count; those that a server failed do not.
    """

    policy: str
    what: str
    count: int
    total: int

    def __str__(self) -> str:
        share = f" ({self.count / self.total:.1%})" if self.total else ""
        return f"{self.policy}: {self.count} of {self.total}{share} {self.what}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchResult:
    """
    Results of a policy in an environment.

    Args:
        evaluation ([`Evaluation`]):
            Results of the policy.
        scores (`tuple[Score, ...]`):
            What is to be reported: the policy's counts, and those of doing nothing.
    """

    evaluation: Evaluation
    scores: tuple[Score, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.scores))


def bench(
    environment: Environment,
    policy: Any,
    output_dir: str | Path,
    *,
    name: str | None = None,
    split: str = "all",
    number: int | None = None,
    **settings: Any,
) -> BenchResult:
    """
    Attempt the tasks of an environment.

    Args:
        environment ([`~mcp_grpo.environments.Environment`]):
            What to attempt.
        policy (`Any`):
            `"ground-truth"`, `"nothing"`, or what [`evaluate`] takes.
        output_dir (`str` or `Path`):
            Folder for the attempts and `bench.json`; doing nothing has a folder of its own in it.
        name (`str`, *optional*):
            Name of the policy in the results.
        split (`str`, *optional*, defaults to `"all"`):
            Split of the environment.
        number (`int`, *optional*):
            Only so many of the tasks.
        settings (`Any`):
            Further arguments of [`evaluate`].

    Returns:
        [`BenchResult`]: How often it succeeded, and how often doing nothing does.
    """
    folder = Path(output_dir)
    policy = SCRIPTED.get(policy, policy) if isinstance(policy, str) else policy
    tasks = tasks_from_rows(environment.tasks(split))[:number]
    if not tasks:
        raise SettingsError(f"The split {split!r} of {environment.name} has no tasks.")
    fixed: dict[str, Any] = {
        "is_success": environment.is_success,
        "max_concurrent": _MAX_CONCURRENT,
        "user": environment.user,
    }
    found = evaluate(policy, tasks, environment.servers, output_dir=folder, **{**fixed, **settings})
    idle_folder = folder if policy is NOTHING else folder / NOTHING.name
    if policy is not NOTHING:
        evaluate(NOTHING, tasks, environment.servers, output_dir=idle_folder, **fixed)
    wanted = {task.task_id for task in tasks}
    idle = [attempt for attempt in read_attempts(idle_folder) if attempt.task_id in wanted]
    needed = {attempt.task_id for attempt in idle if not attempt.is_solved}
    scores = _scores(environment, NOTHING.name, idle, needed)
    if policy is not NOTHING:
        own = [attempt for attempt in read_attempts(folder) if attempt.task_id in wanted]
        scores = _scores(environment, name or getattr(policy, "name", None) or str(policy), own, needed) + scores
    result = BenchResult(evaluation=found, scores=tuple(scores))
    told = {"environment": environment.name, "split": split, "scores": [asdict(score) for score in scores]}
    (folder / BENCH_FILE).write_text(json.dumps(told, indent=2) + "\n")
    return result


def _scores(
    environment: Environment, policy: str, attempts: Sequence[Attempt], needed: Collection[str]
) -> list[Score]:
    def score(what: str, flags: Sequence[bool]) -> Score:
        return Score(policy=policy, what=what, count=sum(flags), total=len(flags))

    return [
        score("succeed", [attempt.is_solved for attempt in attempts]),
        score(
            "succeed where something must be done",
            [attempt.is_solved for attempt in attempts if attempt.task_id in needed],
        ),
        *(score(flaw, [is_so(one.states) for one in attempts]) for flaw, is_so in environment.flaws.items()),
    ]
