"""The command `python -m reanchor_jax.profile`: measures what verification costs on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from reanchor_jax.cli.flags import Parser, whole
from reanchor_jax.cli.models import default_dtype, first_device
from reanchor_jax.cli.output import check_writable
from reanchor_jax.cli.process import run
from reanchor_jax.default_pair import DEFAULT_PAIR
from reanchor_jax.errors import ReanchorError
from reanchor_jax.files import write_whole
from reanchor_jax.pair import load_pair
from reanchor_jax.profile import Profile, measure, profile_text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code (see `--help`)."""
    return run(lambda: _run(argv), smaller="--most or --context")


def _run(argv: Sequence[str] | None) -> int:
    parser = Parser(
        prog="python -m reanchor_jax.profile",
        description="Measures what a round costs by the number of tokens it verifies, for --schedule hardware.",
        epilog="exit codes: 0 done; 2 bad input, one line on stderr; 130 interrupted",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="FILE", help="JSON, read by --profile of the other command")
    add("--target", default=DEFAULT_PAIR, metavar="SOURCE", help="hub id, folder, GGUF file or %(default)s (default)")
    add("--drafter", metavar="SOURCE", help=f"hub id, folder or {DEFAULT_PAIR}; without one drafting costs nothing")
    add("--revision", metavar="REV", help="hub revision of target and drafter")
    add("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 on accelerators")
    add("--most", type=whole(2, 4096), default=64, metavar="N", help="largest number of tokens (default %(default)s)")
    add("--context", type=whole(1), default=512, metavar="N", help="tokens before them (default %(default)s)")
    add("--repeats", type=whole(1), default=9, metavar="N", help="timed runs of each size (default %(default)s)")
    flags = parser.parse_args(argv)
    check_writable("--out", flags.out)
    dtype, device = flags.dtype or default_dtype(), first_device()
    pair = load_pair(flags.target, flags.drafter, dtype=jnp.dtype(dtype), revision=flags.revision)
    room = pair.target.config.max_position_embeddings
    if flags.context + flags.most > room:
        raise ReanchorError(
            f"--context {flags.context} and --most {flags.most} are {flags.context + flags.most} tokens; "
            f"expected at most {room}, the target's limit"
        )
    sizes = (*(n for n in range(1, flags.most) if _is_step(n)), flags.most)
    seconds, draft_seconds = measure(pair, sizes, context=flags.context, repeats=flags.repeats)
    source = f"{flags.target} on {device.device_kind}, {jax.device_count()} devices, {dtype}, context {flags.context}"
    write_whole(flags.out, profile_text(Profile(sizes, seconds, source, draft_seconds)))
    for n, s in zip(sizes, seconds, strict=True):
        print(f"{n:5} tokens {1000 * s:9.2f} ms, {s / seconds[0]:6.2f} times one token")
    if pair.drafter is not None:
        print(f"drafting     {1000 * draft_seconds:9.2f} ms, {draft_seconds / seconds[0]:6.2f} times one token")
    return 0


def _is_step(n: int) -> bool:
    """Sizes that are measured: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..: two to each doubling."""
    power = 1 << (n.bit_length() - 1)
    return n in (power, power + power // 2)
