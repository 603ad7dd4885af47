"""Held-out tau against blocks trained, from drafters that a training run left on its way.

    python -m experiments.drafter_curve --prompts DIR --drafters 0=FOLDER 192156=FOLDER .. --out FOLDER

Decodes the prompts of `experiments.lossless` with each DFlash drafter for the default pair's target: chain, T = 0.
Writes `curve.csv` and, where matplotlib is installed, `curve.png` and `curve.svg`, with 95% intervals (bootstrap over
prompts). `OUT/records/` has a file for each drafter; a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lossless import TASKS, digest, held_out_prompts, read_records, run_setting
from experiments.study.plots import draw, lines
from experiments.study.resample import draws, interval, ratio
from experiments.study.tables import Figure
from reanchor_jax import DecodeConfig, Pair, ReanchorError, check_pair
from reanchor_jax.checkpoint import load_drafter, load_target
from reanchor_jax.cli import process
from reanchor_jax.default_pair import DEFAULT_PAIR, drafter_source, target_source
from reanchor_jax.files import write_whole
from reanchor_jax.tokenizer import load_tokenizer


def taus(records: Sequence[dict[str, Any]], tasks: Sequence[str]) -> dict[str, np.ndarray]:
    """tau of each task, committed tokens over rounds, and their `mean`; the value, then resampled ones."""
    statistics = {}
    for task in tasks:
        rows = [record["committed_per_round"] for record in records if record["task"] == task]
        counts = draws(len(rows), 0)
        statistics[task] = ratio(counts @ np.array([sum(row) for row in rows]), counts @ np.array([*map(len, rows)]))
    return statistics | {"mean": np.mean([*statistics.values()], axis=0)}


def write_curve(curve: dict[int, dict[str, np.ndarray]], folder: Path) -> str:
    """Writes table and figure of tau by blocks trained; returns the table as CSV."""
    table = io.StringIO()
    rows = csv.writer(table, lineterminator="\n")
    rows.writerow(["blocks", *next(iter(curve.values())), "mean_low", "mean_high"])
    for blocks, statistics in curve.items():
        low, high = interval(statistics["mean"])[1:]
        rows.writerow([blocks, *(f"{x:.3f}" for x in (*(s[0] for s in statistics.values()), low, high))])
    write_whole(folder / "curve.csv", table.getvalue())
    means = {"mean of the tasks": [statistics["mean"] for statistics in curve.values()]}
    plot = lines([round(blocks / 1000) for blocks in curve], means, "thousand blocks trained", "tau, held-out prompts")
    draw(Figure("curve", "tau against blocks trained", plot), folder)
    return table.getvalue()


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--drafters", nargs="+", required=True, metavar="BLOCKS=FOLDER")
    parser.add_argument("--out", type=Path, default=Path("runs/drafter_curve"))
    parser.add_argument("--tasks", nargs="+", default=[*TASKS, "math500"])
    parser.add_argument("--per-task", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prompt-size", type=int, default=256, help="longer prompts are left out")
    options = parser.parse_args()
    places = {}
    for given in options.drafters:
        blocks, equals, folder = given.partition("=")
        if not equals or not blocks.isdecimal():
            raise ReanchorError(f"--drafters has {given!r}; expected BLOCKS=FOLDER, as 75000=runs/mine/drafter")
        if int(blocks) in places:
            raise ReanchorError(f"--drafters has {int(blocks)} twice; expected a number of its own for each")
        places[int(blocks)] = drafter_source(folder)
    source, size = target_source(DEFAULT_PAIR), options.prompt_size
    target, tokenizer = load_target(source), load_tokenizer(source)
    assert tokenizer is not None
    prompts = list(held_out_prompts(options.prompts, options.tasks, options.per_task, tokenizer, size))
    if {task for task, _, _ in prompts} != set(options.tasks):
        raise ReanchorError(f"a task has no prompt of at most {size} tokens; raise --prompt-size, or leave it out")
    curve = {}
    for blocks, place in sorted(places.items()):
        drafter = load_drafter(place)
        check_pair(target, drafter)
        run_id = {"drafter": digest(drafter), "new_tokens": options.new_tokens}
        path, name = options.out / "records" / f"{run_id['drafter']}-{options.new_tokens}.jsonl", "dflash T=0 greedy"
        done = read_records(path, run_id)
        run_setting(Pair(target, drafter), name, DecodeConfig(method="dflash"), prompts, size, run_id, done, path)
        curve[blocks] = taus([done[name, task, row] for task, row, _ in prompts], options.tasks)
    print(write_curve(curve, options.out), end="")
    return 0


if __name__ == "__main__":
    sys.exit(process.run(main))
