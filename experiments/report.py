"""One page of everything that a folder's records hold: report.md and report.html.

    python -m experiments.report DIR

Sentences on what was found are taken from DIR/findings.toml, where it has one by an experiment's name.
"""

from __future__ import annotations

import sys
from pathlib import Path

from experiments.all import EXPERIMENTS
from experiments.study.page import write_report
from reanchor_jax.cli import process
from reanchor_jax.cli.flags import Parser


def main(argv: list[str]) -> int:
    """Writes the page; exit code 0."""
    parser = Parser(prog="python -m experiments.report", description=__doc__ or "", epilog="")
    parser.add_argument("folder", type=Path, help="--out of the experiments")
    folder = parser.parse_args(argv).folder
    for path in write_report(EXPERIMENTS, folder):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(process.run(lambda: main(sys.argv[1:])))
