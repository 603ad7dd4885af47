"""An experiment: which settings it decodes, and what it makes of their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.study.plots import bars, draw
from experiments.study.records import Records
from experiments.study.results import MEAN, Results
from experiments.study.settings import Setting, Study
from experiments.study.tables import Figure, Table, cell
from reanchor_jax.files import write_whole

Part = Table | Figure


@dataclasses.dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper, or one beyond it."""

    name: str
    """Of its module and its files."""
    title: str
    source: str
    """Where the paper has it, and on which models its numbers were measured."""
    settings: Callable[[Study], list[Setting]]
    """Without the plain decoding that they are held against."""
    parts: Callable[[Results], list[Part]]
    """Tables and figures of the records."""

    def all_settings(self, study: Study) -> list[Setting]:
        """With plain decoding before what is held against it."""
        return with_plain(self.settings(study))

    def results(self, records: Records) -> Results:
        """Statistics over the prompts that all settings have answered."""
        return Results(records, records.study, self.all_settings(records.study))

    def write(self, records: Records, folder: Path) -> list[Part]:
        """Writes `NAME.md` and the figures, and returns what they are made of; nothing without records."""
        results = self.results(records)
        if not results.datasets:
            return []
        parts = [*self.parts(results), lossless_table(results, self.settings(records.study))]
        lines = [f"# {self.title}\n", f"{self.source}\n", f"{describe(results)}\n"]
        for part in parts:
            if isinstance(part, Table):
                lines.append(part.markdown())
            elif draw(part, folder):
                lines.append(f"![{part.caption}]({part.stem}.svg)\n\n{part.caption}\n")
            else:
                lines.append(f"{part.caption}: not drawn; pip install -e '.[experiments]' brings matplotlib.\n")
        write_whole(folder / f"{self.name}.md", "\n".join(lines))
        return parts


def with_plain(settings: Sequence[Setting]) -> list[Setting]:
    """Each setting once, behind plain decoding at its temperature."""
    return list({each.name: each for setting in settings for each in (setting.plain, setting)}.values())


def describe(results: Results) -> str:
    """One line: what was measured, on what."""
    study = results.study
    prompts = ", ".join(f"{dataset} {len(rows)}" for dataset, rows in results.rows.items())
    template = "chat template" if study.chat_template else "no chat template"
    thinking = "" if study.thinking is None else f", thinking {'on' if study.thinking else 'off'}"
    budget = "no node budget" if study.nodes is None else f"at most {study.nodes} nodes"
    return (
        f"Pair {study.pair} (block size {study.block_size}, {template}{thinking}), {study.dtype}, on {study.device}. "
        f"Prompts: {prompts}; {study.max_new_tokens} new tokens at most; {budget} where it is not varied. "
        "In brackets: 95% bootstrap interval over prompts."
    )


def lossless_table(results: Results, settings: Sequence[Setting]) -> Table:
    """How many answers equal plain decoding with the same key, token for token."""
    rows = [(setting.name, *results.equal(setting)) for setting in with_plain(settings)]
    rows = [row for row in rows if not row[0].startswith("method=ar")]
    same, total = sum(row[1] for row in rows), sum(row[2] for row in rows)
    if same == total:
        note = f"All {total} answers of all {len(rows)} settings equal plain decoding, token for token."
        return Table(["lossless", "equal to plain decoding"], [["all settings", f"{same} of {total}"]], note)
    cells = [[name, f"{same} of {total}"] for name, same, total in rows]
    return Table(["setting", "equal to plain decoding"], cells, "Some answers differ from plain decoding.")


def method_table(results: Results, rows: Sequence[tuple[str, Setting, str]], base: Setting | None = None) -> Table:
    """tau per dataset and in the mean, speedup, nodes; rows of label, setting and the paper's numbers in words.

    Gains are against `base`, by default the first row's setting.
    """
    base = rows[0][1] if base is None else base
    columns = ["", *(f"tau {dataset}" for dataset in results.datasets)]
    several = len(results.datasets) > 1
    columns += ["tau mean"] if several else []
    columns += ["Δ tau", "gain in tau", "speedup over plain", "nodes a round", "equal", "paper"]
    last = MEAN if several else results.datasets[0]
    lines = []
    for label, setting, paper in rows:
        tau = results.tau(setting, last)
        line = [label, *(cell(results.tau(setting, dataset)) for dataset in results.columns)]
        if setting == base:
            line += ["", ""]
        else:
            line.append(cell(tau - results.tau(base, last), sign=True))
            line.append(cell(results.relative(results.tau, setting, base, last), 1, unit="%", percent=True, sign=True))
        line.append(cell(results.speedup(setting, last), unit="×"))
        line.append(f"{results.nodes(setting, last)[0]:.1f}")
        same, total = results.equal(setting)
        lines.append([*line, f"{same} of {total}", paper or "-"])
    return Table(columns, lines, "Speedups are as measured here; the paper's are of an H100.")


def tau_bars(results: Results, stem: str, rows: Sequence[tuple[str, Setting, str]], caption: str) -> Figure:
    """tau of each row in each dataset, as bars; of one dataset a bar for each row."""
    if len(results.columns) == 1:
        taus = [results.tau(setting, results.columns[0]) for _, setting, _ in rows]
        return Figure(stem, caption, bars([label for label, _, _ in rows], {"": taus}, "tau (tokens per round)"))
    series = {label: [results.tau(setting, dataset) for dataset in results.columns] for label, setting, _ in rows}
    return Figure(stem, caption, bars(results.columns, series, "tau (tokens per round)"))
