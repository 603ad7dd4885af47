"""Beyond the paper: tau and time against the number of trie nodes.

python -m experiments.node_budget --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.curves import budget_parts
from experiments.study.experiment import Experiment, Part
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor


def points(study: Study) -> list[tuple[int, Setting]]:
    """1, 1.5, 2, 3, 4 and 8 blocks' worth, and the study's own budget: B * B nodes are no limit."""
    size = study.block_size
    most = min(size * size, study.nodes or size * size)
    some = [n for n in (size, size * 3 // 2, 2 * size, 3 * size, 4 * size, 8 * size) if n < most]
    return [*((n, reanchor(study, nodes=n)) for n in some), (most, reanchor(study))]


def settings(study: Study) -> list[Setting]:
    return [chain(), *(setting for _, setting in points(study))]


def parts(results: Results) -> list[Part]:
    return budget_parts(results, points(results.study), "node_budget", "nodes", log=True)


EXPERIMENT = Experiment(
    "node_budget",
    "Node budget",
    "Not in the paper, which cuts no trie. A budget of one block is the baseline alone. Gains are against the chain.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
