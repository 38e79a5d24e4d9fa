"""Pictures of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


_SMOOTHING = 0.8


def plot_curves(log_history: Sequence[Mapping[str, Any]], panels: Mapping[str, Sequence[str]], path: Path) -> None:
    """
    Draw logged figures over the steps: each as it was logged, and smoothed. Those of evaluations are points, in the colour of the
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
        is_evaluated = False
        for number, key in enumerate(keys):
            colour = f"C{number}"
            steps, values = _points(log_history, key)
            if values:
                axes.plot(steps, values, color=colour, alpha=0.25)
                axes.plot(steps, _smooth(values), color=colour, label=key)
            steps, values = _points(log_history, f"eval_{key}")
            if values:
                axes.plot(steps, values, color=colour, linestyle=":", marker="o")
                is_evaluated = True
        if is_evaluated:
            axes.plot([], [], color="black", linestyle=":", marker="o", label="evaluation")
        axes.set_title(title)
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)


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
