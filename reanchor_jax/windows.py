"""Sliding windows of attention: which keys a query sees in a layer that slides.

A target's are causal. Published drafters mix `sliding_attention` and `full_attention` layers too,
and three readings of the former are in use (`reanchor_jax.config.SlidingAttention`).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp


def window_mask(
    query_pos: jax.Array, key_pos: jax.Array, window: int, attention: Literal["causal", "symmetric"]
) -> jax.Array:
    """Which keys each query sees, [T, S] bool.

    Args:
      query_pos: [T] int32 absolute positions.
      key_pos: [S] int32 absolute positions, behind or before the queries.
      window: how many positions it spans, the query's own included.
      attention: how the window is read.

    Window 2, keys at 2 3 4 5:          causal     symmetric
                      query at 4       0 1 1 0     0 1 1 1
                      query at 5       0 0 1 1     0 0 1 1
    """
    distance = query_pos[:, None] - key_pos[None, :]
    if attention == "symmetric":
        return jnp.abs(distance) < window
    return (distance >= 0) & (distance < window)
