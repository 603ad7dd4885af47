"""The manifest of a converted checkpoint: where it comes from, what it holds, and which files are its own.

A converted checkpoint is a folder:

    reanchor_manifest.json   this file's subject, written last
    config.json, tokenizer.json, ..   the source's own
    parameters/              an Orbax checkpoint: a flat dict of arrays by parameter name
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

from reanchor_jax.checkpoint.fields import Fields, read_json
from reanchor_jax.errors import ReanchorError

MANIFEST, PARAMETERS = "reanchor_manifest.json", "parameters"
_FORMAT, _VERSION = "reanchor_jax converted checkpoint", 1
_PACKAGES = (
    "reanchor-jax",
    "jax",
    "flax",
    "numpy",
    "ml-dtypes",
    "safetensors",
    "gguf",
    "orbax-checkpoint",
    "tensorstore",
)
AGAIN = "convert the source again"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileRecord:
    """One file, as it was written or read."""

    bytes: int
    sha256: str | None
    """None for a chunk of a parameter: it carries a checksum of its own, which every read compares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterRecord:
    """One array of the Orbax checkpoint."""

    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorRecord:
    """What one tensor of the source became."""

    parameter: str
    row: int | None
    """On axis 0 of a stacked parameter; None: the whole parameter."""
    sha256: str
    """Of its little-endian bytes in row-major order, in the converted dtype."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of the manifest."""

    kind: str
    """target or drafter."""
    source: str
    """As it was given."""
    revision: str | None
    """As it was given."""
    commit: str | None
    """Of the hub's repository, where the source is one."""
    source_files: dict[str, FileRecord]
    config: dict[str, Any]
    """Contents of config.json."""
    dtype: str
    mesh: int
    """Number of devices whose parts the chunks are; any other number can restore it as well."""
    packages: dict[str, str]
    parameters: dict[str, ParameterRecord]
    tensors: dict[str, TensorRecord]
    """By the source's names."""
    files: dict[str, FileRecord]
    """All files of the folder but the manifest."""

    def write(self, folder: Path) -> None:
        """Writes it into a folder that holds everything else."""
        data = {"format": _FORMAT, "version": _VERSION, **dataclasses.asdict(self)}
        with (folder / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(json.dumps(data, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())


def is_converted(folder: Path) -> bool:
    """Whether it is a folder with a manifest."""
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Reads the manifest.

    Raises:
      ReanchorError: it is missing, damaged, or of another version.
    """
    fields = Fields(read_json(folder / MANIFEST), str(folder / MANIFEST))
    for name, value in (("format", _FORMAT), ("version", _VERSION)):
        fields.get(name)
        fields.only(name, value, why=f"{AGAIN} with this version")
    parameters, tensors = fields.section("parameters"), fields.section("tensors")
    manifest = Manifest(
        **{name: _text(fields, name) for name in ("kind", "source", "dtype")},
        **{name: _text(fields, name, True) for name in ("revision", "commit")},
        mesh=fields.integer("mesh", 1, 1 << 20),
        config=fields.section("config").data,
        packages={name: str(value) for name, value in fields.section("packages").data.items()},
        source_files=_files(fields.section("source_files")),
        parameters={name: _parameter(parameters.section(name)) for name in parameters.data},
        tensors={name: _tensor(tensors.section(name)) for name in tensors.data},
        files=_files(fields.section("files")),
    )
    fields.finish()
    return manifest


def check_files(folder: Path, files: dict[str, FileRecord]) -> None:
    """Raises ReanchorError where files are missing, damaged or more than the manifest names."""
    found = set(list_files(folder)) - {MANIFEST}
    missing, extra = sorted(files.keys() - found), sorted(found - files.keys())
    if missing:
        raise ReanchorError(f"{folder} lacks {len(missing)} of {len(files)} files: {missing[0]}, ..; {AGAIN}")
    if extra:
        raise ReanchorError(
            f"{folder} holds {len(extra)} files that its manifest does not name: {extra[0]}, ..; move them elsewhere"
        )
    for name, record in files.items():
        got = record_file(folder / name, hashed=record.sha256 is not None)
        if got.bytes != record.bytes:
            raise ReanchorError(f"{folder / name} has {got.bytes} bytes; expected {record.bytes}: {AGAIN}")
        if got != record:
            raise ReanchorError(
                f"{folder / name} has SHA-256 {got.sha256}; expected {record.sha256}, as it was written: {AGAIN}"
            )


def list_files(folder: Path) -> list[str]:
    """Everything below a folder that is no folder, by its path from there; links are not followed."""
    return sorted(
        (Path(root) / name).relative_to(folder).as_posix() for root, _, names in os.walk(folder) for name in names
    )


def record_file(path: Path, *, hashed: bool) -> FileRecord:
    """Size and, if wanted, SHA-256 of a file.

    Raises:
      ReanchorError: it cannot be read.
    """
    try:
        size = path.stat().st_size
        if not hashed:
            return FileRecord(bytes=size, sha256=None)
        with path.open("rb") as file:
            return FileRecord(bytes=size, sha256=hashlib.file_digest(file, "sha256").hexdigest())
    except OSError as error:
        raise ReanchorError(f"{path} cannot be read: {error.strerror}; check its permissions") from None


def package_versions() -> dict[str, str]:
    """Versions of Python and of the packages that take part in a conversion."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in _PACKAGES}


def _text(fields: Fields, name: str, may_be_null: bool = False) -> Any:
    value = fields.get(name)
    if not isinstance(value, str) and not (may_be_null and value is None):
        raise fields.fail(name, value, "a text or null" if may_be_null else "a text")
    return value


def _files(fields: Fields) -> dict[str, FileRecord]:
    sections = {name: fields.section(name) for name in fields.data}
    return {
        name: FileRecord(bytes=section.integer("bytes", 0, 1 << 62), sha256=_text(section, "sha256", True))
        for name, section in sections.items()
    }


def _parameter(fields: Fields) -> ParameterRecord:
    return ParameterRecord(shape=fields.integers("shape", 0, 1 << 40), dtype=_text(fields, "dtype"))


def _tensor(fields: Fields) -> TensorRecord:
    row = fields.get("row")
    return TensorRecord(
        parameter=_text(fields, "parameter"),
        row=None if row is None else fields.integer("row", 0, 1 << 20),
        sha256=_text(fields, "sha256"),
    )
