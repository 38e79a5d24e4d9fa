"""A run on one page that needs nothing else, and pictures for a card."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import jinja2
from markupsafe import Markup

from mcp_grpo.errors import SettingsError
from mcp_grpo.evaluation import EVALUATIONS_FILE, Interval, Judged, mean_of_tasks, read_judged, tool_use
from mcp_grpo.inert import inert
from mcp_grpo.monitor.curves import curves_svg, intervals_svg, plot_curves, plot_intervals
from mcp_grpo.monitor.grid import Grid
from mcp_grpo.monitor.judged_runs import kept_step_of
from mcp_grpo.monitor.kinds import kinds_grid, stuck_sentence
from mcp_grpo.monitor.metrics_file import METRICS_FILE
from mcp_grpo.monitor.replay import recorded, recorded_steps
from mcp_grpo.monitor.report import column_name, evaluations_grid, training_sentence
from mcp_grpo.monitor.results import Results, read_results


PAGE_FILE, PICTURES_FOLDER = "report.html", "pictures"
MAX_STEPS = 5  # at either end of a run that trajectories are read of
MAX_EXAMPLES = 3
MAX_SHOWN = 1500  # characters of a message or result
PART = 10  # of a run, for what its start and its end were like
# Panels of curves: title, and metrics that are drawn where they were logged; `*` stands for anything.
PANELS = {
    "Reward": ("reward", "rewards/*/mean"),
    "Success": ("success",),
    "Answers and valid calls": ("stop/answered", "tools/valid_rate"),
    "Calls and turns per trajectory": ("tools/call_frequency", "turns/mean"),
    "How trajectories end": ("stop/*",),
    "Groups without spread": ("frac_reward_zero_std",),
    "Entropy": ("entropy",),
    "Divergence from the reference": ("kl/active", "kl/forced", "kl/all", "kl/beta"),
    "Ratio to the sampler": ("ratio/p10", "ratio/p50", "ratio/p90"),
    "Share of tokens in the loss": ("mask/in_loss_fraction", "loss/active_fraction", "ratio/ess"),
    "Agreement of sampler and trainer": ("align/score",),
    "Loss": ("loss/policy", "value/loss"),
    "Value head": ("value/explained_variance", "value/ev_vs_group"),
    "Gradient norm": ("grad_norm",),
    "Tokens per second": ("rollout/tokens_per_second",),
    "GPU": ("gpu/memory_gib",),
    "Seconds by phase": ("profile/*_seconds",),
}
CARD_PANELS = ("Reward", "Answers and valid calls", "Calls and turns per trajectory", "Entropy")

_TEMPLATE = Path(__file__).with_name("run_page.html.jinja")


def write_page(folder: Path) -> list[Path]:
    """
    Write `report.html`, one file that needs nothing else, and `pictures/` for a card into the folder of a run.

    Args:
        folder (`Path`):
            Output folder of a run.

    Returns:
        `list[Path]`: What was written.

    Raises:
        [`SettingsError`]: If there is no run in the folder.
    """
    history, content = _history(folder), read_results(folder)
    evaluations = read_judged(folder / EVALUATIONS_FILE, up_to=10**12)
    steps = recorded_steps(folder)
    if not history and not content and not steps:
        raise SettingsError(
            f"There is no run in {folder}: neither metrics nor results nor trajectories. Name the output folder of a run."
        )
    results = _results(content, evaluations, history)
    first, last = _ends(folder, steps)
    panels = {title: found for title, keys in PANELS.items() if (found := _logged(history, keys))}
    points, label = _points(content, evaluations)
    every, by_kind = _grids(folder, content, evaluations)
    page = _environment().from_string(_TEMPLATE.read_text(encoding="utf-8"))
    text = page.render(
        name=folder.resolve().name,
        facts=_facts(content, history, steps),
        results=results,
        intervals=Markup(intervals_svg(points, label)) if len(points) > 1 else None,
        evaluations=[grid for grid in (every, by_kind) if grid is not None],
        stuck=stuck_sentence(evaluations),
        health=_health(folder, content),
        curves={title: Markup(curves_svg(history, keys)) for title, keys in panels.items()},
        tables=_tables(content, first, last, by_kind),
        examples=_examples(first, last),
        settings=_settings(folder, content),
        chosen=_json(folder / "run.json").get("chosen") or {},
        versions=_versions(folder, content),
    )
    written = [folder / PAGE_FILE]
    written[0].write_text(text, encoding="utf-8")
    pictures = folder / PICTURES_FOLDER
    pictures.mkdir(exist_ok=True)
    if shown := {title: panels[title] for title in CARD_PANELS if title in panels}:
        written.append(pictures / "curves.png")
        plot_curves(history, shown, written[-1])
    if len(points) > 1:
        written.append(pictures / "learning.png")
        plot_intervals(points, label, written[-1])
    return written


def _environment() -> jinja2.Environment:
    """Return an environment in which text does nothing: neither as HTML nor by control characters."""
    return jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else inert(str(value)),
    )


def _history(folder: Path) -> list[dict[str, Any]]:
    """Read what was logged; a line that is broken off is left out."""
    file, history = folder / METRICS_FILE, []
    for line in file.read_text(encoding="utf-8").splitlines() if file.is_file() else ():
        try:
            history.append(json.loads(line))
        except ValueError:
            continue
    return history


def _json(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def _results(content: Mapping[str, Any], evaluations: Sequence[Judged], history: Sequence[dict[str, Any]]) -> Results:
    """Return what was learnt: as the run said it at its end, or from what there is of one that has not ended."""
    if (found := content.get("results") or {}).get("rows"):
        return Results(**found)
    found = Results.of_run(evaluations, max((each.step for each in evaluations), default=0))
    return found if found.rows else Results(notes=[training_sentence(history)])


def _points(content: Mapping[str, Any], evaluations: Sequence[Judged]) -> tuple[dict[str, Interval], str]:
    """Return success, or the reward, with its intervals, over the evaluations of a run."""
    if content.get("before") and content.get("after"):
        return {name: _interval(content[name]["outcomes"]) for name in ("before", "after")}, "success"
    if evaluations and all(each.solved for each in evaluations):
        return {f"step {each.step}": _interval(each.solved) for each in evaluations}, "success"
    return {f"step {each.step}": each.reward for each in evaluations}, "reward"


def _interval(outcomes: Mapping[str, Sequence[bool]]) -> Interval:
    return mean_of_tasks({task: fmean(found) for task, found in outcomes.items()})


def _facts(content: Mapping[str, Any], history: Sequence[dict[str, Any]], steps: Sequence[int]) -> list[str]:
    num_steps = content.get("num_steps") or max([*(entry["step"] for entry in history), *steps], default=0)
    kept = content.get("kept_step")
    return [f"{num_steps} steps", *([f"policy of step {kept} kept"] if kept not in (None, num_steps) else [])]


def _health(folder: Path, content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what was said about the run's health: by `run.json`, which a run keeps up to date, or at its end."""
    return _json(folder / "run.json").get("health") or content.get("health") or []


def _logged(history: Sequence[dict[str, Any]], patterns: Iterable[str]) -> list[str]:
    """Return the metrics that were logged as numbers, in the order of the patterns."""
    logged = sorted({key.removeprefix("eval_") for entry in history for key, v in entry.items() if _is_number(v)})
    return list(dict.fromkeys(key for pattern in patterns for key in logged if _fits(key, pattern)))


def _fits(key: str, pattern: str) -> bool:
    before, star, after = pattern.partition("*")
    return key == pattern or (bool(star) and key.startswith(before) and key.endswith(after))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _ends(folder: Path, steps: Sequence[int]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return trajectories of the start and of the end of a run."""
    part = min(MAX_STEPS, max(1, len(steps) // PART))
    if len(steps) < 2:
        return [], _recorded_of(folder, steps)
    return _recorded_of(folder, steps[:part]), _recorded_of(folder, steps[-part:])


def _recorded_of(folder: Path, steps: Sequence[int]) -> list[dict[str, Any]]:
    return list(chain.from_iterable(recorded(folder, step=step) for step in steps))


def _grids(folder: Path, content: Mapping[str, Any], evaluations: Sequence[Judged]) -> tuple[Grid | None, Grid | None]:
    """Return a table of all evaluations, where there are more than the two that are compared, and one by kind of task."""
    kept = kept_step_of(folder)
    columns = {column_name(each.step, is_kept=each.step == kept): [each] for each in evaluations}
    every = evaluations_grid(evaluations, kept) if len(evaluations) > 2 else None
    # What was measured before and after on other tasks has tables of its own by family and difficulty.
    return every, None if content.get("before") and content.get("after") else kinds_grid(columns)


def _tables(
    content: Mapping[str, Any], first: Sequence[dict], last: Sequence[dict], by_kind: Grid | None
) -> list[dict[str, Any]]:
    """
    Return tables by tool, family and difficulty: of evaluations where there are any, else of what was trained on. Kinds of tasks
    that are in a table already get no other one.
    """
    known = {label for label, _ in by_kind.rows} if by_kind else set()
    before, after = content.get("before"), content.get("after")
    if before and after:
        found, where = [_by_tool(before["tools"], after["tools"])], "of the evaluations before and after training"
        found += [
            _by_label(name, before[f"success_by_{name}"], after[f"success_by_{name}"], "{:.1%}")
            for name in ("family", "difficulty")
        ]
    else:
        where = "of the first and the last steps that were trained on"
        found = [_by_tool(*(_uses(rows) for rows in (first, last)))]
        labelled = [
            _by_label(name, _rewards_by(name, first), _rewards_by(name, last), "{:.3f}")
            for name in ("family", "difficulty")
        ]
        found += [table for table in labelled if not known & {label for label, _ in table["rows"]}]
    return [{**table, "where": where} for table in found if table["rows"]]


def _uses(rows: Sequence[dict]) -> dict[str, dict[str, Any]]:
    used = tool_use([call for row in rows for call in row["calls"]])
    return {name: {"calls": each.calls, "errors": each.errors, "seconds": each.seconds} for name, each in used.items()}


def _by_tool(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    columns = ("calls before", "after", "errors before", "after", "seconds before", "after")
    rows = []
    for name in sorted(before.keys() | after.keys()):
        cells: list[str] = []
        for show in (_calls, _errors, _seconds):
            cells += [show(each[name]) if name in each else "–" for each in (before, after)]
        rows.append((name, cells))
    return {"title": "By tool", "head": "tool", "columns": columns, "rows": rows}


def _calls(use: Mapping[str, Any]) -> str:
    return str(use["calls"])


def _errors(use: Mapping[str, Any]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in use["errors"].items()) or "none"


def _seconds(use: Mapping[str, Any]) -> str:
    return f"{use['seconds']:.3f}"


def _by_label(name: str, before: Mapping[str, float], after: Mapping[str, float], form: str) -> dict[str, Any]:
    what = "success" if "%" in form else "reward"
    rows = [
        (label, [form.format(each[label]) if label in each else "–" for each in (before, after)])
        for label in sorted(before.keys() | after.keys())
    ]
    return {"title": f"By {name}", "head": name, "columns": (f"{what} before", "after"), "rows": rows}


def _rewards_by(name: str, rows: Sequence[dict]) -> dict[str, float]:
    groups: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row[name] is not None:
            groups[row[name]].append(_total(row))
    return {label: fmean(found) for label, found in groups.items()}


def _total(row: dict) -> float:
    return sum(value for _, value in row["rewards"] if value == value)


def _examples(first: Sequence[dict], last: Sequence[dict]) -> list[dict[str, Any]]:
    """Pick attempts of the start and of the end that can be compared: at one task, or else of one kind."""
    kinds: list[tuple[str, Callable[[dict], Any]]] = [
        ("task", lambda row: row["task_id"]),
        ("family", lambda row: row["family"]),
        ("difficulty", lambda row: row["difficulty"]),
        ("all tasks", lambda row: ""),
    ]
    found = ((name, [_grouped(rows, key) for rows in (first, last)]) for name, key in kinds)
    shown = ((name, groups, (groups[0].keys() & groups[1].keys()) - {None}) for name, groups in found)
    name, groups, shared = next((each for each in shown if each[2]), ("", [], set()))
    if not shared:
        return [{"title": "attempt", "before": None, "after": _shown(_typical(last))}] if last else []
    gains = {label: fmean(map(_total, groups[1][label])) - fmean(map(_total, groups[0][label])) for label in shared}
    best = sorted(shared, key=lambda label: (-gains[label], label))[:MAX_EXAMPLES]
    return [
        {
            "title": f"{name} {label}".strip(),
            "before": _shown(_typical(groups[0][label])),
            "after": _shown(_typical(groups[1][label])),
        }
        for label in best
    ]


def _grouped(rows: Sequence[dict], key: Callable[[dict], Any]) -> dict[Any, list[dict]]:
    groups: dict[Any, list[dict]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _typical(rows: Sequence[dict]) -> dict:
    """Return the attempt whose reward is nearest to the mean."""
    mean = fmean(map(_total, rows))
    return min(rows, key=lambda row: abs(_total(row) - mean))


def _shown(row: dict) -> dict[str, Any]:
    """Return what is shown of an attempt."""
    turns = [message for message in json.loads(row["messages"]) if message["role"] == "assistant"]
    return {
        "step": row["step"],
        "task_id": row["task_id"],
        "prompt": [(message["role"], _cut(message.get("content"))) for message in json.loads(row["prompt"])],
        "turns": [
            {
                "text": _cut(message.get("content")),
                "calls": [
                    {**call, "arguments": _cut(call["arguments"]), "text": _cut(call["text"])}
                    for call in row["calls"]
                    if call["turn"] == turn
                ],
            }
            for turn, message in enumerate(turns)
        ],
        "stop_reason": row["stop_reason"],
        "rewards": ", ".join(f"{name} {value + 0.0:.3f}" for name, value in row["rewards"]) or "no reward",
    }


def _cut(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content) if content is not None else ""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ... ({len(text) - MAX_SHOWN} more characters)"


def _settings(folder: Path, content: Mapping[str, Any]) -> dict[str, str]:
    given = content.get("settings") or _json(folder / "run.json").get("settings") or {}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}


def _versions(folder: Path, content: Mapping[str, Any]) -> dict[str, str]:
    facts = _json(folder / "versions.json")
    found = dict(facts.get("packages") or content.get("versions") or {})
    found |= {name: facts[name] for name in ("python", "cuda", "device", "commit") if facts.get(name)}
    if command := content.get("command") or facts.get("command"):
        found["command"] = command
    return found
