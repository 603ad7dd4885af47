"""The log of a training run: `log.jsonl`, and what is derived from it.

A line of `log.jsonl` is a record: {"step": 20, "loss": 3.2, ..} every few steps, {"step": 20,
"held_out": {..}} for an evaluation. It is the source of truth. `log.csv`, the plot and
TensorBoard's event files are functions of the records, made again whenever a run starts or
resumes: what is beyond the restored checkpoint vanishes from all of them at once.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole
from reanchor_jax.training import plot
from reanchor_jax.training.tensorboard import EventFile

Record = dict[str, Any]

OnStep = Callable[[int, Mapping[str, float]], None]
"""Gets the number of finished steps, and the latest value of everything that was logged (`scalars`)."""

COLUMNS = (
    *("step", "blocks", "loss", "learning_rate", "blocks_per_second"),
    *("held_out_loss", "proxy_tau", "tau"),
)
"""First columns of `log.csv`; accuracies and what else a recipe logs are behind them."""


def ignore_step(step: int, latest: Mapping[str, float]) -> None:
    """An `OnStep` that does nothing."""


def scalars(record: Record) -> dict[str, float]:
    """The numbers of a record, by one name each, without its step.

    Example: {"step": 9, "held_out": {"loss": 3.0, "proxy_tau": 1.8, "accuracy": [0.5, 0.2]}} gives
    held_out_loss 3.0, proxy_tau 1.8, accuracy_1 0.5, accuracy_2 0.2; {"rollout": {"tau": 1.5}}
    gives rollout_tau 1.5.
    """
    flat: dict[str, float] = {}
    for group, value in record.items():
        for name, inner in value.items() if isinstance(value, dict) else [("", value)]:
            # Only `loss` has a namesake among the numbers of training.
            full = name if group == "held_out" and name != "loss" else "_".join(filter(None, (group, name)))
            if isinstance(inner, list):
                flat |= {f"{full}_{place}": number for place, number in enumerate(inner, 1)}
            elif full != "step":
                flat[full] = inner
    return flat


def table(records: Sequence[Record], blocks_per_step: int) -> list[dict[str, float]]:
    """One row for each step that has a record, in order; `blocks` are the blocks trained until then."""
    rows: dict[int, dict[str, float]] = {}
    for record in records:
        step = record["step"]
        rows.setdefault(step, {"step": step, "blocks": step * blocks_per_step}).update(scalars(record))
    return [rows[step] for step in sorted(rows)]


def csv_text(rows: Sequence[Mapping[str, float]]) -> str:
    """`table`'s rows as CSV with a header; a number that a step does not have is an empty field."""
    names = dict.fromkeys(name for row in rows for name in row if name not in COLUMNS)
    of_accuracy = [name for name in names if name.startswith("accuracy_")]
    others = [name for name in names if not name.startswith("accuracy_")]
    file = io.StringIO()
    writer = csv.DictWriter(file, [*COLUMNS, *of_accuracy, *others], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def read_until(path: Path, step: int) -> list[Record]:
    """The records up to a step, the checkpoint's; forgets later ones, so that no step is logged twice.

    Raises:
      ReanchorError: a line is no record. Half a line at the end, from a run that was killed, is forgotten.
    """
    if not path.exists():
        return []
    kept = []
    *lines, _ = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        if not _is_record(record):
            raise ReanchorError(f"{path} line {number} is {str(line[:40])[2:-1]}; expected a record: remove that line")
        if record["step"] <= step:
            kept.append(record)
    write_whole(path, "".join(json.dumps(record) + "\n" for record in kept))
    return kept


def _is_record(value: Any) -> TypeGuard[Record]:
    """Whether a value is one that `Log.append` writes a line of."""
    if not isinstance(value, dict):
        return False
    inner = [x for group in value.values() for x in (group.values() if isinstance(group, dict) else [group])]
    numbers = [x for each in inner for x in (each if isinstance(each, list) else [each])]
    held_out = value.get("held_out", {"proxy_tau": 1.0})
    return (
        type(value.get("step")) is int
        and all(type(x) is float or (type(x) is int and abs(x) < 1 << 63) for x in numbers)
        and isinstance(held_out, dict)
        and type(held_out.get("proxy_tau")) is float
    )


class Log:
    """The records of a run and everything made from them, in the run's folder."""

    def __init__(
        self, folder: Path, step: int, blocks_per_step: int, *, tensorboard: bool, echo: Callable[[str], None]
    ):
        """Reads what an earlier process logged.

        Args:
          folder: of the run.
          step: of the checkpoint that the run goes on from, 0 for a new run.
          blocks_per_step: blocks that a step trains on at most; short texts have fewer.
          tensorboard: whether to write event files too.
          echo: gets a line where a plot cannot be drawn.

        Raises:
          ReanchorError: event files are wanted and their library is not installed.
        """
        self.folder, self.blocks_per_step, self.echo = folder, blocks_per_step, echo
        self.records = read_until(folder / "log.jsonl", step)
        self.latest: dict[str, float] = {}
        for record in self.records:
            self.latest |= scalars(record)
        self._events = EventFile(folder / "tensorboard") if tensorboard else None
        for record in self.records if self._events else ():
            self._to_events(record)
        self._drawn = 0
        if step:
            self.publish()

    def append(self, record: Record) -> None:
        """Adds a record, as one line of log.jsonl."""
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        self.latest |= scalars(record)
        self._to_events(record)

    def is_evaluated(self, step: int) -> bool:
        """Whether an evaluation after `step` steps is there."""
        return any(record["step"] == step and "held_out" in record for record in self.records)

    def publish(self) -> None:
        """Writes log.csv, and the plot where there is a new evaluation."""
        rows = table(self.records, self.blocks_per_step)
        write_whole(self.folder / "log.csv", csv_text(rows))
        evaluations = sum("held_out" in record for record in self.records)
        if evaluations > self._drawn:
            if not plot.draw(rows, self.folder) and not self._drawn:
                self.echo("no plot is drawn: matplotlib is not installed; pip install matplotlib")
            self._drawn = evaluations
        if self._events is not None:
            self._events.flush()

    def close(self) -> None:
        """Ends the event file."""
        if self._events is not None:
            self._events.close()

    def _to_events(self, record: Record) -> None:
        if self._events is not None:
            self._events.add(record["step"], scalars(record))
