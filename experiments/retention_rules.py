"""Beyond the paper: which verifier states are kept behind a stop.

python -m experiments.retention_rules --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.experiment import Experiment, Part, method_table, tau_bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor


def rows(study: Study) -> list[tuple[str, Setting, str]]:
    return [
        ("earliest, baseline's states", reanchor(study), "the paper's rule"),
        ("earliest, accepted path's states", reanchor(study, retain="accepted_path"), "-"),
        ("fallback, baseline's states", reanchor(study, attach="fallback"), "-"),
        ("fallback, accepted path's states", reanchor(study, attach="fallback", retain="accepted_path"), "-"),
    ]


def settings(study: Study) -> list[Setting]:
    return [chain(), *(setting for _, setting, _ in rows(study))]


def parts(results: Results) -> list[Part]:
    table = rows(results.study)
    return [
        method_table(results, table, base=chain()),
        tau_bars(results, "retention_rules", table, "tau by retention rule, T = 0."),
    ]


EXPERIMENT = Experiment(
    "retention_rules",
    "Retention rules",
    "Not in the paper, which keeps the baseline's states behind the first rejection and none after a full block. "
    "Gains are against the chain.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
