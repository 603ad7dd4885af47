"""Key/value caches: stacked over layers, read everywhere, written by `commit` and `prefill` alone."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reanchor_jax.config import LayerConfig, TargetConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Keys and values of committed positions; slot s holds absolute position s.

    How many positions are valid is the decoding state's `length`; what lies beyond is garbage that
    no mask lets through and that later commits overwrite. Heads come before slots because that
    is the batch order of the attention matmuls: no layout change per layer.

    A ring holds the last positions alone, for layers whose queries see no others: position p is
    in slot p % S.
    """

    k: jax.Array  # [L, K, S, H]
    v: jax.Array  # [L, K, S, H]
    ring: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.k.shape[2]


def init_cache(layer: LayerConfig, num_layers: int, num_slots: int, dtype: jnp.dtype, ring: bool = False) -> KVCache:
    """An empty cache of `num_slots` slots (0 is legal: nothing to read)."""
    shape = (num_layers, layer.num_kv_heads, num_slots, layer.head_dim)
    return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), ring)


def init_target_cache(
    config: TargetConfig, num_slots: int, dtype: jnp.dtype, most_rows: int = 0
) -> tuple[KVCache, ...]:
    """An empty cache for each layer of the pattern, stacked over its R repeats.

    Layers with a sliding window get a ring where that is smaller. Rows written behind the
    committed ones may prove worthless: the ring is so large that they overwrite nothing which a
    later query sees.

    Example: window 4, writes of at most 3 rows: 7 slots. Length 9, so slots 0 .. 6 hold positions
    7 8 2 3 4 5 6. A round writes 9 10 11 over 2 3 4 and commits none of them: the query at 9 sees
    6 7 8.

    Args:
      config: the target's.
      num_slots: of layers that see everything.
      dtype: of keys and values.
      most_rows: largest number of rows that are written at once.
    """

    def empty(layer: LayerConfig) -> KVCache:
        size = num_slots if layer.sliding_window is None else min(num_slots, layer.sliding_window + most_rows)
        return init_cache(layer, config.num_layers // len(config.pattern), size, dtype, ring=size < num_slots)

    return tuple(empty(layer) for layer in config.pattern)


def slot_positions(cache: KVCache, length: jax.Array) -> jax.Array:
    """Absolute position that each slot holds once `length` are committed, [S] int32.

    Below 0 or from `length` on: nothing yet. Example: a ring of 7 slots, length 9: the last
    position, 8, is in slot 1, so slots 0 .. 6 hold 7 8 2 3 4 5 6.
    """
    slots = jnp.arange(cache.num_slots)
    if not cache.ring:
        return slots
    return length - 1 - (length - 1 - slots) % cache.num_slots


def write_rows(cache: KVCache, k: jax.Array, v: jax.Array, start: jax.Array) -> KVCache:
    """Writes rows k, v [L, K, T, H] of positions start .. start+T-1.

    `dynamic_update_slice` would clamp `start` at the buffer's end and overwrite committed rows:
    the caller allocates slack for one whole round (see `prefill.num_slots`). A ring has more than T
    slots (see `init_target_cache`).
    """
    k, v = k.astype(cache.k.dtype), v.astype(cache.v.dtype)
    if cache.ring:
        slots = (start + jnp.arange(k.shape[2])) % cache.num_slots
        return dataclasses.replace(
            cache,
            k=cache.k.at[:, :, slots].set(k, unique_indices=True),
            v=cache.v.at[:, :, slots].set(v, unique_indices=True),
        )
    at = (0, 0, start, 0)
    return dataclasses.replace(
        cache, k=jax.lax.dynamic_update_slice(cache.k, k, at), v=jax.lax.dynamic_update_slice(cache.v, v, at)
    )
