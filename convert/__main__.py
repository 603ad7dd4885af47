"""`python -m convert inspect SOURCE`: what a checkpoint holds, and where each tensor goes."""

from __future__ import annotations

import sys
from pathlib import Path

import jax.numpy as jnp

from reanchor_jax.checkpoint.drafter_config import is_drafter
from reanchor_jax.checkpoint.fill import named_parameters
from reanchor_jax.checkpoint.hub import resolve
from reanchor_jax.checkpoint.load import Plan, plan_drafter, plan_target
from reanchor_jax.cli.flags import Parser
from reanchor_jax.cli.process import run
from reanchor_jax.default_pair import target_source


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code: 0 fits, 1 does not fit, 2 cannot be read."""
    return run(lambda: _inspect(arguments))


def _inspect(arguments: list[str] | None) -> int:
    parser = Parser(
        prog="python -m convert",
        description="Prints what a checkpoint holds, where each tensor goes, and what is missing.",
        epilog="exit codes: 0 fits; 1 does not fit; 2 cannot be read, one line on stderr",
    )
    parser.add_argument("command", choices=("inspect",))
    parser.add_argument("source", help="folder, GGUF file, hub id org/name, or smollm2-135m (its target)")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    options = parser.parse_args(arguments)
    path = resolve(target_source(options.source), options.revision)
    plan = plan_drafter(path, jnp.dtype("float32")) if is_drafter(path) else plan_target(path, jnp.dtype("float32"))
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
