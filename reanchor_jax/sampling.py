"""Choosing tokens: position-keyed Gumbel noise, and the filters on the target's logits.

All target randomness at position j comes from `fold_in(key, j)`. Plain and speculative decoding
with the same key therefore draw the same token at every position, which makes losslessness
testable token for token at any temperature. Adding Gumbel noise to logits and taking the top
token samples from their softmax exactly.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reanchor_jax.config import DecodeConfig


class TokenLogprobs(NamedTuple):
    """Log-probabilities under the target at temperature 1; K is 0 where none were asked for."""

    chosen: jax.Array  # [T] f32 of the tokens that were issued
    top_ids: jax.Array  # [T, K] int32 most likely tokens, best first
    top: jax.Array  # [T, K] f32


def position_noise(key: jax.Array, positions: jax.Array, vocab_size: int, config: DecodeConfig) -> jax.Array | None:
    """Gumbel noise [T, V] float32 of positions [T]; None at temperature 0.

    Row t depends on `key` and positions[t] alone.
    """
    if config.temperature == 0:
        return None
    return jax.vmap(lambda j: jax.random.gumbel(jax.random.fold_in(key, j), (vocab_size,), jnp.float32))(positions)


def choose_target_tokens(logits: jax.Array, noise: jax.Array | None, config: DecodeConfig) -> jax.Array:
    """The target's own tokens [T] int32 for logits [T, V]; equal logits give the lowest id.

    Args:
      logits: float32 target logits.
      noise: [T, V] rows of `position_noise` for the positions that the tokens will stand at;
        None exactly where the temperature is 0.
      config: temperature and filters.
    """
    if noise is None:
        return top_tokens(logits)
    return top_tokens(filter_logits(logits / config.temperature, config) + noise)


def top_tokens(logits: jax.Array) -> jax.Array:
    """The most likely tokens [...] int32 of logits [..., V]; equal logits give the lowest id.

    On a CPU XLA's argmax goes through a vocabulary one number at a time, its max does not: there
    the best chunk of 128 tokens is found first, then the token in it.
    """
    argmax = functools.partial(jnp.argmax, axis=-1)
    return jax.lax.platform_dependent(logits, cpu=_top_by_chunks, default=argmax).astype(jnp.int32)


def _top_by_chunks(logits: jax.Array) -> jax.Array:
    chunks = _chunk(logits)
    best = jnp.argmax(jnp.max(chunks, axis=-1), axis=-1)  # the first of equal chunks
    return best * chunks.shape[-1] + jnp.argmax(_take_chunk(chunks, best), axis=-1)


def sample_tokens(logits: jax.Array, uniform: jax.Array) -> jax.Array:
    """Tokens [...] int32 from softmax(logits [..., V]), by a number from [0, 1) [...] each.

    The inverse of the cumulative distribution, in two steps: which chunk of 128 tokens, which
    token in it. Needs one random number a token, where Gumbel noise needs V.

    Example with chunks of 2: probabilities .5 .1 .2 .2, uniform .7. Chunks end at .6 and 1: the
    second. Its tokens end at .8 and 1: token 2.
    """
    chunks = _chunk(logits)
    weights = jnp.exp(chunks - jnp.max(chunks, axis=(-2, -1), keepdims=True))  # [..., V/128, 128]
    sums = jnp.sum(weights, axis=-1)  # [..., V/128]
    ends = jnp.cumsum(sums, axis=-1)
    goal = uniform * ends[..., -1]
    # Rounding may leave the goal behind the last end: there the last one is taken.
    chunk = jnp.minimum(jnp.sum(ends <= goal[..., None], axis=-1), ends.shape[-1] - 1)
    start = jnp.take_along_axis(ends - sums, chunk[..., None], axis=-1)
    inner = start + jnp.cumsum(_take_chunk(weights, chunk), axis=-1)  # [..., 128]
    size = chunks.shape[-1]
    token = jnp.minimum(jnp.sum(inner <= goal[..., None], axis=-1), size - 1)
    return (chunk * size + token).astype(jnp.int32)


def _chunk(logits: jax.Array) -> jax.Array:
    """[..., V] as [..., V/n, n], where n is 128, or what of it divides V."""
    return logits.reshape(*logits.shape[:-1], -1, math.gcd(128, logits.shape[-1]))


def _take_chunk(chunks: jax.Array, index: jax.Array) -> jax.Array:
    """Chunk [..., n] number `index` [...] of chunks [..., V/n, n]."""
    return jnp.take_along_axis(chunks, index[..., None, None], axis=-2)[..., 0, :]


def filter_logits(logits: jax.Array, config: DecodeConfig) -> jax.Array:
    """Top-k, then top-p among what is left, then min-p; dropped tokens get -inf.

    Each filter is a threshold on the logit, so tokens tied with the last kept one stay too.
    Example, logits of probabilities (.5, .3, .15, .05): top_p=0.6 keeps (.5, .3), because .5
    alone does not reach 0.6; min_p=0.5 keeps (.5, .3), because .3 >= .5 * .5.
    """
    if config.top_k:
        logits = _keep_best(logits, jnp.ones_like(logits), config.top_k)
    if config.top_p < 1:
        logits = _keep_best(logits, jax.nn.softmax(logits, axis=-1), config.top_p)
    if config.min_p > 0:
        top = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= top + jnp.log(jnp.float32(config.min_p)), logits, -jnp.inf)
    return logits


def _keep_best(logits: jax.Array, weights: jax.Array, mass: float) -> jax.Array:
    """Keeps the fewest best tokens whose weights add up to at least `mass` (all, if none do).

    Bisects the bits of the threshold: 32 masked sums are several times faster on a CPU than
    sorting a vocabulary. Flipping the lower 31 bits of negative floats makes their bit patterns
    sort like the numbers: -2.0, -1.0, 1.0 become ascending integers.

    Example: weights .5 .3 .15 .05 in order of the logits, mass .6: the threshold ends at the
    second logit, since .5 alone is too little and .5 + .3 is enough.
    """
    bits = jax.lax.bitcast_convert_type(logits, jnp.int32)
    ranks = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def halve(_, bounds):
        low, high = bounds  # enough weight at `low`, too little at `high`
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, rounded down, without overflow
        enough = jnp.sum(jnp.where(ranks >= middle, weights, 0.0), axis=-1, keepdims=True) >= mass
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    start = (jnp.min(ranks, axis=-1, keepdims=True), jnp.max(ranks, axis=-1, keepdims=True) + 1)
    threshold, _ = jax.lax.fori_loop(0, 32, halve, start)
    return jnp.where(ranks >= threshold, logits, -jnp.inf)


def token_logprobs(logits: jax.Array | None, tokens: jax.Array, rows: jax.Array, config: DecodeConfig) -> TokenLogprobs:
    """Log-probabilities of tokens[rows] under logits[rows], before temperature and filters.

    Args:
      logits: [N, V] float32; None where `config.logprobs` is.
      tokens: [N] int32.
      rows: [T] int32, which rows of both are asked for.
      config: `logprobs` = K, or None: zeros and empty lists, at no cost.
    """
    if logits is None or config.logprobs is None:
        empty = jnp.zeros((rows.shape[0], 0), jnp.float32)
        return TokenLogprobs(jnp.zeros(rows.shape[0], jnp.float32), empty.astype(jnp.int32), empty)
    log_probs = jax.nn.log_softmax(logits[rows], axis=-1)  # [T, V]
    chosen = jnp.take_along_axis(log_probs, tokens[rows][:, None], axis=1)[:, 0]
    top, top_ids = jax.lax.top_k(log_probs, config.logprobs)
    return TokenLogprobs(chosen, top_ids.astype(jnp.int32), top)
