"""Beyond the paper: how drafts are chosen above temperature 0.

python -m experiments.draft_rules --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys
from typing import get_args

from experiments.study import command
from experiments.study.experiment import Experiment, Part, method_table
from experiments.study.plots import bars
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain, reanchor
from experiments.study.tables import Figure
from reanchor_jax.config import DraftRule

TEMPERATURES = (0.5, 1.0)


def rows(study: Study, temperature: float) -> list[tuple[str, Setting, str]]:
    return [
        (f"{name}, T = {temperature:g}, {rule}", make(rule), "the paper's rule" if rule == "sample" else "-")
        for rule in get_args(DraftRule)
        for name, make in (
            ("chain", lambda rule: chain(temperature, draft_rule=rule)),
            ("ReAnchor", lambda rule: reanchor(study, temperature, draft_rule=rule)),
        )
    ]


def settings(study: Study) -> list[Setting]:
    return [setting for temperature in TEMPERATURES for _, setting, _ in rows(study, temperature)]


def parts(results: Results) -> list[Part]:
    study, last = results.study, results.columns[-1]
    tables = [method_table(results, rows(study, temperature), base=chain(temperature)) for temperature in TEMPERATURES]
    groups = [f"T = {temperature:g}, {rule}" for temperature in TEMPERATURES for rule in get_args(DraftRule)]
    every = [results.tau(setting, last) for temperature in TEMPERATURES for _, setting, _ in rows(study, temperature)]
    series = {"chain": every[::2], "ReAnchor": every[1::2]}
    draw = bars(groups, series, "tau (tokens per round)")
    return [*tables, Figure("draft_rules", "tau by draft rule and temperature.", draw)]


EXPERIMENT = Experiment(
    "draft_rules",
    "Draft rules",
    "Not in the paper, whose drafts at T = 1 are sampled on their own (`sample`). `greedy` drafts the likeliest "
    "tokens, `coupled` samples with the noise that the target will use. Gains are against the chain with `sample`.",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
