"""Plots for print: few lines, labels with units, intervals; PNG and SVG. Needs matplotlib (extra `experiments`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.study.resample import interval
from experiments.study.tables import Figure
from reanchor_jax.training.plot import BLUE, ORANGE, STYLE

COLORS = (BLUE, ORANGE, "#5b9a8b", "#a0a0a0", "#8c5a9e", "#c9a227", "#4f7cac", "#9b2c2c")
"""Told apart in gray, too, by their lightness; lines also differ in their markers."""
MARKERS = "osD^vPX*"


def draw(figure: Figure, folder: Path) -> bool:
    """Writes `stem.png` and `stem.svg`; false where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        canvas, axes = pyplot.subplots(figsize=(6.0, 3.2), layout="constrained")
        figure.draw(axes)
        canvas.savefig(folder / f"{figure.stem}.png", dpi=160, metadata={"Software": None})
        canvas.savefig(folder / f"{figure.stem}.svg", metadata={"Date": None})
        pyplot.close(canvas)
    return True


def bars(groups: Sequence[str], series: Mapping[str, Sequence[np.ndarray]], ylabel: str) -> Callable[[Any], None]:
    """Groups of bars with 95% intervals; each series has one statistic a group."""

    def draw(axes: Any) -> None:
        width = 0.8 / len(series)
        for index, (label, values) in enumerate(series.items()):
            points = [interval(value) for value in values]
            heights = [point.value for point in points]
            errors = np.abs([[p.value - p.low, p.high - p.value] for p in points]).T
            at = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
            axes.bar(at, heights, width * 0.92, color=COLORS[index % len(COLORS)], label=label)
            axes.errorbar(at, heights, errors, fmt="none", ecolor="black", elinewidth=0.8, capsize=2)
        wide = sum(map(len, groups)) > 70
        axes.set_xticks(np.arange(len(groups)), groups, rotation=25 if wide else 0, ha="right" if wide else "center")
        axes.set_ylabel(ylabel)
        _legend(axes, list(series))

    return draw


def lines(
    x: Sequence[float], series: Mapping[str, Sequence[np.ndarray]], xlabel: str, ylabel: str, *, log: bool = False
) -> Callable[[Any], None]:
    """Curves with 95% bands; each series has one statistic for every x, which are the only ticks."""

    def draw(axes: Any) -> None:
        at = np.array(x, float)
        for index, (label, values) in enumerate(series.items()):
            points = np.array([interval(value) for value in values])
            color = COLORS[index % len(COLORS)]
            axes.plot(at, points[:, 0], color=color, marker=MARKERS[index % len(MARKERS)], markersize=4, label=label)
            axes.fill_between(at, points[:, 1], points[:, 2], color=color, alpha=0.15, linewidth=0)
        if log:
            axes.set_xscale("log", base=2)
        axes.set_xticks(at, [f"{value:g}" for value in x])
        axes.minorticks_off()
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        _legend(axes, list(series))

    return draw


def _legend(axes: Any, labels: Sequence[str]) -> None:
    if len(labels) > 1:  # above the axes, where no curve runs; a line has room for about 80 letters
        columns = max(1, min(len(labels), 80 // (max(map(len, labels)) + 8)))
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.3)
