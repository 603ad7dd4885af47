"""What a round costs by the number of tokens it verifies: measured, or estimated from the hardware's figures.

`python -m reanchor_jax.profile --target SOURCE --drafter SOURCE --out FILE` measures a pair on this
machine. Schedule `hardware` weighs every draft against these costs.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cache import KVCache, init_target_cache
from reanchor_jax.checkpoint.fields import Fields, read_json
from reanchor_jax.config import DecodeConfig, TargetConfig
from reanchor_jax.draft import draft_blocks
from reanchor_jax.errors import ReanchorError
from reanchor_jax.pair import Pair
from reanchor_jax.prefill import prefill
from reanchor_jax.sampling import top_tokens
from reanchor_jax.target import Target

FORMAT, KIND = 1, "round cost"

PEAKS = {
    # device kind, as JAX names it: operations a second in bfloat16, bytes a second of memory
    "TPU v4": (275e12, 1.2e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
}
"""The makers' figures for dense work."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds of verification at some numbers of tokens, and of drafting, which every round pays."""

    tokens: tuple[int, ...]
    """Rising, from 1."""
    seconds: tuple[float, ...]
    source: str
    """Where the seconds are from, in words."""
    draft_seconds: float = 0.0

    def costs(self, most: int) -> tuple[float, ...]:
        """Seconds of a round with 1, 2, .. `most` verified tokens.

        Between the known sizes on a straight line, beyond them on the last one. (A round pads its
        trie to a power of two; steps there would stop the scheduler at every one of them.)
        """
        tokens, seconds = np.array(self.tokens, float), np.array(self.seconds)
        if most > tokens[-1]:
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0
            tokens = np.append(tokens, most)
            seconds = np.append(seconds, seconds[-1] + max(slope, 0.0) * (most - tokens[-2]))
        return tuple(float(x) + self.draft_seconds for x in np.interp(np.arange(1, most + 1), tokens, seconds))


def roofline(config: TargetConfig, dtype: jnp.dtype, device_kind: str) -> Profile:
    """An estimate where nothing was measured: reading all weights once, or computing, whichever takes longer.

    The drafter's part of a round, small where memory is the limit, is left out.

    Args:
      config: of the target.
      dtype: of its weights.
      device_kind: as `jax.devices()[0].device_kind` says it.

    Raises:
      ReanchorError: a device or dtype without figures here.
    """
    if device_kind not in PEAKS or jnp.dtype(dtype) != jnp.bfloat16:
        raise ReanchorError(
            f"there is no roofline profile for {jnp.dtype(dtype).name} on the device {device_kind!r}, only for "
            f"bfloat16 on {', '.join(sorted(PEAKS))}; measure one: python -m reanchor_jax.profile"
        )
    operations, bandwidth = PEAKS[device_kind]
    weights = config.vocab_size * config.layer.hidden_size
    for layer in config.pattern:
        heads = 2 * layer.num_heads + (1 if layer.shared_kv else 2) * layer.num_kv_heads
        attention, mlp = heads * layer.head_dim * layer.hidden_size, 3 * layer.hidden_size * layer.intermediate_size
        weights += config.num_layers // len(config.pattern) * (attention + mlp)
    reading, computing = weights * jnp.dtype(dtype).itemsize / bandwidth, 2 * weights / operations
    # Flat up to the knee, where both take the same time, then a line through the origin.
    knee = max(1, math.floor(reading / computing))
    sizes = (1, knee, 2 * knee) if knee > 1 else (1, 2)
    seconds = tuple(max(reading, computing * n) for n in sizes)
    return Profile(sizes, seconds, f"roofline of {device_kind}, {jnp.dtype(dtype).name}")


def measure(pair: Pair, sizes: Sequence[int], *, context: int, repeats: int) -> tuple[tuple[float, ...], float]:
    """Median seconds of the target's forward and logits over 1, 2, .. tokens, and of drafting one block.

    All programs take turns, so that a slow moment of the machine meets all of them.

    Args:
      pair: with weights; without a drafter, drafting takes 0.
      sizes: numbers of tokens.
      context: committed tokens before them.
      repeats: timed runs of each program, after one that is not timed.
    """
    config = pair.target.config
    cache = init_target_cache(config, context, pair.target.dtype)
    programs: list[Callable[[], Any]] = [
        functools.partial(_verify, pair.target, jnp.zeros(size, jnp.int32), cache, jnp.int32(context)) for size in sizes
    ]
    if pair.drafter is not None:
        chain = DecodeConfig(method="dflash")
        start = jax.jit(prefill, static_argnames=("config", "max_new_tokens"))
        prompt, key = jnp.zeros(context, jnp.int32), jax.random.key(0)
        state = start(pair, prompt, jnp.int32(context), key=key, config=chain, max_new_tokens=1)
        draft = jax.jit(draft_blocks, static_argnames="config")
        programs.append(functools.partial(draft, pair, state, config=chain, noise=None))
    seconds: list[list[float]] = [[] for _ in programs]
    for turn in range(1 + repeats):
        for program, taken in zip(programs, seconds, strict=True):
            start_time = time.perf_counter()
            jax.block_until_ready(program())
            if turn:
                taken.append(time.perf_counter() - start_time)
    medians = [statistics.median(taken) for taken in seconds]
    return tuple(medians[: len(sizes)]), medians[-1] if pair.drafter is not None else 0.0


@jax.jit
def _verify(target: Target, tokens: jax.Array, cache: tuple[KVCache, ...], context: jax.Array) -> Any:
    """All that a verification computes for a chain of tokens behind a full cache."""
    count = tokens.shape[0]
    causal = jnp.tril(jnp.ones((count, count), bool))
    output = target(tokens, context + jnp.arange(count), cache, context, causal)
    return top_tokens(target.logits(output.hidden)), output.kv


def profile_text(profile: Profile) -> str:
    """The profile as a file's text."""
    fields = {"format": FORMAT, "kind": KIND, **dataclasses.asdict(profile)}
    return json.dumps(fields, indent=1) + "\n"


def load_profile(path: str | Path) -> Profile:
    """Reads a profile that the command has written.

    Raises:
      ReanchorError: no such file, or not what the command writes.
    """
    fields = Fields(read_json(Path(path)), str(path))
    fields.get("kind")
    fields.only("kind", KIND, why="other files are not profiles")
    fields.get("format")
    fields.only("format", FORMAT, why="measure it again")
    tokens, seconds, source = fields.integers("tokens", 1, 1 << 20), fields.get("seconds"), fields.get("source")
    if not tokens or tokens[0] != 1 or sorted(set(tokens)) != list(tokens):
        raise fields.fail("tokens", list(tokens), "rising integers from 1")
    fine = isinstance(seconds, list) and len(seconds) == len(tokens)
    if not fine or not all(type(s) in (int, float) and 0 < s < 1e6 for s in seconds):
        raise fields.fail("seconds", seconds, f"{len(tokens)} numbers above 0, one for each of tokens")
    draft_seconds = fields.get("draft_seconds")
    if type(draft_seconds) not in (int, float) or not 0 <= draft_seconds < 1e6:
        raise fields.fail("draft_seconds", draft_seconds, "a number >= 0")
    fields.finish()
    return Profile(tokens, tuple(float(s) for s in seconds), str(source), float(draft_seconds))


if __name__ == "__main__":
    from reanchor_jax.cli.profile import main

    sys.exit(main())
