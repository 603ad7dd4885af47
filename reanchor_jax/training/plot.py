"""The curves of a training run, for print: `curve.png` and `curve.svg`. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reanchor_jax.files import written_whole

BLUE, ORANGE = "#1b3a5c", "#d1662f"
"""Told apart in gray, too, by their lightness; training loss has no markers, evaluations have."""

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "font.size": 9,
    "legend.frameon": False,
    "svg.hashsalt": "reanchor",  # the same picture gives the same file
    "svg.fonttype": "none",  # letters stay letters: smaller, and they can be searched
}


def points(rows: Sequence[Mapping[str, float]], name: str) -> tuple[list[float], list[float]]:
    """Blocks trained, and the values of a column of `log.table` there; rows without it are left out."""
    has_it = [row for row in rows if name in row]
    return [row["blocks"] for row in has_it], [row[name] for row in has_it]


def last_accuracy(rows: Sequence[Mapping[str, float]]) -> tuple[float, list[float]]:
    """Blocks trained at the last evaluation, and its accuracy of drafts 1 .. B-1."""
    for row in reversed(rows):
        if "accuracy_1" in row:
            size = sum(name.startswith("accuracy_") for name in row)
            return row["blocks"], [row[f"accuracy_{k}"] for k in range(1, size + 1)]
    return 0, []


def draw(rows: Sequence[Mapping[str, float]], folder: Path) -> bool:
    """Draws `log.table`'s rows; false where matplotlib is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return False
    import matplotlib
    from matplotlib import ticker
    from matplotlib.figure import Figure  # without pyplot: whoever calls us keeps the backend that they chose

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 2.8), layout="constrained")
        losses, taus, accuracies = figure.subplots(1, 3)
        losses.plot(*points(rows, "loss"), color=BLUE, linewidth=0.8, label="training")
        losses.plot(*points(rows, "held_out_loss"), color=ORANGE, marker="o", markersize=3, label="held-out")
        losses.set_ylabel("loss (nats)")
        taus.plot(*points(rows, "proxy_tau"), color=BLUE, marker="o", markersize=3, label="proxy tau")
        if points(rows, "tau")[0]:
            taus.plot(*points(rows, "tau"), color=ORANGE, marker="s", markersize=3, label="tau")
        taus.set_ylabel("tokens per round, held-out")
        end = max(rows[-1]["blocks"], 1)
        for axes in (losses, taus):
            axes.set_xlim(-0.02 * end, 1.02 * end)  # the same for both, evaluated or not
            axes.set_xlabel("blocks trained")
            axes.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=2, borderaxespad=0.3, columnspacing=1.0)
        blocks, accuracy = last_accuracy(rows)
        accuracies.bar(range(1, len(accuracy) + 1), accuracy, color=BLUE)
        accuracies.set_ylim(0, 1)
        accuracies.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        accuracies.set_xlabel("draft position")
        accuracies.set_ylabel("accuracy, held-out")
        accuracies.set_title(f"after {blocks:,.0f} blocks", fontsize=9)
        # A viewer may read while we write.
        with written_whole(folder / "curve.png") as path:
            figure.savefig(path, format="png", dpi=160, metadata={"Software": None})
        with written_whole(folder / "curve.svg") as path:
            figure.savefig(path, format="svg", metadata={"Date": None})
    return True
