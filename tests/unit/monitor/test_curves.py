"""The pictures of a run."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread

from mcp_grpo import plot_curves


HISTORY = [
    {"step": 0, "eval_reward": 0.2, "eval_entropy": 0.5},
    {"step": 1, "reward": 0.0, "entropy": 0.4},
    {"step": 2, "reward": 1.0, "entropy": 0.2, "kl": None},
    {"step": 2, "eval_reward": 0.8},
]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """What is saved, as it was drawn."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def saved(figure: Figure, path: Path, **kwargs: float) -> None:
        drawn.append(figure)
        save(figure, path, **kwargs)

    monkeypatch.setattr(Figure, "savefig", saved)
    return drawn


def test_training_is_drawn_as_logged_and_smoothed_and_an_evaluation_only_as_it_is(
    tmp_path: Path, figures: list[Figure]
) -> None:
    plot_curves(HISTORY, {"Reward": ["reward"]}, tmp_path / "curves.png")
    (axes,) = figures[0].axes
    logged, smoothed, evaluated, _ = axes.get_lines()
    assert (list(logged.get_xdata()), list(logged.get_ydata())) == ([1, 2], [0, 1])
    # 0.2 of the new and 0.8 of the old, over the sum of the weights so far: 0.2 / (0.2 + 0.16).
    assert list(smoothed.get_ydata()) == pytest.approx([0, 1 / 1.8])
    assert (list(evaluated.get_xdata()), list(evaluated.get_ydata())) == ([0, 2], [0.2, 0.8])
    assert evaluated.get_color() == logged.get_color()
    assert axes.get_legend_handles_labels()[1] == ["reward", "evaluation"]


def test_panels_have_their_own_legends_and_what_was_not_logged_is_left_out(
    tmp_path: Path, figures: list[Figure]
) -> None:
    panels = {"Both": ["entropy", "kl"], "Nothing": ["turns/mean"], "Evaluated only": ["reward"]}
    history = [{key: value for key, value in entry.items() if key != "reward"} for entry in HISTORY]
    plot_curves(history, panels, tmp_path / "curves.png")
    labels = {axes.get_title(): axes.get_legend_handles_labels()[1] for axes in figures[0].axes}
    assert labels == {"Both": ["entropy", "evaluation"], "Nothing": [], "Evaluated only": ["evaluation"]}
    height, width, _ = imread(tmp_path / "curves.png").shape
    assert width > 3 * height
