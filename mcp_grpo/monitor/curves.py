"""Pictures of a run."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from cycler import cycler
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mcp_grpo.evaluation import Interval
from mcp_grpo.inert import inert


_SMOOTHING = 0.8
_MAX_NAME = 40  # characters of a label
_MIN_SPAN = 0.01  # of an axis, as a share of its values
_INK = "#010203"  # stands for the colour of the page's text
_COLOURS = ["#4c8dff", "#f08a24", "#2fa86b", "#d65fb0", "#9b7bff", "#c9a227", "#2aa9b8"]  # for light and for dark
_IN_PAGE: Any = {
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.prop_cycle": cycler(color=_COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": _INK,
    "legend.framealpha": 0,
    "svg.fonttype": "none",
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
}


def plot_curves(log_history: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]], path: Path) -> None:
    """
    Draw logged metrics over the steps: each as it was logged, and smoothed. Those of evaluations are points, in the colour of the
    figure of training they belong to, and never smoothed.

    Args:
        log_history (`Sequence[Mapping[str, Any]]`):
            What the trainer logged: `trainer.state.log_history`.
        panels (`Mapping[str, Sequence[str]]`):
            Title of each panel, with the keys to draw in it. Evaluations need no keys of their own.
        path (`Path`):
            PNG file to write.
    """
    # Not by `pyplot`, which keeps state and may look for a screen.
    figure = Figure(figsize=(4.2 * len(panels), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, keys) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw(axes, log_history, keys)
        axes.set_title(title)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a box is drawn for it
        figure.savefig(path, dpi=150)


def curves_svg(log_history: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> str:
    """Draw metrics over the steps as [`plot_curves`] does, for a page: in the colours of its text, on its background."""
    with matplotlib.rc_context(_IN_PAGE):
        figure = Figure(figsize=(4.4, 2.7), layout="constrained")
        _draw(figure.subplots(), log_history, keys, ink=_INK)
        return _svg(figure)


def intervals_svg(points: Mapping[str, Interval], label: str) -> str:
    """Draw means with their intervals, for a page."""
    with matplotlib.rc_context(_IN_PAGE):
        return _svg(_intervals(points, label))


def plot_intervals(points: Mapping[str, Interval], label: str, path: Path) -> None:
    """Draw means with their intervals, to a PNG file."""
    figure = _intervals(points, label)
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=150)


def _intervals(points: Mapping[str, Interval], label: str) -> Figure:
    figure = Figure(figsize=(4.4, 2.7), layout="constrained")
    axes, means = figure.subplots(), [each.mean for each in points.values()]
    bars = [[each.mean - each.low for each in points.values()], [each.high - each.mean for each in points.values()]]
    axes.errorbar(range(len(points)), means, yerr=bars, marker="o", capsize=4, linestyle=":", linewidth=1)
    axes.set_xticks(range(len(points)), list(points), rotation=0 if len(points) < 6 else 45)
    axes.set_xlim(-0.5, len(points) - 0.5)
    axes.set_ylabel(f"{label}, 95 % interval")
    if all(each.low >= 0 and each.high <= 1 for each in points.values()):
        axes.set_ylim(-0.03, 1.03)
    axes.grid(alpha=0.3, axis="y")
    return figure


def _draw(axes: Any, log_history: Sequence[Mapping[str, Any]], keys: Sequence[str], ink: str = "black") -> None:
    is_evaluated = False
    for number, key in enumerate(keys):
        colour = f"C{number}"
        steps, values = _points(log_history, key)
        if values:
            axes.plot(steps, values, color=colour, alpha=0.25)
            axes.plot(steps, _smooth(values), color=colour, label=_name(key))
        steps, values = _points(log_history, f"eval_{key}")
        if values:
            axes.plot(steps, values, color=colour, linestyle=":", marker="o")
            is_evaluated = True
    if is_evaluated:
        axes.plot([], [], color=ink, linestyle=":", marker="o", label="evaluation")
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.ticklabel_format(useOffset=False)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    low, high = axes.get_ylim()
    if high - low < _MIN_SPAN * abs(low + high):  # noise of what is all but constant
        axes.set_ylim(low - _MIN_SPAN * abs(low), high + _MIN_SPAN * abs(high))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _name(key: str) -> str:
    """Return the name of a metric as a label: no formula, and not too long."""
    name = inert(key).replace("$", r"\$")
    return name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]} ..."


def _svg(figure: Figure) -> str:
    text = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # a browser has other fonts
        figure.savefig(text, format="svg", transparent=True, metadata=nothing)
    found = text.getvalue()
    return found[found.index("<svg") :].replace(_INK, "currentColor")


def _points(log_history: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    entries = [entry for entry in log_history if entry.get(key) is not None]
    return [entry["step"] for entry in entries], [entry[key] for entry in entries]


def _smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, free of the bias towards zero at the start."""
    smoothed, total, weight = [], 0.0, 0.0
    for value in values:
        total = _SMOOTHING * total + (1 - _SMOOTHING) * value
        weight = _SMOOTHING * weight + (1 - _SMOOTHING)
        smoothed.append(total / weight)
    return smoothed
