"""Key/value caches: stacked over layers, read everywhere, written by `commit` and `prefill` alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reanchor_jax.config import LayerConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of committed positions; slot s holds absolute position s.

    How many slots are valid is the decoding state's `length`; what lies beyond is garbage that
    no mask lets through and that later commits overwrite. Heads come before slots because that
    is the batch order of the attention matmuls: no layout change per layer.
    """

    k: jax.Array  # [L, K, S, H]
    v: jax.Array  # [L, K, S, H]

    @property
    def num_slots(self) -> int:
        """S."""
        return self.k.shape[2]


def init_cache(layer: LayerConfig, num_layers: int, num_slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache of `num_slots` slots (0 is legal: nothing to read)."""
    shape = (num_layers, layer.num_kv_heads, num_slots, layer.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_rows(cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array) -> KVCache:
    """Writes rows k, v [L, K, T, H] at slots start .. start+T-1.

    `dynamic_update_slice` would clamp `start` at the buffer's end and overwrite committed rows:
    the caller allocates slack for one whole round (see `prefill.num_slots`).
    """
    at = (0, 0, start, 0)
    return KVCache(
        jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), at),
        jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), at),
    )
