"""Table 4: shifted blocks refine the native block, or extend it, or both.

python -m experiments.components --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.experiment import Experiment, Part, method_table, tau_bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor


def rows(study: Study) -> list[tuple[str, Setting, str]]:
    return [
        ("DFlash", chain(), "-"),
        ("in-block only", reanchor(study, components="in_block"), "Δ +0.54"),
        ("extension only", reanchor(study, components="extension"), "Δ +0.31"),
        ("both", reanchor(study), "-"),
    ]


def settings(study: Study) -> list[Setting]:
    return [setting for _, setting, _ in rows(study)]


def parts(results: Results) -> list[Part]:
    table = rows(results.study)
    return [method_table(results, table), tau_bars(results, "components", table, "tau by component, T = 0.")]


EXPERIMENT = Experiment(
    "components",
    "In-block refinement and block extension",
    "Table 4 of the paper (Qwen3-4B, T = 0).",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
