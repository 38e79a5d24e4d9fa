"""Evaluations sent to trackers: the summary, and a row or a trace for every attempt."""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation.attempts import Attempt
from mcp_grpo.evaluation.report import Evaluation
from mcp_grpo.inert import inert


EXTRAS = {"wandb": "tracking", "trackio": "tracking", "weave": "weave"}
"""Trackers, and the extra of the package that installs each."""
MAX_CHARACTERS = 20_000  # of a cell; the whole of it is in `attempts.jsonl`

logger = logging.getLogger(__name__)


def check_trackers(names: str | Sequence[str] | None) -> list[str]:
    """Return the trackers that are named, before anything is attempted. Raise [`SettingsError`] if one cannot be used."""
    found = [names] if isinstance(names, str) else list(names or ())
    for name in found:
        if name not in EXTRAS:
            raise SettingsError(f"`report_to` must be some of {sorted(EXTRAS)}, got {name!r}.")
        if find_spec(name) is None:
            raise SettingsError(
                f"`report_to` names {name!r}, which is not installed: pip install 'mcp-grpo[{EXTRAS[name]}]'."
            )
    return found


def send_evaluation(
    trackers: Sequence[str],
    name: str,
    evaluation: Evaluation,
    attempts: Sequence[Attempt],
    *,
    project: str = "mcp-grpo",
    baselines: Mapping[str, float] | None = None,
) -> None:
    """
    Send an evaluation to trackers. One that fails is said and left out: the attempts were made, and are on disk.

    Args:
        trackers (`Sequence[str]`):
            Some of `"wandb"`, `"trackio"` and `"weave"`.
        name (`str`):
            Name of the policy.
        evaluation ([`Evaluation`]):
            Its results.
        attempts (`Sequence[Attempt]`):
            Every attempt.
        project (`str`, *optional*, defaults to `"mcp-grpo"`):
            Project at the tracker.
        baselines (`Mapping[str, float]`, *optional*):
            Success of others on the same tasks, by name.
    """
    senders: dict[str, Callable[..., None]] = {"wandb": _to_wandb, "trackio": _to_trackio, "weave": _to_weave}
    metrics = summary_of(evaluation, baselines or {})
    for tracker in check_trackers(trackers):
        try:
            senders[tracker](project, name, metrics, attempts)
        except Exception as error:  # a network, a login, a server of somebody else's
            logger.warning("The evaluation could not be sent to %s: %s: %s", tracker, type(error).__name__, error)


def summary_of(evaluation: Evaluation, baselines: Mapping[str, float]) -> dict[str, float]:
    """Return the numbers of an evaluation by name."""
    one = evaluation
    found: dict[str, float | None] = {
        "success": one.success,
        "success_low": one.interval.low,
        "success_high": one.interval.high,
        **{f"pass_at_{k}": value for k, value in one.pass_at.items()},
        **{f"pass_all_{k}": value for k, value in one.pass_all.items()},
        **{f"success_by_difficulty/{label}": value for label, value in one.success_by_difficulty.items()},
        **{f"success_by_family/{label}": value for label, value in one.success_by_family.items()},
        **{f"baseline/{other}": value for other, value in baselines.items()},
        **{f"stop/{reason}": value for reason, value in one.stop_reasons.items()},
        **{f"tools/{tool}/calls": use.calls for tool, use in one.tools.items()},
        **{f"tools/{tool}/error_rate": sum(use.errors.values()) / use.calls for tool, use in one.tools.items()},
        **{f"tools/{tool}/seconds": use.seconds for tool, use in one.tools.items()},
        "valid_calls": one.valid_calls,
        "calls": one.calls,
        "turns": one.turns,
        "tokens": one.tokens,
        "seconds": one.seconds,
        "num_tasks": one.num_tasks,
        "num_attempts": one.num_trajectories,
        "num_failed": one.num_failed,
        "cost": one.cost,
    }
    return {inert(key): value for key, value in found.items() if value is not None}


def attempt_rows(attempts: Sequence[Attempt]) -> list[dict[str, Any]]:
    """Return attempts as rows of a table: plain texts and numbers that do nothing where they are shown."""
    return [
        {
            "task_id": _text(each.task_id),
            "attempt": each.index,
            "solved": each.is_solved,
            "stop_reason": each.stop_reason,
            "family": _text(each.family or ""),
            "difficulty": _text(each.difficulty or ""),
            "turns": each.num_turns,
            "calls": len(each.calls),
            "errors": sum(call["kind"] != "ok" for call in each.calls),
            "tokens_read": each.prompt_tokens,
            "tokens_written": each.sampled_tokens,
            "seconds": each.seconds,
            "answer": _text(str(each.messages[-1].get("content") or "") if each.messages else ""),
            "messages": _text(json.dumps(each.messages, ensure_ascii=False, default=str)),
            "tool_calls": _text("\n".join(map(_line, each.calls))),
            "error": _text(each.error or ""),
        }
        for each in attempts
    ]


def _line(call: Mapping[str, Any]) -> str:
    arguments = json.dumps(call["arguments"], ensure_ascii=False, default=str)
    return f"{call['name']}({arguments}) -> {call['kind']}: {' '.join(str(call['text']).split())}"


def _text(text: str) -> str:
    return inert(text[:MAX_CHARACTERS])


def _to_wandb(project: str, name: str, metrics: Mapping[str, float], attempts: Sequence[Attempt]) -> None:
    import wandb

    is_own = wandb.run is None  # another may be that of a training run
    run: Any = wandb.init(project=project, name=name, job_type="eval") if is_own else wandb.run
    try:
        rows = attempt_rows(attempts)
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({**{f"eval/{key}": value for key, value in metrics.items()}, "eval/attempts": table})
    finally:
        if is_own:
            run.finish()


def _to_trackio(project: str, name: str, metrics: Mapping[str, float], attempts: Sequence[Attempt]) -> None:
    import pandas as pd
    import trackio

    trackio.init(project=project, name=name, embed=False)
    try:
        table: Any = trackio.Table(dataframe=pd.DataFrame(attempt_rows(attempts)))
        trackio.log({**{f"eval/{key}": value for key, value in metrics.items()}, "eval/attempts": table})
    finally:
        trackio.finish()


def _to_weave(project: str, name: str, metrics: Mapping[str, float], attempts: Sequence[Attempt]) -> None:
    import weave  # type: ignore[import-not-found]

    weave.init(project)
    results = iter(())

    @weave.op(name="tool")
    def call_tool(name: str, arguments: str) -> Any:
        """Stand for a call that was made: it has its trace, with what came back."""
        return next(results)

    rows = attempt_rows(attempts)
    evaluation = weave.EvaluationLogger(
        name="mcp-grpo", model=_model_name(name), dataset=[{"task_id": each["task_id"]} for each in rows]
    )
    for attempt, row in zip(attempts, rows, strict=True):
        inputs = {key: row[key] for key in ("task_id", "attempt", "family", "difficulty")}
        with evaluation.log_prediction(inputs=inputs) as prediction:
            results = iter([{"kind": call["kind"], "text": _text(str(call["text"]))} for call in attempt.calls])
            for call in attempt.calls:
                call_tool(_text(call["name"]), _text(json.dumps(call["arguments"], default=str)))
            prediction.output = {key: row[key] for key in ("answer", "messages", "stop_reason", "turns", "seconds")}
            prediction.log_score("success", attempt.is_solved)
    evaluation.log_summary(dict(metrics))
    weave.finish()


def _model_name(name: str) -> str:
    """Return a name that Weave takes: letters, digits and underscores."""
    return "".join(letter if letter.isalnum() and letter.isascii() else "_" for letter in name) or "policy"
