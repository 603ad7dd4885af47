"""Appendix: how often the earliest site of a block is also the best.

python -m experiments.earliest_win_rate --pair PAIR --prompts DIR --max-new-tokens 128
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import numpy as np

from experiments.study import command
from experiments.study.experiment import Experiment, Part
from experiments.study.results import Results
from experiments.study.settings import Setting, Study, reanchor
from experiments.study.tables import Table, cell
from reanchor_jax.state import RoundRecord


def earliest_wins(rounds: Sequence[RoundRecord], plain_ids: Sequence[int]) -> dict[str, int]:
    """Verifies the paths from all sites of every block, and counts where the earliest is among the best.

    A group is one round and one shifted block that matches somewhere. It is eligible where one of its
    paths is accepted as far as the farthest of them and the baseline, and won where the earliest
    site's path is. At temperature 0 the target accepts of a path what it shares with plain decoding's
    answer, so no forward is needed; `contradicted` counts rounds in which the decoder's own verdict on
    its trie was another one (a node budget may cut a path). What is beyond the answer's end is not accepted.

    Example: the answer goes on x b c d e. With g(0) = a x b x b and g(1) = b c d e f, T = {2, 4}: behind
    a x the path is accepted for x b c d e, behind a x b x for x b alone, the baseline for x b. The
    earliest wins.
    """
    counts = {"groups": 0, "eligible": 0, "wins": 0, "contradicted": 0}
    for record in rounds:
        answer, blocks = np.asarray(plain_ids[int(record.start) :]), np.asarray(record.blocks)
        baseline = blocks[0]
        best = native = _accepted(baseline[1:], answer)
        for offset in range(1, len(blocks)):
            sites = np.flatnonzero(baseline == blocks[offset][0])
            if not record.block_valid[offset] or not sites.size:
                continue
            paths = [np.concatenate([baseline[:site], blocks[offset]])[1:] for site in sites]
            lengths = [_accepted(path, answer) for path in paths]
            eligible = max(lengths) >= native
            counts["groups"] += 1
            counts["eligible"] += int(eligible)
            counts["wins"] += int(eligible and lengths[0] == max(lengths))
            best = max(best, lengths[0])
        counts["contradicted"] += int(best != min(int(record.accepted), len(answer)))
    return counts


def _accepted(path: np.ndarray, answer: np.ndarray) -> int:
    """For how many tokens both agree from their starts."""
    size = min(len(path), len(answer))
    return int(np.cumprod(path[:size] == answer[:size]).sum())


def settings(study: Study) -> list[Setting]:
    return [reanchor(study, observe=earliest_wins)]


def parts(results: Results) -> list[Part]:
    (setting,) = settings(results.study)

    def total(datasets: Sequence[str], name: str) -> int:
        return sum(record["observed"][name] for each in datasets for record in results.records(setting, each))

    def count(dataset: str, name: str) -> np.ndarray:
        return results.count(setting, dataset, lambda record: record["observed"][name])

    rows = []
    groups = [[dataset] for dataset in results.datasets] + ([results.datasets] if len(results.datasets) > 1 else [])
    for group in groups:
        wins, eligible = (np.sum([count(dataset, name) for dataset in group], axis=0) for name in ("wins", "eligible"))
        rate = np.divide(wins, eligible, out=np.full(wins.shape, np.nan), where=eligible > 0)
        label = group[0] if len(group) == 1 else "all"
        numbers = [str(total(group, name)) for name in ("groups", "eligible", "wins")]
        rows.append([label, *numbers, cell(rate, 2, unit="%", percent=True), "25,304 / 23,875 / 94.35%"])
    columns = ["dataset", "matched groups", "eligible", "won by the earliest", "win rate", "paper: tested / won / rate"]
    contradicted = total(results.datasets, "contradicted")
    note = f"Rounds in which the decoder's verdict was another one than the answer's: {contradicted}."
    return [Table(columns, rows, note)]


EXPERIMENT = Experiment(
    "earliest_win_rate",
    "Winning rate of the earliest site",
    "Appendix of the paper (Qwen3-4B, T = 0, 128 tokens, GSM8K, HumanEval and MBPP together).",
    settings,
    parts,
)

if __name__ == "__main__":
    sys.exit(command.run([EXPERIMENT], EXPERIMENT.name, __doc__))
