"""Tables and figures of a report, as Markdown and HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.study.resample import interval


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows of cells, already in words."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = ["| " + " | ".join(row) + " |" for row in (self.columns, *self.rows)]
        lines.insert(1, "|" + "---|" * len(self.columns))
        return "\n".join(lines) + (f"\n\n{self.note}" if self.note else "") + "\n"

    def html(self) -> str:
        def line(cells: Sequence[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "\n".join(line(row, "td") for row in self.rows)
        note = f"<p class=note>{html.escape(self.note)}</p>" if self.note else ""
        return f"<table>\n<thead>{line(self.columns, 'th')}</thead>\n<tbody>\n{body}\n</tbody></table>{note}\n"


@dataclasses.dataclass(frozen=True)
class Figure:
    """A plot: its file's stem, what it shows, and how it is drawn on matplotlib axes."""

    stem: str
    caption: str
    draw: Callable[[Any], None]


def cell(values: np.ndarray, digits: int = 2, *, unit: str = "", percent: bool = False, sign: bool = False) -> str:
    """`5.40 [5.12, 5.70]`: a statistic and its 95% interval; a dash where there is none."""
    value, low, high = (x * (100 if percent else 1) for x in interval(values))
    if not np.isfinite(value):
        return "-"
    form = f"{'+' if sign else ''}.{digits}f"
    return f"{value:{form}}{unit} [{low:{form}}, {high:{form}}]"
