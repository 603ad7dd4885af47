"""`python -m convert inspect SOURCE`: what a checkpoint holds, and where each tensor goes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import jax.numpy as jnp

from reanchor_jax.checkpoint.dflash_config import is_drafter
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.hub import resolve
from reanchor_jax.checkpoint.load import Plan, plan_drafter, plan_target
from reanchor_jax.errors import ReanchorError


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0 fits, 1 does not fit, 2 cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    inspect = commands.add_parser("inspect", help="print both sides of a checkpoint and what is missing")
    inspect.add_argument("source", help="folder, GGUF file, or hub id org/name")
    inspect.add_argument("--revision", help="branch, tag or commit of a hub id")
    options = parser.parse_args(arguments)
    try:
        path = resolve(options.source, options.revision)
        plan = plan_drafter(path, jnp.dtype("float32")) if is_drafter(path) else plan_target(path, jnp.dtype("float32"))
    except ReanchorError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return _print(plan, path)


def _print(plan: Plan, path: Path) -> int:
    parameters = named_parameters(plan.abstract)
    print(f"{path}: {len(plan.source.tensors)} tensors, {len(parameters)} parameters")
    for name, found in sorted(plan.source.tensors.items()):
        slot = plan.slots.get(name)
        goes = "-" if slot is None else slot.path if slot.layer is None else f"{slot.path}[{slot.layer}]"
        print(f"  {name}  {list(found.shape)} {found.dtype}  ->  {goes}")
    print("parameters:")
    for name, leaf in parameters.items():
        print(f"  {name}  {list(leaf.shape)}")
    for title, entries in plan.fit._asdict().items():
        for entry in entries:
            print(f"{title}: {entry}")
    fits = not any(plan.fit)
    print("fits" if fits else "does not fit")
    return 0 if fits else 1


if __name__ == "__main__":
    sys.exit(main())
