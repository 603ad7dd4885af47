"""Stage 1b of a round: how many tokens of each block are worth verifying (paper, algorithm 2, lines 9 to 11).

A drafter with a confidence says of each draft how likely it is accepted, those before it being so.
What comes behind a draft that will be rejected only makes verification dearer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from reanchor_jax.config import DecodeConfig


def schedule_blocks(confidence: jax.Array | None, num_blocks: int, block_size: int, config: DecodeConfig) -> jax.Array:
    """How many tokens of each block are verified, anchor included: [A] int32, 1 to B.

    `threshold` ends a block before its first draft whose confidence is below
    `config.confidence_threshold`; `hardware` where `hardware_lengths` stops; `none` nowhere. Each
    block is scheduled on its own, a shifted one as if it were the baseline.

    Args:
      confidence: [A, B-1] f32 logits, of `Drafts`; None from a drafter that has none.
      num_blocks: A (static).
      block_size: B (static).
      config: kind of schedule, and its threshold or costs.
    """
    if config.schedule == "none":
        return jnp.full(num_blocks, block_size, jnp.int32)
    assert confidence is not None  # `check_config` has refused such a drafter
    probability = jax.nn.sigmoid(confidence)
    if config.schedule == "threshold":
        return 1 + _leading(probability >= config.confidence_threshold)
    assert config.costs is not None
    return hardware_lengths(probability, config.costs)


def hardware_lengths(confidence: jax.Array, costs: tuple[float, ...]) -> jax.Array:
    """The prefix scheduler: extends while tokens per second improve, stops where they first do not.

    A prefix of n tokens (the anchor and n-1 drafts) gives 1 + a_1 + .. + a_{n-1} tokens in
    expectation, a_k being the probability that drafts 1 .. k are all accepted, and a round with it
    takes `costs[n - 1]`.

    Example: confidences 0.9 0.5 0.5, costs 10 11 12 18. Tokens per unit of cost are 1/10,
    1.9/11 = 0.173, 2.35/12 = 0.196, 2.575/18 = 0.143: 3 tokens are verified.

    Args:
      confidence: [..., B-1] f32 probabilities of acceptance, given that of the drafts before.
      costs: of a round that verifies 1, 2, .. B tokens or more, above 0, in any unit.

    Returns:
      [...] int32 tokens, 1 to B.
    """
    survival = jnp.cumprod(confidence, axis=-1)
    expected = 1 + jnp.cumsum(survival, axis=-1)
    ones = jnp.ones_like(expected[..., :1])
    before = jnp.concatenate([ones, expected[..., :-1]], axis=-1)  # [..., B-1] tokens of the prefix that is extended
    # In units of about the first one, a power of two: nothing is rounded, nor leaves float32's range.
    cost = np.ldexp(np.array(costs[: confidence.shape[-1] + 1]), -int(np.frexp(costs[0])[1]))
    rise, cost_before = (_as_last_axis(x, confidence.ndim) for x in (np.diff(cost), cost[:-1]))
    # (before + a) / (c + rise) > before / c, multiplied out: exact where nothing rises.
    return 1 + _leading(survival * cost_before > before * rise)


def _leading(fine: jax.Array) -> jax.Array:
    """How many entries [..., n] are true before the first false one, [...] int32."""
    return jnp.sum(jnp.cumprod(fine.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)


def _as_last_axis(x: np.ndarray, ndim: int) -> jax.Array:
    return jnp.asarray(x, jnp.float32).reshape((1,) * (ndim - 1) + (-1,))
