"""Chain and ReAnchor side by side, beside the paper's numbers: tables 2 and 3."""

from __future__ import annotations

import numpy as np

from experiments.study.results import Results
from experiments.study.settings import Setting
from experiments.study.tables import Table, cell

DATASETS: tuple[str, ...] = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca")
"""Columns of tables 2 and 3."""
TARGETS = ("Qwen3-8B", "Gemma-4-12B", "Llama-3.1-8B", "Qwen3-4B")
"""The paper's; the last stands in for any other."""

Numbers = dict[tuple[float, str, str], dict[str, tuple[float, float]]]
"""(temperature, target, method) to dataset to tau and speedup."""


def parse_numbers(text: str) -> Numbers:
    """Lines of temperature, target, method, and tau/speedup for each of `DATASETS`."""
    numbers: Numbers = {}
    for line in text.strip().splitlines():
        temperature, target, method, *cells = line.split()
        pairs = [(float(tau), float(speedup)) for tau, speedup in (each.split("/") for each in cells)]
        numbers[float(temperature), target, method] = dict(zip(DATASETS, pairs, strict=True))
    return numbers


def paper_target(pair: str) -> str:
    """The paper's target that a pair's name names, else the one of its ablations."""
    return next((target for target in TARGETS if target.lower() in pair.lower()), TARGETS[-1])


def compare(results: Results, rows: list[tuple[float, str, Setting, Setting]], paper: Numbers, target: str) -> Table:
    """A table with two lines a dataset, chain and ReAnchor.

    Args:
      results: of all settings.
      rows: temperature, the chain's name in `paper`, chain, ReAnchor.
      paper: its numbers; ReAnchor's method is NAME+ReAnchor.
      target: of the paper.
    """
    lines = []
    for temperature, name, old, new in rows:
        for dataset in results.columns:
            theirs = [_paper(paper, temperature, target, method, dataset) for method in (name, f"{name}+ReAnchor")]
            for method, setting, numbers in ((name, old, theirs[0]), ("+ ReAnchor", new, theirs[1])):
                tau, speedup = results.tau(setting, dataset), results.speedup(setting, dataset)
                line = [f"{temperature:g}", dataset, method, cell(tau), cell(speedup, unit="×")]
                if setting is new:
                    for statistic in (results.tau, results.speedup):
                        gain = results.relative(statistic, new, old, dataset)
                        line.append(cell(gain, 1, unit="%", percent=True, sign=True))
                else:
                    line += ["", ""]
                line.append(f"{results.nodes(setting, dataset)[0]:.1f}")
                line.append(f"{numbers[0]:.2f} / {numbers[1]:.2f}×" if numbers else "-")
                gains = [f"{a / b - 1:+.1%}" for a, b in zip(*theirs[::-1], strict=True)] if all(theirs) else []
                line.append(" / ".join(gains) if gains and setting is new else "")
                lines.append(line)
    columns = ["T", "dataset", "method", "tau", "speedup over plain", "gain in tau", "gain in speed", "nodes a round"]
    columns += [f"paper, {target}: tau / speedup", "paper: gains"]
    note = (
        "Speedups are as measured on this machine; the paper's are of one H100. A dataset that the paper does not have "
        "stands beside the paper's mean over its eight."
    )
    return Table(columns, lines, note)


def _paper(paper: Numbers, temperature: float, target: str, method: str, dataset: str) -> tuple[float, float] | None:
    numbers = paper.get((temperature, target, method))
    if numbers is None:
        return None
    if dataset in numbers:
        return numbers[dataset]
    tau, speedup = np.mean(list(numbers.values()), axis=0)
    return float(tau), float(speedup)
