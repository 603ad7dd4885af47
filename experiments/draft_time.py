"""What a head costs: time of drafting 16 blocks with each kind of head, side by side.

    python -m experiments.draft_time [--target SOURCE] [--drafter SOURCE] [--repeats 15]

Puts fresh heads (Domino, DSpark) on a DFlash drafter's backbone: weights do not change how long a
program takes. The programs take turns, after one call each that is not timed; compile time apart.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp

from reanchor_jax import DecodeConfig, Pair, ReanchorError, load_pair
from reanchor_jax.cli import process
from reanchor_jax.config import DominoConfig, DSparkConfig, HeadConfig
from reanchor_jax.default_pair import DEFAULT_PAIR
from reanchor_jax.draft import draft_blocks
from reanchor_jax.prefill import prefill
from reanchor_jax.training.start import with_head


def heads(rank: int, gru: int) -> dict[str, HeadConfig | None]:
    """Names and configs; None is the drafter's own."""
    domino = DominoConfig(emb_dim=rank, gru_hidden_dim=gru, shift_label=False, pure_draft_prefix_len=1)
    dspark = {
        kind: DSparkConfig(
            markov_rank=rank, markov_head_type=kind, enable_confidence_head=True, confidence_head_with_markov=True
        )
        for kind in ("vanilla", "gated", "rnn")
    }
    return {"dflash": None, "domino": domino, **{f"dspark {kind}": config for kind, config in dspark.items()}}


def main() -> int:
    """Prints one row for each head; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=DEFAULT_PAIR)
    parser.add_argument("--drafter", default=DEFAULT_PAIR)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--gru", type=int, default=256)
    options = parser.parse_args()
    own = load_pair(options.target, options.drafter)
    if own.drafter is None:
        raise ReanchorError("--drafter is missing; expected a DFlash drafter for the target")
    programs = {}
    for name, head in heads(options.rank, options.gru).items():
        drafter = own.drafter if head is None else with_head(own.target, own.drafter, head, seed=0)
        pair, config = Pair(own.target, drafter), DecodeConfig()
        prompt = jnp.arange(64, dtype=jnp.int32)
        state = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))(
            pair, prompt, jnp.int32(64), key=jax.random.key(0), config=config, max_new_tokens=64
        )
        start = time.monotonic()
        program = (
            jax.jit(draft_blocks, static_argnames="config").lower(pair, state, config=config, noise=None).compile()
        )
        programs[name] = (program, pair, state, time.monotonic() - start)
        jax.block_until_ready(program(pair, state, noise=None))
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(options.repeats):
        for name, (program, pair, state, _) in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program(pair, state, noise=None))
            seconds[name].append(time.perf_counter() - start)
    base = statistics.median(seconds["dflash"])
    num_blocks = own.drafter.config.block_size
    print(f"| head | ms to draft {num_blocks} blocks | against dflash | compile s |\n|---|---|---|---|")
    for name, (_, _, _, compiling) in programs.items():
        median = statistics.median(seconds[name])
        print(f"| {name} | {1000 * median:.0f} | {median / base:.2f} | {compiling:.1f} |")
    return 0


if __name__ == "__main__":
    sys.exit(process.run(main))
