"""`python -m convert`: checkpoints into Orbax's format, and what is in them."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from convert.convert import convert
from convert.inspect import inspect
from convert.partial import check_out
from convert.verify import differences
from reanchor_jax.checkpoint.hub import resolve
from reanchor_jax.checkpoint.load import float_dtype
from reanchor_jax.cli.flags import Parser, folder, whole
from reanchor_jax.cli.process import run
from reanchor_jax.default_pair import DEFAULT_PAIR, drafter_source, target_source
from reanchor_jax.errors import ReanchorError

_COMMANDS = ("convert", "inspect", "verify")
_EPILOG = f"""\
python -m convert SOURCE --out DIR     writes an Orbax checkpoint with a manifest (`convert convert` is the same)
python -m convert inspect SOURCE       prints what a checkpoint, converted or not, holds and what is missing
python -m convert verify DIR SOURCE    compares a converted checkpoint with its source, by hash

SOURCE is a target or drafter: a hub id, a folder, a GGUF file, or {DEFAULT_PAIR} (its target; its drafter with
--drafter). DIR takes its place when it is complete: until then it is DIR.partial.

exit codes: 0 done, fits, equal; 1 does not fit, differs; 2 bad input, one line on stderr; 130 interrupted
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs a command; returns its exit code (see `--help`)."""
    return run(lambda: _main(sys.argv[1:] if arguments is None else arguments))


def _main(arguments: list[str]) -> int:
    logging.getLogger("absl").setLevel(logging.ERROR)  # Orbax warns about what it does not find in a new folder
    if not any(argument in (*_COMMANDS, "-h", "--help") for argument in arguments[:1]):
        arguments = ["convert", *arguments]
    parser = Parser(prog="python -m convert", description="Converts checkpoints, and looks into them.", epilog=_EPILOG)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    options = _parse(commands, parser, arguments)
    if options.command == "convert":
        dtype = None if options.dtype is None else float_dtype(options.dtype)
        check_out(options.out, options.force)  # before anything is fetched
        manifest = convert(
            _find(options.source, options),
            options.out,
            source=options.source,
            revision=options.revision,
            dtype=dtype,
            mesh=options.mesh,
            force=options.force,
        )
        size = sum(record.bytes for record in manifest.files.values())
        print(f"{options.out}: {manifest.kind}, {manifest.dtype}, {len(manifest.parameters)} parameters, {size} bytes")
        return 0
    if options.command == "inspect":
        return inspect(_find(options.source, options))
    count = 0
    for count, line in enumerate(differences(options.dir, _find(options.source, options)), 1):  # noqa: B007
        print(line)
    print(f"{count} differences" if count else "equal")
    return 1 if count else 0


def _parse(commands: argparse._SubParsersAction, parser: Parser, arguments: list[str]) -> argparse.Namespace:
    def add(name: str, description: str) -> argparse.ArgumentParser:
        prog = f"python -m convert {name}".removesuffix(" convert")
        return commands.add_parser(name, prog=prog, description=description, epilog=_EPILOG, help=description)

    def add_source(command: argparse.ArgumentParser) -> None:
        command.add_argument("source", metavar="SOURCE", help=f"hub id, folder, GGUF file or {DEFAULT_PAIR}")
        command.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub id")
        command.add_argument("--drafter", action="store_true", help=f"of {DEFAULT_PAIR}, the drafter")

    command = add("convert", "Converts a checkpoint to Orbax's format, with a manifest.")
    add_source(command)
    command.add_argument("--out", type=folder, required=True, metavar="DIR", help="folder to write")
    dtype_help = "of the parameters; default: the source's, float32 where it has several"
    command.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help=dtype_help)
    mesh_help = "devices whose parts the chunks are (default %(default)s); any number of devices can restore it"
    command.add_argument("--mesh", type=whole(1, 1 << 16), default=1, metavar="N", help=mesh_help)
    command.add_argument("--force", action="store_true", help="replace a converted checkpoint in DIR")
    add_source(add("inspect", "Prints what a checkpoint holds, where each tensor goes, and what is missing."))
    command = add("verify", "Compares a converted checkpoint with its source, tensor by tensor.")
    command.add_argument("dir", type=Path, metavar="DIR", help="converted checkpoint")
    add_source(command)
    return parser.parse_args(arguments)


def _find(source: str, options: argparse.Namespace) -> Path:
    """The path of a source on this machine, fetched if need be."""
    if options.drafter and source != DEFAULT_PAIR:
        raise ReanchorError(
            f"--drafter tells the two models of {DEFAULT_PAIR} apart; expected no such flag with {source}"
        )
    return resolve((drafter_source if options.drafter else target_source)(source), options.revision)


if __name__ == "__main__":
    sys.exit(main())
