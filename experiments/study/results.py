"""Records of several settings on the same prompts, and the statistics that experiments share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from experiments.study.records import Record
from experiments.study.resample import draws, ratio
from experiments.study.settings import Setting, Study

MEAN = "mean"
"""In place of a dataset: the mean of the statistic over all datasets."""


class Results:
    """Statistics over those prompts that every setting has answered.

    All are arrays [1 + SAMPLES] over the same draws of prompts: the value, then resampled ones, so
    that a difference or ratio of two settings is paired prompt by prompt.
    """

    def __init__(self, records: Iterable[Record], study: Study, settings: Sequence[Setting]):
        """Takes from the records those of the settings."""
        self.study = study
        names = {setting.name for setting in settings}
        self._records: dict[tuple[str, str], dict[int, Record]] = {}
        for record in records:
            if record["setting"] in names:
                self._records.setdefault((record["dataset"], record["setting"]), {})[record["row"]] = record
        rows: dict[str, list[int]] = {}
        for dataset in dict.fromkeys(dataset for dataset, _ in self._records):
            complete = set.intersection(*(set(self._records.get((dataset, name), {})) for name in names))
            if complete:
                rows[dataset] = sorted(complete)
        self.rows = rows
        self._draws = {dataset: draws(len(rows[dataset]), study.seed) for dataset in rows}

    @property
    def datasets(self) -> list[str]:
        """With at least one prompt that all settings have answered."""
        return list(self.rows)

    @property
    def columns(self) -> list[str]:
        """The datasets, and `MEAN` where there are several."""
        return [*self.rows, MEAN] if len(self.rows) > 1 else list(self.rows)

    def records(self, setting: Setting, dataset: str) -> list[Record]:
        """One for each prompt, the same prompts in the same order for every setting."""
        found = self._records[dataset, setting.name]
        return [found[row] for row in self.rows[dataset]]

    def count(self, setting: Setting, dataset: str, number: Callable[[Record], float]) -> np.ndarray:
        """Sum of a number of each record."""
        return self._draws[dataset] @ np.array([number(record) for record in self.records(setting, dataset)], float)

    def rate(
        self, setting: Setting, dataset: str, above: Callable[[Record], float], below: Callable[[Record], float]
    ) -> np.ndarray:
        """Quotient of two sums; its mean over datasets for `MEAN`."""
        if dataset == MEAN:
            return np.mean([self.rate(setting, each, above, below) for each in self.rows], axis=0)
        return ratio(self.count(setting, dataset, above), self.count(setting, dataset, below))

    def tau(self, setting: Setting, dataset: str) -> np.ndarray:
        """Committed tokens per round, over all rounds of a dataset; the last one counts in full."""
        return self.rate(setting, dataset, lambda r: sum(r["committed"]), lambda r: len(r["committed"]))

    def nodes(self, setting: Setting, dataset: str) -> np.ndarray:
        """Verified nodes per round."""
        return self.rate(setting, dataset, lambda r: sum(r["nodes"]), lambda r: len(r["nodes"]))

    def speedup(self, setting: Setting, dataset: str) -> np.ndarray:
        """Plain decoding's seconds over this setting's, of all rounds; the tokens are the same."""
        if dataset == MEAN:
            return np.mean([self.speedup(setting, each) for each in self.rows], axis=0)
        seconds = [self.count(each, dataset, lambda r: r["decode_seconds"]) for each in (setting.plain, setting)]
        return ratio(*seconds)

    def milliseconds(self, setting: Setting, dataset: str) -> np.ndarray:
        """Milliseconds of rounds per token; the first token, which prefill gives, is left out."""
        return 1000 * self.rate(
            setting, dataset, lambda r: r["decode_seconds"], lambda r: max(len(r["token_ids"]) - 1, 0)
        )

    def relative(self, statistic: Callable[[Setting, str], np.ndarray], new: Setting, old: Setting, dataset: str):
        """By which share a statistic grows from one setting to another; for `MEAN` the mean of that share."""
        if dataset == MEAN:
            return np.mean([self.relative(statistic, new, old, each) for each in self.rows], axis=0)
        return ratio(statistic(new, dataset), statistic(old, dataset)) - 1

    def equal(self, setting: Setting) -> tuple[int, int]:
        """How many answers equal plain decoding's, token for token, and of how many."""
        pairs = [
            (one["token_ids"], other["token_ids"])
            for dataset in self.rows
            for one, other in zip(self.records(setting, dataset), self.records(setting.plain, dataset), strict=True)
        ]
        return sum(one == other for one, other in pairs), len(pairs)
