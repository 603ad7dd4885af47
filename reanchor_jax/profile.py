"""What verification costs by the number of tokens: measured, or estimated from the hardware's figures.

`python -m reanchor_jax.profile --target SOURCE --out FILE` measures a target on this machine.
Schedule `hardware` weighs every draft against these costs.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.cache import init_cache
from reanchor_jax.checkpoint.fields import Fields, read_json
from reanchor_jax.config import TargetConfig
from reanchor_jax.errors import ReanchorError
from reanchor_jax.target import Target

FORMAT = 1

PEAKS = {
    # device kind, as JAX names it: operations a second in bfloat16, bytes a second of memory
    "TPU v4": (275e12, 1.2e12),
    "TPU v5 lite": (197e12, 0.82e12),
    "TPU v5": (459e12, 2.77e12),
    "TPU v6 lite": (918e12, 1.64e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 2.04e12),
    "NVIDIA H100 80GB HBM3": (989e12, 3.35e12),
    "NVIDIA H200": (989e12, 4.8e12),
    # a desktop core or two, float32
    "cpu": (0.1e12, 0.02e12),
}
"""The makers' figures for dense work; that of the CPU is an order of magnitude."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """Seconds of one target forward at some numbers of tokens."""

    tokens: tuple[int, ...]
    """Rising, from 1."""
    seconds: tuple[float, ...]
    source: str
    """Where the seconds are from, in words."""

    def costs(self, most: int) -> tuple[float, ...]:
        """Seconds for 1, 2, .. `most` tokens: between the known sizes on a straight line, beyond them on the last."""
        tokens, seconds = np.array(self.tokens, float), np.array(self.seconds)
        if most > tokens[-1]:
            slope = (seconds[-1] - seconds[-2]) / (tokens[-1] - tokens[-2]) if len(tokens) > 1 else 0.0
            tokens = np.append(tokens, most)
            seconds = np.append(seconds, seconds[-1] + max(slope, 0.0) * (most - tokens[-2]))
        return tuple(float(x) for x in np.interp(np.arange(1, most + 1), tokens, seconds))


def roofline(config: TargetConfig, dtype: jnp.dtype, device_kind: str) -> Profile:
    """An estimate where nothing was measured: reading all weights once, or computing, whichever takes longer.

    Args:
      config: of the target.
      dtype: of its weights.
      device_kind: as `jax.devices()[0].device_kind` says it.

    Raises:
      ReanchorError: a device without figures here.
    """
    if device_kind not in PEAKS:
        raise ReanchorError(
            f"there is no roofline profile for the device {device_kind!r}, only for {', '.join(sorted(PEAKS))}; "
            "measure one: python -m reanchor_jax.profile"
        )
    operations, bandwidth = PEAKS[device_kind]
    layer = config.layer
    attention = 2 * layer.hidden_size * layer.head_dim * (layer.num_heads + layer.num_kv_heads)
    mlp = 3 * layer.hidden_size * layer.intermediate_size
    weights = config.num_layers * (attention + mlp) + config.vocab_size * layer.hidden_size
    reading, computing = weights * jnp.dtype(dtype).itemsize / bandwidth, 2 * weights / operations
    # Flat up to the knee, where both take the same time, then a line through the origin.
    knee = max(1, math.floor(reading / computing))
    sizes = (1, knee, 2 * knee) if knee > 1 else (1, 2)
    seconds = tuple(max(reading, computing * n) for n in sizes)
    return Profile(sizes, seconds, f"roofline of {device_kind}, {jnp.dtype(dtype).name}")


def measure(
    target: Target,
    sizes: Sequence[int],
    *,
    context: int,
    repeats: int,
    on_repeat: Callable[[], None] = lambda: None,
) -> tuple[float, ...]:
    """Median seconds of the target's forward and logits over 1, 2, .. tokens behind a context.

    The sizes take turns, so that a slow moment of the machine meets all of them.

    Args:
      target: with its weights.
      sizes: numbers of tokens.
      context: committed tokens before them.
      repeats: timed runs of each size, after one that is not timed.
      on_repeat: called after every turn.
    """
    config = target.config
    cache = init_cache(config.layer, config.num_layers, context, target.dtype)

    @jax.jit
    def verify(target: Target, tokens: jax.Array) -> jax.Array:
        count = tokens.shape[0]
        causal = jnp.tril(jnp.ones((count, count), bool))
        output = target(tokens, context + jnp.arange(count), cache, jnp.int32(context), causal)
        return jnp.argmax(target.logits(output.hidden), axis=-1)

    inputs = {size: jnp.zeros(size, jnp.int32) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for turn in range(1 + repeats):
        for size, tokens in inputs.items():
            start = time.perf_counter()
            jax.block_until_ready(verify(target, tokens))
            if turn:
                seconds[size].append(time.perf_counter() - start)
        on_repeat()
    return tuple(statistics.median(seconds[size]) for size in sizes)


def profile_text(profile: Profile) -> str:
    """The profile as a file's text."""
    fields = {"format": FORMAT, "kind": "verification cost", **dataclasses.asdict(profile)}
    return json.dumps(fields, indent=1) + "\n"


def load_profile(path: str | Path) -> Profile:
    """Reads a profile that the command has written.

    Raises:
      ReanchorError: no such file, or not what the command writes.
    """
    fields = Fields(read_json(Path(path)), str(path))
    fields.get("kind")
    fields.only("kind", "verification cost", why="other files are not profiles")
    fields.get("format")
    fields.only("format", FORMAT, why="measure it again")
    tokens, seconds, source = fields.integers("tokens", 1, 1 << 20), fields.get("seconds"), fields.get("source")
    if not tokens or tokens[0] != 1 or sorted(set(tokens)) != list(tokens):
        raise fields.fail("tokens", list(tokens), "rising integers from 1")
    fine = isinstance(seconds, list) and len(seconds) == len(tokens)
    if not fine or not all(type(s) in (int, float) and 0 < s < 1e6 for s in seconds):
        raise fields.fail("seconds", seconds, f"{len(tokens)} numbers above 0, one for each of tokens")
    fields.finish()
    return Profile(tokens, tuple(float(s) for s in seconds), str(source))


if __name__ == "__main__":
    from reanchor_jax.cli.profile import main

    sys.exit(main())
