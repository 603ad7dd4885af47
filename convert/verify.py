"""Whether a converted checkpoint holds what its source says, tensor by tensor."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp

from convert.convert import open_plan
from convert.progress import Advance, progress
from convert.write import CHUNK_BYTES, as_bytes
from reanchor_jax.checkpoint.converted_source import ConvertedSource
from reanchor_jax.checkpoint.fill import named_parameters, tensor_pieces
from reanchor_jax.checkpoint.load import Plan
from reanchor_jax.checkpoint.manifest import is_converted
from reanchor_jax.checkpoint.rules import Slot
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target


def differences(folder: Path, path: Path) -> Iterator[str]:
    """Reads both sides and compares them; yields a line for each thing that differs.

    Every tensor of the source is transformed and cast as in a conversion to the folder's dtype, and
    its SHA-256 compared with that of what the folder holds, and with the manifest's.

    Args:
      folder: the converted checkpoint.
      path: the source, in whatever format.

    Raises:
      ReanchorError: either cannot be read, or the source does not fit its config.
    """
    if not folder.exists():
        raise ReanchorError(f"{folder} does not exist; expected a folder that `python -m convert` wrote")
    if not is_converted(folder):
        raise ReanchorError(f"{folder} is no converted checkpoint; expected a folder that `python -m convert` wrote")
    plan = open_plan(folder, jnp.dtype("float32"))
    assert isinstance(plan.source, ConvertedSource)
    manifest = plan.source.manifest
    dtype = jnp.dtype(manifest.dtype)
    converted, source = open_plan(folder, dtype), open_plan(path, dtype)
    converted.check()
    source.check()
    source.check_contents()
    if type(converted.abstract) is not type(source.abstract):
        what = {True: "a target", False: "a drafter"}
        kinds = [what[isinstance(plan.abstract, Target)] for plan in (converted, source)]
        yield f"config: {folder} is {kinds[0]}, {path} {kinds[1]}"
        return
    for field in dataclasses.fields(source.abstract.config):
        left, right = (getattr(plan.abstract.config, field.name) for plan in (converted, source))
        if left != right:
            yield f"config: {field.name} {left} differs from {right}"
    ours, theirs = named_parameters(converted.abstract), named_parameters(source.abstract)
    for name in sorted(ours.keys() ^ theirs.keys()):
        yield f"{name}: only in {folder if name in ours else path}"
    recorded = {(record.parameter, record.row): record.sha256 for record in manifest.tensors.values()}
    with progress(sum(leaf.size * leaf.dtype.itemsize for leaf in theirs.values())) as advance:
        for name, slot in source.slots.items():
            what, leaf = _name(name, slot), theirs[slot.path]
            if slot.path not in ours:
                continue
            if ours[slot.path].shape != leaf.shape:
                yield f"{what}: {list(ours[slot.path].shape)} differs from {list(leaf.shape)}"
                continue
            digest = _digest(source, name, slot, leaf, advance)
            if _digest_of_row(converted, slot, leaf) != digest:
                yield f"{what}: values differ"
            elif recorded.get((slot.path, slot.layer), digest) != digest:
                yield f"{what}: values are the source's, but not what the manifest recorded"


def _name(name: str, slot: Slot) -> str:
    goes = slot.path if slot.layer is None else f"{slot.path}[{slot.layer}]"
    return goes if name == goes else f"{name} -> {goes}"


def _digest(plan: Plan, name: str, slot: Slot, leaf: jax.ShapeDtypeStruct, advance: Advance) -> str:
    digest = hashlib.sha256()
    for _, piece in tensor_pieces(plan.source, name, slot, leaf, plan.abstract.config.layer, _rows(slot, leaf)):
        digest.update(as_bytes(piece))
        advance(piece.nbytes)
    return digest.hexdigest()


def _digest_of_row(plan: Plan, slot: Slot, leaf: jax.ShapeDtypeStruct) -> str:
    """Of a tensor in the converted checkpoint, which is a row of a parameter or all of it."""
    shape = leaf.shape if slot.layer is None else leaf.shape[1:]
    at = () if slot.layer is None else (slice(slot.layer, slot.layer + 1),)
    rows, digest = _rows(slot, leaf), hashlib.sha256()
    rest = tuple(slice(0, size) for size in shape[1:])
    for start in range(0, shape[0] if shape else 1, rows):
        place = (slice(start, min(start + rows, shape[0])), *rest) if shape else ()
        digest.update(as_bytes(plan.source.read(slot.path, (*at, *place))))
    return digest.hexdigest()


def _rows(slot: Slot, leaf: jax.ShapeDtypeStruct) -> int:
    """How many rows of a tensor are read at a time."""
    axes = leaf.shape if slot.layer is None else leaf.shape[1:]
    row_bytes = leaf.dtype.itemsize
    for size in axes[1:]:
        row_bytes *= size
    return max(1, CHUNK_BYTES // row_bytes)
