"""Table 5: whether shifted blocks still match the new baseline at their own offset.

python -m experiments.alignment --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.study import command
from experiments.study.experiment import Experiment, Part
from experiments.study.plots import bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, reanchor
from experiments.study.tables import Figure, Table, cell
from reanchor_jax.state import RoundRecord

PAPER = {"gsm8k": (50.7, 35.8), "math500": (51.2, 40.6), "humaneval": (49.0, 34.7), "mbpp": (45.5, 38.0)}


def alignment_of_blocks(rounds: Sequence[RoundRecord], plain_ids: Sequence[int]) -> dict[str, Any]:
    """Counts of shifted blocks: all, matched anywhere, of these not at t = d, and at more than one t.

    Example: g(0) = a b c b. A block of offset 1 that starts with b matches at 1 and 3: matched and
    multiple. One of offset 2 that starts with b too is shifted only and multiple. One that starts
    with z is not matched.
    """
    del plain_ids
    counts = {"blocks": 0, "matched": 0, "shifted_only": 0, "multiple": 0}
    for record in rounds:
        for offset in range(1, len(record.blocks)):
            if not record.block_valid[offset]:
                continue
            sites = np.flatnonzero(record.blocks[0] == record.blocks[offset][0])
            counts["blocks"] += 1
            counts["matched"] += int(sites.size > 0)
            counts["shifted_only"] += int(sites.size > 0 and offset not in sites)
            counts["multiple"] += int(sites.size > 1)
    return counts


def settings(study: Study) -> list[Setting]:
    return [reanchor(study, observe=alignment_of_blocks)]


def parts(results: Results) -> list[Part]:
    (setting,) = settings(results.study)

    def share(dataset: str, above: str, below: str) -> np.ndarray:
        return results.rate(setting, dataset, lambda r: r["observed"][above], lambda r: r["observed"][below])

    rows, series = [], {"matched": [], "shifted only": [], "multiple": []}
    for dataset in results.columns:
        shares = (
            share(dataset, "matched", "blocks"),
            *(share(dataset, k, "matched") for k in ("shifted_only", "multiple")),
        )
        for name, value in zip(series, shares, strict=True):
            series[name].append(100 * value)
        paper = "{:.1f}% / {:.1f}%".format(*PAPER[dataset]) if dataset in PAPER else "-"
        rows.append([dataset, *(cell(each, 1, unit="%", percent=True) for each in shares), paper])
    columns = ["dataset", "matched, of all shifted blocks", "shifted only, of matched", "multiple, of matched", "paper"]
    note = "The paper's: shifted only 45.5% to 51.2%, multiple 34.7% to 40.6%."
    return [
        Table(columns, rows, note),
        Figure(
            "alignment", "Shifted blocks by where they match.", bars(results.columns, series, "share of blocks (%)")
        ),
    ]


EXPERIMENT = Experiment("alignment", "Token alignment", "Table 5 of the paper (Qwen3-4B, T = 0).", settings, parts)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
