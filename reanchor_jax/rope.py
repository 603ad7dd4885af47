"""Rotary position embedding and the scalings that stretch it over longer contexts.

Pair i of a head turns by theta^(-2i / H) a position. Scalings slow the pairs that would turn less
than about once in the context that the model was trained on; fast pairs tell neighbours apart and
are left alone. Tables are float32.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import LinearScaling, Llama3Scaling, ProportionalScaling, RopeConfig, YarnScaling


class Rope(NamedTuple):
    """Cosines and sines of some positions."""

    cos: jax.Array  # [T, H] f32
    sin: jax.Array  # [T, H] f32


def make_rope(config: RopeConfig, head_dim: int, positions: jax.Array) -> Rope:
    """Rotary tables of `positions` [T] int32, times the attention factor."""
    freqs = jnp.asarray(rope_frequencies(config, head_dim))
    angles = positions.astype(jnp.float32)[:, None] * freqs[None, :]  # [T, H/2]
    angles = jnp.concatenate([angles, angles], axis=-1)
    factor = attention_factor(config)
    if factor == 1:
        return Rope(jnp.cos(angles), jnp.sin(angles))
    return Rope(jnp.cos(angles) * jnp.float32(factor), jnp.sin(angles) * jnp.float32(factor))


def rope_frequencies(config: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each rotated pair, [H // 2] float32."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    freqs = np.float32(1.0) / np.float32(config.theta) ** exponent
    scaling = config.scaling
    if scaling is None:
        return freqs
    if isinstance(scaling, LinearScaling):
        return freqs / np.float32(scaling.factor)
    if isinstance(scaling, ProportionalScaling):
        # H = 16, factor 0.25: int(0.25 * 16 / 2) = 2 pairs turn, 6 stand still.
        turns = np.arange(head_dim // 2) < int(scaling.partial_rotary_factor * head_dim / 2)
        return np.where(turns, freqs / np.float32(scaling.factor), np.float32(0))
    kept = _llama3_kept(scaling, freqs) if isinstance(scaling, Llama3Scaling) else _yarn_kept(scaling, config, head_dim)
    return ((1 - kept) * freqs / scaling.factor + kept * freqs).astype(np.float32)


def attention_factor(config: RopeConfig) -> float:
    """What cosines and sines are multiplied by, 1 but for `yarn`: its square scales the scores.

    Longer contexts flatten the softmax, and 1 + log(factor) / 10 sharpens it again. Where the file
    gives two `mscale`s, the factor is the ratio of that expression with each before the logarithm.
    """
    scaling = config.scaling
    if not isinstance(scaling, YarnScaling):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def sharpening(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 1 + 0.1 * mscale * math.log(scaling.factor)

    if scaling.mscale and scaling.mscale_all_dim:
        return sharpening(scaling.mscale) / sharpening(scaling.mscale_all_dim)
    return sharpening(1.0)


def _llama3_kept(scaling: Llama3Scaling, freqs: np.ndarray) -> np.ndarray:
    """Which part of each frequency stays, by how many turns fit into the original context."""
    turns = scaling.original_max_position_embeddings * freqs / np.float32(2 * np.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    return np.clip(kept, 0.0, 1.0)  # 0: below low_freq_factor turns, scale fully; 1: leave


def _yarn_kept(scaling: YarnScaling, config: RopeConfig, head_dim: int) -> np.ndarray:
    """The same, falling linearly in the pair's number between the pairs of `beta_fast` and `beta_slow` turns.

    Pair i turns n times in a context of S positions where S / (2 pi) * theta^(-2i / H) = n.
    """

    def pair(turns: float) -> float:
        ratio = scaling.original_max_position_embeddings / (2 * math.pi * turns)
        return head_dim * math.log(ratio) / (2 * math.log(config.theta))

    first, last = pair(scaling.beta_fast), pair(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    # The bound of the last pair is the format's: head_dim - 1, though there are head_dim / 2 pairs.
    first, last = max(first, 0), min(last, head_dim - 1)
    width = last - first or 0.001  # one pair only: a step
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(first)) / np.float32(width)
    return 1 - np.clip(ramp, 0.0, 1.0)
