"""Table 6: where shifted blocks attach.

python -m experiments.attachment_rules --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.experiment import Experiment, Part, method_table, tau_bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor


def rows(study: Study) -> list[tuple[str, Setting, str]]:
    return [
        ("original offset", reanchor(study, attach="fixed"), "7.24 / 4.96×"),
        ("random match", reanchor(study, attach="random"), "7.51 / 5.16×"),
        ("earliest match", reanchor(study, attach="earliest"), "7.56 / 5.16×"),
        ("longest-prefix match", reanchor(study, attach="longest"), "7.51 / 5.14×"),
        ("original offset, matched or not", reanchor(study, attach="fixed_unmatched"), "not there"),
        ("earliest match, else original offset", reanchor(study, attach="fallback"), "not there"),
    ]


def settings(study: Study) -> list[Setting]:
    return [chain(), *(setting for _, setting, _ in rows(study))]


def parts(results: Results) -> list[Part]:
    table = rows(results.study)
    return [
        method_table(results, table, base=chain()),
        tau_bars(results, "attachment_rules", table, "tau by attachment rule, T = 0."),
    ]


EXPERIMENT = Experiment(
    "attachment_rules",
    "Attachment rules",
    "Table 6 of the paper (Qwen3-4B, T = 0). The paper says that the original offset discards blocks, "
    "so it asks for a match at t = d; the last two rules are additions. Gains are against the chain.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
