"""The command `python -m reanchor_jax.trace`: a trace as one HTML page."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from reanchor_jax.cli.flags import Parser
from reanchor_jax.cli.output import check_writable
from reanchor_jax.cli.process import run
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole
from reanchor_jax.trace_view.page import make_page, statistics
from reanchor_jax.trace_view.read import read_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (see `--help`)."""
    return run(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m reanchor_jax.trace",
        description="Shows a trace of `python -m reanchor_jax.generate --trace FILE` as one HTML page: every token by "
        "where it came from, every round with its trie. The page opens offline.",
        epilog="exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the trace, JSONL")
    parser.add_argument("--html", type=Path, required=True, metavar="OUT", help="the page (replaces OUT)")
    flags = parser.parse_args(argv)
    if os.path.realpath(flags.file) == os.path.realpath(flags.html):
        raise ReanchorError(f"--html {flags.html} is the trace itself; name another file")
    check_writable("--html", flags.html)
    trace = read_trace(flags.file)
    for notice in trace.notices:
        print(f"note: {notice}", file=sys.stderr)
    write_whole(flags.html, make_page(trace, flags.file.name))
    numbers = statistics(trace.sequences)
    shares = ", ".join(f"{count} {origin}" for origin, count in numbers["origins"].items())
    texts = f"{len(trace.sequences)} text{'s' if len(trace.sequences) != 1 else ''}"
    print(f"{flags.html}: {texts}, {numbers['rounds']} rounds, {numbers['tokens']} tokens ({shares})")
    return 0
