"""A budget and what it buys: a table, tau and time against it."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.study.experiment import Part, method_table
from experiments.study.plots import lines
from experiments.study.results import Results
from experiments.study.settings import Setting, chain
from experiments.study.tables import Figure

Points = Sequence[tuple[int, Setting]]


def budget_parts(results: Results, points: Points, name: str, unit: str, *, log: bool) -> list[Part]:
    """Table and two figures.

    Args:
      results: of all points and of the chain, against which gains are.
      points: budgets and their settings, rising.
      name: stem of the figures' files.
      unit: of the budget.
      log: on a logarithmic axis.
    """
    x = [budget for budget, _ in points]
    tau = {d: [results.tau(setting, d) for _, setting in points] for d in results.columns}
    time = {d: [results.milliseconds(setting, d) for _, setting in points] for d in results.columns}
    table = method_table(results, [(f"{budget} {unit}", setting, "-") for budget, setting in points], base=chain())
    return [
        table,
        Figure(f"{name}_tau", f"tau against {unit}.", lines(x, tau, unit, "tau (tokens per round)", log=log)),
        Figure(f"{name}_time", f"Time against {unit}.", lines(x, time, unit, "ms per token", log=log)),
    ]
