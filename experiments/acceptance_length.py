"""Figure 2: how many tokens rounds commit, and what becomes of it when blocks are simply made longer.

python -m experiments.acceptance_length --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from experiments.study import command
from experiments.study.experiment import Experiment, Part
from experiments.study.plots import bars
from experiments.study.results import MEAN, Results
from experiments.study.settings import Setting, Study, chain
from experiments.study.tables import Figure, Table, cell
from reanchor_jax.config import LMHeadConfig

PAPER_FULL = {"math500": "16.4%", "humaneval": "12.7%"}
PAPER_LONGER = ("-0.3", "-1.1")
"""Change of tau with B = 24 and 32 from drafters trained with 16: Qwen3-8B, mean of four tasks."""


def longer(study: Study) -> list[int]:
    """One and a half and two of the trained block size; none for heads that are tied to theirs."""
    return [study.block_size * 3 // 2, study.block_size * 2] if study.head == LMHeadConfig.__name__ else []


def settings(study: Study) -> list[Setting]:
    return [chain(), *(chain(block_size=size) for size in longer(study))]


def share_of(length: int):
    """How many rounds of a record committed that many tokens."""
    return lambda record: record["committed"].count(length)


def _rounds(record: dict[str, Any]) -> int:
    return len(record["committed"])


def parts(results: Results) -> list[Part]:
    native, *stretched = settings(results.study)
    size, last = results.study.block_size, results.columns[-1]
    rows = []
    for dataset in results.datasets:
        committed = [n for record in results.records(native, dataset) for n in record["committed"]]
        full = results.rate(native, dataset, share_of(size), _rounds)
        rows.append(
            [
                dataset,
                str(len(committed)),
                cell(results.tau(native, dataset)),
                f"{np.median(committed):.0f}",
                cell(full, 1, unit="%", percent=True),
                PAPER_FULL.get(dataset, "-"),
            ]
        )
    note = "The paper's full blocks: Qwen3-4B, MATH-500 and HumanEval."
    out: list[Part] = [Table(["dataset", "rounds", "tau", "median", f"rounds of all {size}", "paper"], rows, note)]
    if stretched:
        base = results.tau(native, last)
        lines = [[f"{size}, as trained", cell(base), "", cell(results.speedup(native, last), unit="×"), "-"]]
        for length, setting, paper in zip(longer(results.study), stretched, PAPER_LONGER, strict=True):
            tau = results.tau(setting, last)
            delta = cell(tau - base, sign=True)
            lines.append([str(length), cell(tau), delta, cell(results.speedup(setting, last), unit="×"), paper])
        note = "The paper's Δ tau: Qwen3-8B, trained with 16, run with 24 and 32; mean of four tasks."
        out.append(
            Table(
                ["block size", f"tau{' mean' if last == MEAN else ''}", "Δ tau", "speedup over plain", "paper"],
                lines,
                note,
            )
        )
    lengths = range(1, size + 1)
    shares = {d: [100 * results.rate(native, d, share_of(n), _rounds) for n in lengths] for d in results.datasets}
    draw = bars([str(n) for n in lengths], shares, "share of rounds (%)")

    def histogram(axes: Any) -> None:
        draw(axes)
        axes.set_xticks(axes.get_xticks(), [str(n) for n in lengths], rotation=0)
        axes.set_xlabel("committed tokens of a round")

    return [*out, Figure("acceptance_length", "Committed tokens per round, chain, T = 0.", histogram)]


EXPERIMENT = Experiment("acceptance_length", "Acceptance length", "Figure 2 of the paper.", settings, parts)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
