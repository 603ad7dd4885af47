"""Table 1: how often drafts behind the first rejection are still what the target would say there.

python -m experiments.agreement --pair PAIR --prompts DIR
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from experiments.study import command
from experiments.study.experiment import Experiment, Part
from experiments.study.plots import lines
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, chain
from experiments.study.tables import Figure, Table, cell
from reanchor_jax.state import RoundRecord

PAPER = {"gsm8k": 65.4, "humaneval": 60.2, "mbpp": 60.6, "math500": 66.0}


def agreement_after_rejection(rounds: Sequence[RoundRecord], plain_ids: Sequence[int]) -> dict[str, Any]:
    """Counts of drafts behind the first rejected one, and of those equal to the target's token there.

    The target's token is the one under the rejected prefix: at temperature 0 its top-1. Example: the
    chain a b c d e with target tokens b x d y z behind it accepts b and rejects c; of d and e behind c,
    d is what the target says behind a b c, and e is not what it says behind a b c d: 1 of 2.
    `by_distance` holds [agreeing, all] for each distance from the rejected draft, 1 first.
    """
    del plain_ids
    by_distance: list[list[int]] = []
    for record in rounds:
        rejected = int(record.accepted) + 1
        for node in range(rejected + 1, int(record.num_nodes)):
            distance = node - rejected
            if len(by_distance) < distance:
                by_distance.append([0, 0])
            by_distance[distance - 1][0] += int(record.trie_tokens[node] == record.target_tokens[node - 1])
            by_distance[distance - 1][1] += 1
    agree, total = (sum(counts[i] for counts in by_distance) for i in (0, 1))
    return {"agree": agree, "total": total, "by_distance": by_distance}


def settings(study: Study) -> list[Setting]:
    return [chain(observe=agreement_after_rejection)]


def parts(results: Results) -> list[Part]:
    (setting,) = settings(results.study)
    rows, curves = [], {}
    distances = range(1, results.study.block_size - 1)
    for dataset in results.columns:
        rate = results.rate(setting, dataset, lambda r: r["observed"]["agree"], lambda r: r["observed"]["total"])
        total = sum(r["observed"]["total"] for d in results.datasets for r in results.records(setting, d))
        if dataset in results.datasets:
            total = sum(r["observed"]["total"] for r in results.records(setting, dataset))
        paper = f"{PAPER[dataset]}%" if dataset in PAPER else "-"
        rows.append([dataset, cell(rate, 1, unit="%", percent=True), str(total), paper])
    for dataset in results.datasets:
        curves[dataset] = [100 * results.rate(setting, dataset, _at(n, 0), _at(n, 1)) for n in distances]
    note = "The paper's: Qwen3 with DFlash, 60.2% to 66.0% over its four tasks."
    return [
        Table(["dataset", "agreement", "drafts", "paper"], rows, note),
        Figure(
            "agreement",
            "Agreement with the target under the rejected prefix, by distance behind the rejected draft.",
            lines(distances, curves, "positions behind the rejected draft", "agreement (%)"),
        ),
    ]


def _at(distance: int, index: int):
    def number(record: dict[str, Any]) -> int:
        counts = record["observed"]["by_distance"]
        return counts[distance - 1][index] if distance <= len(counts) else 0

    return number


EXPERIMENT = Experiment("agreement", "Agreement after a rejection", "Table 1 of the paper.", settings, parts)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
