"""Records of a run: one JSON line per prompt and setting, appended as it comes."""

from __future__ import annotations

import dataclasses
import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.study.settings import Study
from reanchor_jax.errors import ReanchorError

Record = dict[str, Any]


class Records:
    """The records of one folder, `records.jsonl`, or `records.jsonl.gz` to be read only.

    A run that was killed while it wrote leaves half a line, which is cut off. A record is known by
    its setting, dataset and row.
    """

    def __init__(self, folder: Path, study: Study | None = None):
        """Reads what is there.

        Args:
          folder: where the file is, or will be.
          study: what is about to run; None to read whatever study the records are of.

        Raises:
          ReanchorError: records of another study, no record where `study` is None, a damaged line.
        """
        self._path = folder / "records.jsonl"
        self._records: dict[tuple[str, str, int], Record] = {}
        found: dict[str, Any] | None = None
        for number, record in self._read(folder):
            found = _join(found or record["study"], record["study"], f"{self._path} line {number}")
            self._records[record["setting"], record["dataset"], record["row"]] = record
        if study is None and found is None:
            raise ReanchorError(f"{folder} has no records; run an experiment with --out {folder} first")
        if study is not None and found is not None:
            _join(found, dataclasses.asdict(study), "this run")
        self.study: Study = study if study is not None else Study(**(found or {}))

    def _read(self, folder: Path) -> Iterator[tuple[int, Record]]:
        packed = folder / "records.jsonl.gz"
        if self._path.exists():
            data = self._path.read_bytes()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                with self._path.open("r+b") as file:
                    file.truncate(whole)
            data = data[:whole]
        else:
            data = gzip.decompress(packed.read_bytes()) if packed.exists() else b""
        for number, line in enumerate(data.splitlines(), start=1):
            try:
                record = json.loads(line)
                _ = record["study"], record["setting"], record["dataset"], record["row"]
            except (ValueError, TypeError, KeyError) as error:
                raise ReanchorError(
                    f"{self._path} line {number} is no record: {type(error).__name__} {error}; remove that line"
                ) from None
            yield number, record

    def get(self, setting: str, dataset: str, row: int, prompt: str | None = None) -> Record | None:
        """The record of a setting and prompt, if it is there; `prompt` is the prompt's fingerprint.

        Raises:
          ReanchorError: the row was another prompt then.
        """
        record = self._records.get((setting, dataset, row))
        if record is not None and prompt is not None and record["prompt"] != prompt:
            raise ReanchorError(
                f"{self._path} answers another prompt as row {row} of {dataset}; use another --out, or the same files"
            )
        return record

    def add(self, record: Record) -> None:
        """Appends one record."""
        if not self._path.exists() and (packed := self._path.with_name("records.jsonl.gz")).exists():
            raise ReanchorError(f"{packed} is packed; unpack it with gunzip to go on with its run")
        self._records[record["setting"], record["dataset"], record["row"]] = record
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def __iter__(self) -> Iterator[Record]:
        return iter(self._records.values())


def _join(found: dict[str, Any], other: dict[str, Any], where: str) -> dict[str, Any]:
    """A study with the variants of both: others may join later. Raises ReanchorError where anything else differs."""
    variants = {**other["variants"], **found["variants"]}
    differing = [name for name in found if name != "variants" and found[name] != other.get(name)]
    if any(variants[name] != size for name, size in other["variants"].items()):
        differing.append("variants")
    if differing:
        name = differing[0]
        raise ReanchorError(
            f"the records there are of another study: {name} is {found[name]!r}, in {where} it is {other.get(name)!r}; "
            "use another --out"
        )
    return {**found, "variants": variants}
