"""Table 7: first shifted blocks at their original offset, then token matching.

python -m experiments.ablation --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys

from experiments.study import command
from experiments.study.experiment import Experiment, Part, method_table, tau_bars
from experiments.study.resample import ratio
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor
from experiments.study.tables import Table, cell

_TASKS = "MATH, GSM8K, MBPP, HumanEval, MT-Bench, Alpaca"


def rows(study: Study) -> list[tuple[str, Setting, str]]:
    return [
        ("DFlash", chain(), "5.38 (7.37 6.24 5.81 6.51 3.46 2.89)"),
        ("+ fixed offset", reanchor(study, attach="fixed"), "5.87 (8.03 6.89 6.49 7.04 3.75 3.04)"),
        ("+ token matching", reanchor(study), "6.22 (8.45 7.51 6.78 7.50 3.89 3.17)"),
        ("fixed offset, matched or not", reanchor(study, attach="fixed_unmatched"), "not there"),
    ]


def settings(study: Study) -> list[Setting]:
    return [setting for _, setting, _ in rows(study)]


def parts(results: Results) -> list[Part]:
    table, last = rows(results.study), results.columns[-1]
    chain_tau, fixed, matched, _ = (results.tau(setting, last) for _, setting, _ in table)
    share = ratio(matched - fixed, matched - chain_tau)
    lines = [["token matching's share of the whole gain in tau", cell(share, 1, unit="%", percent=True), "40%"]]
    return [
        method_table(results, table),
        Table(["", "measured", "paper"], lines, f"The paper's tau: mean ({_TASKS})."),
        tau_bars(results, "ablation", table, "tau as parts of the method are added, T = 0."),
    ]


EXPERIMENT = Experiment(
    "ablation",
    "Ablation",
    "Table 7 of the paper (Qwen3-4B, T = 0). A fixed offset asks for a match at t = d; the last row does not.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
