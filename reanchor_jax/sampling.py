"""Choosing tokens: position-keyed Gumbel noise, and the filters on the target's logits.

All target randomness at position j comes from `fold_in(key, j)`. Plain and speculative decoding
with the same key therefore draw the same token at every position, which makes losslessness
testable token for token at any temperature. Adding Gumbel noise to logits and taking the top
token samples from their softmax exactly.
"""

from __future__ import annotations

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
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return jnp.argmax(filter_logits(logits / config.temperature, config) + noise, axis=-1).astype(jnp.int32)


def filter_logits(logits: jax.Array, config: DecodeConfig) -> jax.Array:
    """Top-k, then top-p among what is left, then min-p; dropped tokens get -inf.

    Each filter is a threshold on the logit, so tokens tied with the last kept one stay too.
    Example, logits of probabilities (.5, .3, .15, .05): top_p=0.6 keeps (.5, .3), because .5
    alone does not reach 0.6; min_p=0.5 keeps (.5, .3), because .3 >= .5 * .5.
    """
    if config.top_k:
        k = min(config.top_k, logits.shape[-1])
        kth = jax.lax.top_k(logits, k)[0][..., -1:]
        logits = jnp.where(logits >= kth, logits, -jnp.inf)
    if config.top_p < 1:
        ranked = jnp.flip(jnp.sort(logits, axis=-1), axis=-1)
        probs = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probs, axis=-1) - probs  # probability of all better tokens
        last = jnp.min(jnp.where(before < config.top_p, ranked, jnp.inf), axis=-1, keepdims=True)
        logits = jnp.where(logits >= last, logits, -jnp.inf)
    if config.min_p > 0:
        top = jnp.max(logits, axis=-1, keepdims=True)
        logits = jnp.where(logits >= top + jnp.log(jnp.float32(config.min_p)), logits, -jnp.inf)
    return logits


def token_logprobs(logits: jax.Array, tokens: jax.Array, rows: jax.Array, config: DecodeConfig) -> TokenLogprobs:
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
