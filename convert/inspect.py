"""What a checkpoint holds, where each tensor goes, and what is missing."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp

from convert.convert import open_plan
from reanchor_jax.checkpoint.converted_source import ConvertedSource
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.load import Plan


def inspect(path: Path) -> int:
    """Prints both sides; returns the exit code: 0 the checkpoint fits its model, 1 it does not."""
    plan = open_plan(path, jnp.dtype("float32"))
    parameters = named_parameters(plan.abstract)
    if isinstance(plan.source, ConvertedSource):
        _print_manifest(path, plan.source)
    else:
        print(f"{path}: {len(plan.source.tensors)} tensors, {len(parameters)} parameters")
        for name, found in sorted(plan.source.tensors.items()):
            slot = plan.slots.get(name)
            goes = "-" if slot is None else slot.path if slot.layer is None else f"{slot.path}[{slot.layer}]"
            print(f"  {name}  {list(found.shape)} {found.dtype}  ->  {goes}")
    return _print_fit(plan)


def _print_manifest(path: Path, source: ConvertedSource) -> None:
    manifest = source.manifest
    print(f"{path}: a converted {manifest.kind}, {manifest.dtype}, chunks for {manifest.mesh} devices")
    print(f"source: {manifest.source}" + (f" at {manifest.revision}" if manifest.revision else ""))
    if manifest.commit:
        print(f"commit: {manifest.commit}")
    print("packages: " + ", ".join(f"{name} {version}" for name, version in manifest.packages.items()))
    print("source files:")
    for name, record in manifest.source_files.items():
        print(f"  {name}  {record.bytes} bytes  sha256 {record.sha256}")
    print("tensors:")
    for name, record in manifest.tensors.items():
        goes = record.parameter if record.row is None else f"{record.parameter}[{record.row}]"
        print(f"  {name}  ->  {goes}  sha256 {record.sha256}")


def _print_fit(plan: Plan) -> int:
    print("parameters:")
    for name, leaf in named_parameters(plan.abstract).items():
        stored = plan.source.tensors.get(name)
        dtype = f" {stored.dtype}" if isinstance(plan.source, ConvertedSource) and stored is not None else ""
        print(f"  {name}  {list(leaf.shape)}{dtype}")
    for title, entries in plan.fit._asdict().items():
        for entry in entries:
            print(f"{title}: {entry}")
    fits = not any(plan.fit)
    print("fits" if fits else "does not fit")
    return 0 if fits else 1
