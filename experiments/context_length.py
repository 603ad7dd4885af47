"""Beyond the paper: tau by how much text stands before a round.

python -m experiments.context_length --pair PAIR --prompts DIR --max-new-tokens 2048
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

import numpy as np

from experiments.study import command
from experiments.study.experiment import Experiment, Part
from experiments.study.plots import lines
from experiments.study.records import Record
from experiments.study.resample import ratio
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor
from experiments.study.tables import Figure, Table, cell

MOST_BINS = 8


def settings(study: Study) -> list[Setting]:
    return [chain(), reanchor(study)]


def positions(record: Record) -> list[int]:
    """The anchor's absolute position in each round.

    Example: behind a prompt of 5 tokens stands the first anchor at 5; rounds that commit 3 and 2
    tokens move it to 8 and to 10: rounds at 5 and 8.
    """
    starts = itertools.accumulate(record["committed"][:-1], initial=record["prompt_tokens"])
    return list(starts) if record["committed"] else []


def bin_width(records: list[Record]) -> int:
    """A power of two, of which at most `MOST_BINS` hold all positions."""
    last = max((position for record in records for position in positions(record)), default=1)
    width = 1
    while last // width >= MOST_BINS:
        width *= 2
    return width


def inside(low: int, high: int, committed: bool) -> Callable[[Record], int]:
    """Rounds of a record at positions low .. high - 1, or the tokens that they committed."""

    def number(record: Record) -> int:
        rounds = zip(positions(record), record["committed"], strict=True)
        return sum(tokens if committed else 1 for position, tokens in rounds if low <= position < high)

    return number


def parts(results: Results) -> list[Part]:
    both = settings(results.study)
    records = [record for dataset in results.datasets for record in results.records(both[0], dataset)]
    width, rows, used = bin_width(records), [], []
    series: dict[str, list[np.ndarray]] = {"chain": [], "ReAnchor": []}
    for low in range(0, width * MOST_BINS, width):

        def total(setting: Setting, committed: bool, low: int = low) -> np.ndarray:
            numbers = inside(low, low + width, committed)
            return np.sum([results.count(setting, dataset, numbers) for dataset in results.datasets], axis=0)

        rounds = [total(setting, False) for setting in both]
        if min(each[0] for each in rounds) == 0:
            continue
        taus = [ratio(total(setting, True), each) for setting, each in zip(both, rounds, strict=True)]
        used.append(low + width // 2)
        for name, tau in zip(series, taus, strict=True):
            series[name].append(tau)
        gain = cell(taus[1] / taus[0] - 1, 1, unit="%", percent=True, sign=True)
        rows.append([f"{low} to {low + width - 1}", *(f"{each[0]:.0f}" for each in rounds), *map(cell, taus), gain])
    columns = ["anchor's position", "rounds, chain", "rounds, ReAnchor", "tau, chain", "tau, ReAnchor", "gain"]
    draw = lines(used, series, "anchor's position (tokens before the round)", "tau (tokens per round)")
    return [Table(columns, rows), Figure("context_length", "tau by position, all datasets together.", draw)]


EXPERIMENT = Experiment(
    "context_length",
    "Context length",
    "Not in the paper. All rounds of all datasets together, by the position of their anchor; T = 0.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
