"""Beyond the paper: tau and time against the number of shifted blocks.

python -m experiments.offset_budget --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.curves import budget_parts
from experiments.study.experiment import Experiment, Part
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor


def points(study: Study) -> list[tuple[int, Setting]]:
    """0 (the chain), 1, 2, 4, .. and all B - 1 offsets, the nearest first."""
    most = study.block_size - 1
    some = [n for n in (1, 2, 4, 8, 16, 32) if n < most]
    return [(0, chain()), *((n, reanchor(study, offsets=n)) for n in some), (most, reanchor(study))]


def settings(study: Study) -> list[Setting]:
    return [setting for _, setting in points(study)]


def parts(results: Results) -> list[Part]:
    return budget_parts(results, points(results.study), "offset_budget", "offsets", log=False)


EXPERIMENT = Experiment(
    "offset_budget",
    "Offset budget",
    "Not in the paper, which drafts at every offset. Gains are against the chain, which is 0 offsets.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
